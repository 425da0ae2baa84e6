"""A forward pass in pieces over a cache computes what one pass over everything does; transformers is not needed."""

from __future__ import annotations

import pytest
import torch
from parity import randomize
from tiny_models import tiny

import shardzoo
from shardzoo.models.blocks.cache import Cache, LayerKVCache
from shardzoo.mpu import tp_rank

GPT2, T5, GLM = tiny("gpt2"), tiny("t5", layers=2, d_kv=6), tiny("glm")
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def model_of(config: dict, mesh=None):
    model = shardzoo.from_config(config, mesh, seed=3).eval()
    if mesh is None:
        randomize(model, 0)
    return model


def ids_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def gpt2_in_pieces(mesh, padded: bool):
    model, ids = model_of(GPT2, mesh), ids_of(3, 11)
    mask = torch.ones(3, 11, dtype=torch.long)
    if padded:
        mask[0, :4] = 0
        mask[2, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = mask if padded else None
    whole = model(ids, attention_mask=given, position_ids=positions).logits
    cache, pieces, start = Cache(2, 16), [], 0
    for stop in (5, 6, 9, 10, 11):
        seen = None if given is None else given[:, :stop]
        inputs = {"attention_mask": seen, "position_ids": positions[:, start:stop]}
        pieces.append(model(ids[:, start:stop], **inputs, cache=cache).logits)
        start = stop
    last = model(ids, attention_mask=given, position_ids=positions, logits_to_keep=2).logits
    seen = mask.bool()
    return whole[seen], torch.cat(pieces, 1)[seen], whole[:, -2:], last, cache.nbytes


@pytest.mark.parametrize("padded", [False, True])
def test_gpt2(run_mesh, padded):
    for size in (1, 2, 4):
        for whole, pieces, end, last, nbytes in run_mesh(size, gpt2_in_pieces, padded):
            torch.testing.assert_close(pieces, whole, **TOLERANCE)
            torch.testing.assert_close(last, end, **TOLERANCE)
            assert (
                nbytes == 2 * 2 * 3 * (4 // size) * 16 * 8 * 4
            )  # k and v, layers, rows, heads, positions, size, fp32


@torch.no_grad()
def t5_in_pieces(mesh):
    model, source, ids = model_of(T5, mesh), ids_of(2, 7), ids_of(6, 9)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    encoded = model.encode(source, mask)
    copies = encoded.last_hidden_state.repeat_interleave(3, 0)
    whole = model(None, mask.repeat_interleave(3, 0), ids, encoder_outputs=(copies,)).logits
    cache, pieces, start = Cache(2, 9, 7), [], 0
    for stop in (4, 5, 7, 9):
        step = model(None, mask, ids[:, start:stop], encoder_outputs=encoded, cache=cache)
        pieces.append(step.logits)
        start = stop
    return whole, torch.cat(pieces, 1), cache.nbytes, tp_rank(mesh)


def test_t5_with_several_rows_for_each_source(run_mesh):
    for size in (1, 2, 4):
        for whole, pieces, nbytes, _ in run_mesh(size, t5_in_pieces):
            torch.testing.assert_close(pieces, whole, **TOLERANCE)
            assert nbytes == 2 * 2 * (4 // size) * 6 * 4 * (6 * 9 + 2 * 7)


@torch.no_grad()
def test_glm_as_with_mems():
    model, ids = model_of(GLM), ids_of(2, 9)
    text = torch.tensor([0, 1, 2, 3, 4, 5, 3, 3, 3])
    span = torch.tensor([0, 0, 0, 0, 0, 0, 1, 2, 3])
    positions = torch.stack([text, span])[None]
    first = model(ids[:, :6], positions[..., :6], torch.tensor([6, 6]))
    expected = model(ids[:, 6:], positions[..., 6:], torch.tensor([0, 0]), mems=first.mems)
    cache = Cache(2, 9)
    model(ids[:, :6], positions[..., :6], torch.tensor([6, 6]), cache=cache)
    step = model(ids[:, 6:], positions[..., 6:], torch.tensor([0, 0]), cache=cache)
    torch.testing.assert_close(step.logits, expected.logits, **TOLERANCE)
    assert step.mems is None


def test_rows_are_selected_and_room_ends():
    kept = LayerKVCache(4)
    keys = torch.arange(3.0)[:, None, None, None].expand(3, 2, 3, 5)
    kept.extend(keys, -keys)
    kept.select(torch.tensor([2, 0, 0, 1]))
    keys, values = kept.filled()
    assert keys[:, 0, 0, 0].tolist() == [2, 0, 0, 1]
    assert torch.equal(values, -keys)
    assert kept.extend(torch.ones(4, 2, 1, 5), torch.ones(4, 2, 1, 5))[0].shape == (4, 2, 4, 5)
    with pytest.raises(ValueError, match="room for 4 positions, but 5 are needed"):
        kept.extend(torch.ones(4, 2, 1, 5), torch.ones(4, 2, 1, 5))


def test_a_decoder_with_relative_bias_sees_no_later_position_in_inference_mode():
    from shardzoo.models import from_config

    model = from_config(tiny("t5")).eval()
    ids = torch.arange(3, 17).view(2, 7)
    with torch.no_grad():
        wanted = model(input_ids=ids, decoder_input_ids=ids).logits
    with torch.inference_mode():
        found = model(input_ids=ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
