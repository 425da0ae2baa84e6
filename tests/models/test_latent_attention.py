"""Latent attention: what a cache keeps, and decoding from it without making keys again. tests/zoo compares the rest."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny

import shardzoo
from shardzoo.models import config_from_dict
from shardzoo.models.blocks.cache import Cache

CONFIG = tiny("deepseek_v3")
RANK, ROPE = CONFIG["kv_lora_rank"], CONFIG["qk_rope_head_dim"]


@pytest.fixture(scope="module")
def model():
    return shardzoo.from_config(CONFIG, seed=1, dtype=torch.float64).eval()


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 20])
def test_decoding_from_latent_vectors_equals_a_whole_pass(model, ids, first):
    """A long prompt makes its keys, and few queries do not; the rows have padding on the left."""
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    cache = Cache(CONFIG["num_hidden_layers"], ids.shape[1])
    attention = model.blocks[0].attention
    assert attention.attends_to_latents(torch.empty(2, 4, first, 10)) == (first == 1)
    start = 0
    for stop in (first, first + 1, 24):
        own = {
            "attention_mask": mask[:, :stop],
            "position_ids": positions[:, start:stop],
            "cache": cache,
        }
        found = model(input_ids=ids[:, start:stop], **own).logits
        seen = mask[:, start:stop].bool()
        torch.testing.assert_close(found[seen], expected[:, start:stop][seen], rtol=1e-9, atol=1e-9)
        start = stop
    for layer in cache.layers:
        assert layer.keys.shape == (2, 1, 24, RANK)
        assert layer.values.shape == (2, 1, 24, ROPE)


@torch.no_grad()
def test_a_cache_keeps_the_same_numbers_whatever_the_number_of_heads(ids):
    sizes = []
    for heads in (4, 8):
        changes = {"num_attention_heads": heads, "num_key_value_heads": heads}
        model = shardzoo.from_config({**CONFIG, **changes}, seed=1).eval()
        cache = Cache(2, 24)
        model(input_ids=ids, cache=cache)
        sizes.append(cache.nbytes)
    assert sizes == [2 * 2 * 24 * (RANK + ROPE) * 4] * 2


def test_gradients_make_the_keys(model):
    assert not model.blocks[0].attention.attends_to_latents(torch.empty(2, 4, 1, 10))


def test_fewer_key_value_heads_are_refused():
    with pytest.raises(ValueError, match="num_key_value_heads=2 must be num_attention_heads=4"):
        config_from_dict(tiny("deepseek_v3", num_key_value_heads=2))
