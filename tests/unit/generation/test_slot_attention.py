import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lit_asyncrl.generation.slot_attention import slot_attention


def _layer(groups: int) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.num_key_value_groups = groups
    return layer


def test_grouped_query_heads_give_what_repeated_keys_and_values_give():
    query, key, value = torch.randn(3, 6, 1, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    mask = torch.zeros(3, 1, 1, 5)
    mask[0, ..., 3:] = -torch.inf
    arguments = (_layer(3), query, key, value, mask)
    torch.testing.assert_close(slot_attention(*arguments, scaling=0.3)[0], sdpa_attention_forward(*arguments, scaling=0.3)[0])


def test_a_prompt_without_a_mask_is_causal():
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    layer = _layer(2)
    whole = slot_attention(layer, query, key, value, None)[0]
    start = slot_attention(layer, query[:, :, :3], key[:, :, :3], value[:, :, :3], None)[0]
    torch.testing.assert_close(whole[:, :3], start)
