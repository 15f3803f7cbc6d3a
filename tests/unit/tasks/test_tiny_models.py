"""The packaged tiny models and their tokenizer take the path of a user's own model."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from lit_asyncrl.policy import PACKAGED_MODELS, check_vocabulary, context_length, end_of_sequence_ids, load_model, load_tokenizer
from lit_asyncrl.tasks import Arithmetic, Countdown, ReverseDigits, SortDigits

MODELS = {"tiny-reverse": (4, 10), "tiny-reverse10": (10, 10)}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-reverse")


@pytest.fixture(scope="module")
def tool():
    file = Path(__file__).parents[3] / "tools" / "make_tiny_model.py"
    spec = importlib.util.spec_from_file_location("make_tiny_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MODELS)
def test_a_packaged_model_is_small(name):
    assert sum(p.numel() for p in load_model(name).parameters()) <= 300_000


@pytest.mark.parametrize("name", MODELS)
def test_a_packaged_model_fits_its_tokenizer(name):
    check_vocabulary(load_tokenizer(name), load_model(name).config.vocab_size, name)


@pytest.mark.parametrize("name", MODELS)
def test_a_packaged_model_says_its_context_and_end_of_sequence(name):
    assert (context_length(load_model(name)), end_of_sequence_ids(name, load_tokenizer(name))) == (256, (1,))


@pytest.mark.parametrize(("name", "digits"), MODELS.items())
def test_a_packaged_model_is_weak_as_its_file_says(name, digits, tool):
    torch.manual_seed(0)
    task = ReverseDigits(*digits, seed=11)
    measured = tool.heldout_accuracy(load_model(name), task, load_tokenizer(name), num_prompts=512, sample=False)
    said = json.loads((PACKAGED_MODELS / name / "training.json").read_text(encoding="utf-8"))["greedy_accuracy"]
    # Standard error of a share near 0.5 of 512 prompts: 0.022.
    assert said <= 0.55 and abs(measured - said) < 0.09


@pytest.mark.parametrize("text", ["r  4071=", "1+(2-3)*4/5=", "c3,7,25>46=", "", "  ", "1 2"])
def test_encoding_and_decoding_give_the_text_back_one_token_a_character(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert (tokenizer.decode(ids), len(ids)) == (text, len(text))


def test_special_tokens_are_left_out_of_decoded_text(tokenizer):
    assert tokenizer.decode([*tokenizer("12")["input_ids"], 1, 0, 0], skip_special_tokens=True) == "12"


def test_an_unknown_character_becomes_the_unknown_token(tokenizer):
    assert tokenizer("1é2")["input_ids"].count(tokenizer.unk_token_id) == 1


@pytest.mark.parametrize("task", [ReverseDigits(), SortDigits(), Arithmetic(["+", "-", "*"]), Countdown()], ids=lambda t: t.name)
def test_the_tokenizer_knows_the_characters_of_every_procedural_task(tokenizer, task):
    assert tokenizer.unk_token_id not in tokenizer("".join(task.train_example(i).prompt for i in range(50)))["input_ids"]


def test_warm_start_is_reproducible(tool):
    def weights():
        torch.manual_seed(0)
        model, tokenizer = tool.make_model(16, 8, 1, 32), tool.make_tokenizer(32)
        tool.warm_start(model, ReverseDigits(2, 3), tokenizer, steps=3, batch_size=4, learning_rate=1e-3)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(), weights())


def test_warm_start_labels_answer_and_end_of_sequence_only(tool, tokenizer):
    ids, labels = tool.supervised_batch(ReverseDigits(3, 3), tokenizer, range(2))
    # Prompt "rddd=" has 5 tokens without a label; 3 digits and the end of sequence have one.
    assert (labels[:, :5] == tool.IGNORED).all() and torch.equal(labels[:, 5:], ids[:, 5:])
