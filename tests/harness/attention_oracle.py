"""Attention by PyTorch's operators on whole scores, which Triton's kernels are compared with, and broken kernels."""

from __future__ import annotations

import importlib.util
import math
import sys

import torch

from shardzoo.ops.dropout_mask import attention_rows, row_keys

# The largest error as a share of the largest value, or of 1. The interpreter truncates to bf16, where a GPU rounds.
BOUNDS = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 6e-2}


def attend_in_fp64(tensors, rules):
    """Returns attention and the log of the sums, by PyTorch's operators on whole scores."""
    q, k, v, bias = tensors
    mask, prefix, lengths, sample_keys, scale, causal, dropout, first_head, first_row, softcap = (
        rules
    )
    batch, heads, queries, _ = q.shape
    total = k.shape[2]
    served = heads // k.shape[1]
    scores = scale * q @ k.repeat_interleave(served, 1).mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(queries)[:, None]
    column = torch.arange(total)[None]
    if bias is not None:
        scores = scores + bias[:, column - row + queries - 1]
    visible = torch.ones(batch, heads, queries, total, dtype=torch.bool)
    if causal:
        seen = (column <= row + total - queries).expand(batch, 1, queries, total)
        if prefix is not None:
            seen = seen | (column < prefix[:, None, None, None])
        visible = visible & seen
    if lengths is not None:
        visible = visible & (column < lengths[:, None, None, None])
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        scores = scores + mask.double()
    scores = scores.masked_fill(~visible, -math.inf)
    probabilities = scores.softmax(-1).nan_to_num(0.0)
    if dropout:
        rows = attention_rows(first_head, heads, first_row + queries, "cpu")
        rows = rows.view(heads, -1)[:, first_row:].flatten()
        keep = keep_by_row_keys(row_keys(sample_keys, rows), total, dropout)
        probabilities = probabilities * keep.view(batch, heads, queries, total) / (1 - dropout)
    return probabilities @ v.repeat_interleave(served, 1), scores.logsumexp(-1)


def keep_by_row_keys(keys, columns, dropout):
    """Returns which elements the documented hash keeps, [*keys.shape, columns], in Python's integers."""
    low = (keys & 0xFFFFFFFF)[..., None]
    high = ((keys >> 32) & 0xFFFFFFFF)[..., None]
    h = (low + torch.arange(columns)) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    h = (h * 0x21F0AAAD) & 0xFFFFFFFF
    h = h ^ high
    h = h ^ (h >> 15)
    h = (h * 0x735A2D97) & 0xFFFFFFFF
    h = h ^ (h >> 15)
    return h >= round(dropout * 2**32)


def load_mutant(kernels, folder, text, replacement):
    """Returns a module of kernels with one change."""
    with open(kernels.__file__, encoding="utf-8") as file:
        source = file.read()
    assert source.count(text) == 1, f"{text!r} is {source.count(text)} times in the kernels"
    path = folder / "mutant.py"
    path.write_text(source.replace(text, replacement), encoding="utf-8")
    name = f"{kernels.__package__}.{folder.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
