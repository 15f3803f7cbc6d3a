"""Loading a policy: what does not fit is refused by name before anything else happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from policies import PACKAGED, save_policy
from torch import nn

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.policy import (
    check_vocabulary,
    context_length,
    disable_dropout,
    end_of_sequence_ids,
    load_model,
    load_tokenizer,
    named_weights,
    probe_ids,
    resolve_policy_path,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def test_a_packaged_model_is_found_by_name():
    assert (Path(resolve_policy_path(PACKAGED)) / "config.json").is_file()


def test_a_missing_path_is_refused_with_the_packaged_names():
    with pytest.raises(ConfigurationError, match=rf"{PACKAGED}.*got '/no/such/model' \(no such folder\)"):
        resolve_policy_path("/no/such/model")


def test_a_folder_without_config_json_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"the folder has no config\.json"):
        resolve_policy_path(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused(policy, tmp_path):
    (tmp_path / "config.json").write_text((Path(policy) / "config.json").read_text(), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"model\.policy\.path must hold a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_config_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"model\.policy\.path must hold a causal language model"):
        load_model(str(tmp_path))


def test_a_torn_weight_file_is_refused(policy, tmp_path):
    for file in Path(policy).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match=r"model\.policy\.path must hold a causal language model"):
        load_model(str(tmp_path))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_both_sizes():
    tokenizer = load_tokenizer(PACKAGED)
    largest = max(tokenizer.get_vocab().values())
    with pytest.raises(ConfigurationError, match=f"token id {largest} for {largest} embeddings"):
        check_vocabulary(tokenizer, largest, "some/model")


def test_a_tokenizer_smaller_than_the_vocabulary_fits():
    check_vocabulary(load_tokenizer(PACKAGED), 1000, "some/model")


def test_every_end_of_sequence_id_of_the_generation_config_counts(tmp_path):
    path = save_policy(tmp_path, generation_eos=[5, 3])
    assert end_of_sequence_ids(path, load_tokenizer(path)) == (1, 3, 5)


def test_without_further_ids_the_tokenizer_s_own_ends_a_response(policy):
    assert end_of_sequence_ids(policy, load_tokenizer(policy)) == (1,)


def test_a_generation_config_without_the_key_adds_nothing(policy, tmp_path):
    for file in Path(policy).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True}), encoding="utf-8")
    assert end_of_sequence_ids(str(tmp_path), load_tokenizer(str(tmp_path))) == (1,)


def test_tied_tensors_are_named_once(policy):
    weights = named_weights(load_model(policy))
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights


def test_named_weights_share_storage_with_the_model(policy):
    model = load_model(policy)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(0.5)
    assert bool((named_weights(model)["model.embed_tokens.weight"] == 0.5).all())


def test_the_context_comes_from_the_model_s_config(policy):
    assert context_length(load_model(policy)) == 64


def test_the_probe_is_a_fixed_sequence_of_known_ids():
    tokenizer = load_tokenizer(PACKAGED)
    ids = probe_ids(tokenizer, 32)
    assert ids == probe_ids(tokenizer, 32)
    assert len(ids) == 16 and set(ids) <= set(tokenizer.get_vocab().values())
    assert len(set(ids)) > 4


def test_every_dropout_is_set_to_zero():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3))
    model.attention_dropout = 0.2
    disable_dropout(model)
    assert model[1].p == 0.0
    assert model.attention_dropout == 0.0
