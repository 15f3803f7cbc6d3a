"""Makes a tiny Qwen3-architecture language model with a character tokenizer, warm-started to a weak level by supervised learning.

The packaged models come from it; each one's `training.json` holds its command and its figures:

    python tools/make_tiny_model.py --task ReverseDigits --task.min_digits 10 --task.max_digits 10 --steps 158 --out /tmp/tiny

Any task whose prompt and answer are text of the 29 characters below will do. The same seed gives the same weights on the same
kind of machine; elsewhere, matrix products round differently and the accuracies differ a little.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.interfaces import Task
from lit_asyncrl.tasks import ReverseDigits  # noqa: F401 - makes the short class names known to the command line

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*/=(), rsacxynm>:"
VOCABULARY = [PAD, EOS, UNK, *CHARACTERS]
IGNORED = -100


def make_tokenizer(max_length: int) -> Any:
    """A tokenizer with one token per character; other characters become `<unk>`, and decoding gives the text back as it was."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_model(hidden_size: int, head_dim: int, num_layers: int, max_length: int) -> Any:
    """A Qwen3 causal language model with 4 query heads, 2 key-value heads and tied embeddings, float32."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(EOS),
        pad_token_id=VOCABULARY.index(PAD),
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text.

    Raises:
        ConfigurationError: the text holds a character that is not in the vocabulary.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.unk_token_id in ids:
        raise ConfigurationError(f"task must use the characters {CHARACTERS!r} only, got {text!r}. Choose another task.")
    return ids


def supervised_batch(task: Task, tokenizer: Any, indices: range) -> tuple[Tensor, Tensor]:
    """Input ids and labels, both [B, T] int64: prompt, answer and end of sequence, of which the prompt has no label."""
    rows = []
    for index in indices:
        example = task.train_example(index % task.num_train)
        if not isinstance(example.prompt, str) or not isinstance(example.answer, str):
            raise ConfigurationError(f"task must have text prompts and answers, got {example}. Choose another task.")
        prompt = encode(tokenizer, example.prompt)
        answer = [*encode(tokenizer, example.answer), tokenizer.eos_token_id]
        rows.append((prompt + answer, [IGNORED] * len(prompt) + answer))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows])
    return ids, labels


def warm_start(model: Any, task: Task, tokenizer: Any, *, steps: int, batch_size: int, learning_rate: float) -> None:
    """Supervised learning of the answers; the learning rate rises over 20 steps and then stays. Leaves evaluation mode on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model.train()
    for step in range(steps):
        ids, labels = supervised_batch(task, tokenizer, range(step * batch_size, (step + 1) * batch_size))
        # Right padding is causally invisible to every labelled token, so no attention mask is needed.
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    model.eval()


@torch.no_grad()
def heldout_accuracy(model: Any, task: Task, tokenizer: Any, *, num_prompts: int, sample: bool) -> float:
    """Share of held-out prompts whose response equals the answer; greedy, or sampled at temperature 1."""
    tokenizer.padding_side = "left"
    correct = 0
    examples = [task.heldout_example(i) for i in range(min(num_prompts, task.num_heldout))]
    budget = max(len(str(example.answer)) for example in examples) + 1
    for start in range(0, len(examples), 256):
        chunk = examples[start : start + 256]
        inputs = tokenizer([example.prompt for example in chunk], return_tensors="pt", padding=True, return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=budget, do_sample=sample)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        correct += sum(text == example.answer for text, example in zip(texts, chunk, strict=True))
    tokenizer.padding_side = "right"
    return correct / len(examples)


def main(
    task: Task,
    out: str,
    steps: int = 160,
    first_task: Task | None = None,
    first_steps: int = 0,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    hidden_size: int = 64,
    head_dim: int = 32,
    num_layers: int = 2,
    max_length: int = 256,
    seed: int = 0,
) -> None:
    """Make, warm-start, measure and save a tiny model.

    Args:
        task: what to learn, for example `ReverseDigits`.
        out: folder to write.
        steps: optimizer steps of supervised learning.
        first_task: what to learn before that, for example the longest strings only: without it a model of varied lengths knows
            the short ones perfectly and the long ones not at all, and reinforcement learning has nothing to hold on to.
        first_steps: optimizer steps on `first_task`.
        batch_size: examples a step.
        learning_rate: of AdamW.
        hidden_size: width.
        head_dim: width of an attention head; vLLM serves 32 and above.
        num_layers: transformer blocks.
        max_length: context in tokens.
        seed: of the initial weights.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    started = time.perf_counter()
    tokenizer = make_tokenizer(max_length)
    model = make_model(hidden_size, head_dim, num_layers, max_length)
    if first_task is not None:
        warm_start(model, first_task, tokenizer, steps=first_steps, batch_size=batch_size, learning_rate=learning_rate)
    warm_start(model, task, tokenizer, steps=steps, batch_size=batch_size, learning_rate=learning_rate)
    trained_s = time.perf_counter() - started
    figures = {
        "command": shlex.join(["python", "tools/make_tiny_model.py", *sys.argv[1:]]),
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "heldout_prompts": 1024,
        "greedy_accuracy": round(heldout_accuracy(model, task, tokenizer, num_prompts=1024, sample=False), 3),
        "sampled_accuracy": round(heldout_accuracy(model, task, tokenizer, num_prompts=1024, sample=True), 3),
    }
    print(json.dumps(figures, indent=2), f"\nsupervised learning took {trained_s:.1f} s")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (Path(out) / "training.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for file in Path(out).iterdir():
        file.chmod(0o644)  # safetensors writes files that only the owner can read; packaged ones are for everybody


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main, as_positional=False)
