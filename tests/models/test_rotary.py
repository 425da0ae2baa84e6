"""Rotary positions with every published scaling, and masks of sliding windows, against transformers, bit for bit."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

from shardzoo.models.blocks.masks import AttentionMask, window_mask
from shardzoo.models.blocks.rotary import (
    check_rope_parameters,
    read_rope_parameters,
    rotary_embedding,
    rotate,
)

HEAD_SIZE, POSITIONS = 12, 20
ORIGINAL = {"original_max_position_embeddings": 16}
FACTORS = {
    "short_factor": [1 + i / 7 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "yarn with every number": {
        "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 8, "beta_slow": 2,
        "truncate": False, **ORIGINAL,
    },
    "yarn with a factor of attention": {"rope_type": "yarn", "factor": 1.25, "attention_factor": 0.9},
    "longrope": {"factor": 4.0, **FACTORS, **ORIGINAL},
    "longrope without a factor": {"rope_type": "longrope", **FACTORS, **ORIGINAL},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
}  # fmt: skip


def queries_and_keys(length: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(2, 2, 3, length, HEAD_SIZE, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [7, 40])  # within the original length, and beyond every length
@pytest.mark.parametrize("theta", [10000.0, 500.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rotation_is_that_of_transformers(name, theta, length, dtype):
    stored = {"rope_type": name, "rope_theta": theta, **SCALINGS[name]}
    theirs = transformers.LlamaConfig(
        hidden_size=24,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters=dict(stored),
    )
    positions = torch.arange(length).repeat(2, 1) + torch.tensor([[0], [3]])
    q, k = queries_and_keys(length, dtype)
    expected = modeling_llama.apply_rotary_pos_emb(
        q, k, *modeling_llama.LlamaRotaryEmbedding(theirs)(q, positions)
    )

    parameters = read_rope_parameters({"rope_parameters": stored}, POSITIONS)
    check_rope_parameters(parameters, HEAD_SIZE)
    rotary = rotary_embedding(positions, HEAD_SIZE, parameters, POSITIONS, dtype)
    turned = rotate(q, k, rotary)
    assert all(torch.equal(x, y) for x, y in zip(turned, expected, strict=True))


@pytest.mark.parametrize("name", ["default", "dynamic"])
@pytest.mark.parametrize(
    "partial", [0.25, 0.5, 0.6, 1.0]
)  # 3, 6, 7 or 12 features; of an odd number, one more turns
def test_interleaved_and_partial_rotation_is_that_of_transformers(partial, name):
    stored = {
        "rope_type": name,
        "rope_theta": 500.0,
        "partial_rotary_factor": partial,
        **SCALINGS[name],
    }
    theirs = transformers.Glm4Config(
        hidden_size=24, num_attention_heads=2, head_dim=HEAD_SIZE, max_position_embeddings=POSITIONS,
        rope_parameters=dict(stored),
    )  # fmt: skip
    q, k = queries_and_keys(40, torch.float32)
    positions = torch.arange(40)[None]
    expected = modeling_glm4.apply_rotary_pos_emb(
        q, k, *modeling_glm4.Glm4RotaryEmbedding(theirs)(q, positions)
    )
    parameters = read_rope_parameters({"rope_parameters": stored}, POSITIONS)
    check_rope_parameters(parameters, HEAD_SIZE)
    rotary = rotary_embedding(
        positions, HEAD_SIZE, parameters, POSITIONS, q.dtype, interleaved=True
    )
    turned = rotate(q, k, rotary)
    assert all(torch.equal(x, y) for x, y in zip(turned, expected, strict=True))


def test_old_and_new_spellings_are_the_same():
    scaling = {"type": "linear", "factor": 2.0}
    old = {"rope_theta": 300.0, "rope_scaling": scaling, "partial_rotary_factor": 0.5}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0, "partial_rotary_factor": 0.5}
    assert (
        read_rope_parameters(old, 64) == read_rope_parameters({"rope_parameters": new}, 64) == new
    )
    assert read_rope_parameters({"rope_scaling": None}, 64, theta=1e6) == {
        "rope_type": "default",
        "rope_theta": 1e6,
    }


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        ({"rope_type": "mrope"}, "'mrope' is not supported; use one of default, linear"),
        ({"rope_type": "linear"}, "of type linear need factor"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor must be a number of at least 1"),
        ({"rope_theta": -1}, "rope_theta must be a number"),
        ({"partial_rotary_factor": 0.05}, "must be from 1 to 12, not 0.6"),
        ({"partial_rotary_factor": 1.1}, "must be from 1 to 12, not 13.2"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.2},
            "must be from 3 to 12, not 2.4",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "a list of 6 numbers",
        ),
    ],
)
def test_parameters_that_do_not_work_are_refused(stored, problem):
    with pytest.raises(ValueError, match=problem):
        check_rope_parameters(
            read_rope_parameters({"rope_parameters": stored}, POSITIONS), HEAD_SIZE
        )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [1, 3, 6, 7, 30])
@pytest.mark.parametrize(("length", "cached"), [(7, 0), (1, 6), (3, 4)])
def test_causal_windows_are_those_of_transformers(length, cached, window, padded):
    total = cached + length
    mask = torch.ones(2, total, dtype=torch.long)
    mask[0, :2], mask[1, 5:] = 0, 0
    config = transformers.MistralConfig(sliding_window=window, num_hidden_layers=1)
    config._attn_implementation = "eager"
    whole = masking_utils.create_sliding_window_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(2, total, 4),
        attention_mask=mask if padded else None,
        past_key_values=None,
    )
    found = window_mask(
        mask if padded else None, length, cached, window, causal=True, device=mask.device
    )
    if found is None:
        assert not padded
        assert total <= window
    found = AttentionMask.from_arguments(found, True, length).to_tensor(length, total, mask.device)
    found = torch.tensor(True) if found is None else found
    assert torch.equal(found.expand(2, 1, length, total), whole[:, :, cached:] == 0)


@pytest.mark.parametrize("window", [1, 3, 6, 30])
def test_windows_on_both_sides_exclude_what_is_farther_away(window):
    found = window_mask(None, 7, 0, window, causal=False, device=torch.device("cpu"))
    expected = torch.tensor([[abs(i - j) <= window for j in range(7)] for i in range(7)])
    assert expected.all() if found is None else torch.equal(found, expected)
