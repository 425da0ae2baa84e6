"""Pads prompts to one length, and checks them before any is decoded.

Every rank raises the same errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .settings import GenerationSettings


def pad_prompts(
    rows: Sequence[Sequence[int]], pad: int, *, left: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns the token ids of several prompts, padded on one side, and their mask, int64 [B, T]
    each.
    """
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        start = width - len(row) if left else 0
        place = slice(start, start + len(row))
        ids[number, place] = torch.tensor(row, dtype=torch.int64)
        mask[number, place] = 1
    return ids, mask


def check_ids(ids: Tensor, vocab_size: int, name: str = "input_ids") -> None:
    """Raises ValueError unless ids are integers [B, T] with at least one row, all in the
    vocabulary.
    """
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool or not len(ids):
        raise ValueError(
            f"{name} must be integers [batch, length], not {ids.dtype} {tuple(ids.shape)}"
        )
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        row, column = map(int, outside.nonzero()[0])
        raise ValueError(
            f"{name}[{row}, {column}] is {int(ids[row, column])}, but the vocabulary is "
            f"0..{vocab_size - 1}; the tokenizer may belong to another model"
        )


def check_mask(mask: Tensor, ids: Tensor, name: str = "attention_mask") -> None:
    """Raises ValueError unless the mask has the shape of the ids and every row has a token."""
    if mask.shape != ids.shape:
        raise ValueError(
            f"{name} has shape {list(mask.shape)}, but must have that of the ids, {list(ids.shape)}"
        )
    empty = (mask == 0).all(1)
    if empty.any():
        raise ValueError(
            f"row {int(empty.nonzero()[0])} of {name} has no token; start it with the bos token"
        )


def find_padding(ids: Tensor, mask: Tensor | None, settings: GenerationSettings) -> Tensor | None:
    """Returns the attention mask of prompts to be continued, int64 [B, T]; None if nothing is
    padded.

    Without a mask, the padding token marks padding unless it also ends sequences, as in
    transformers. Padding on the right is taken with a warning, as there: the continuation then
    follows the padding.
    """
    if mask is None:
        pad = settings.pad_token_id
        if pad is None or pad in settings.eos_token_ids:
            return None
        mask = (ids != pad).long()
    check_mask(mask, ids)
    mask = (mask != 0).long()
    if bool((mask == 1).all()):
        return None
    if bool((mask[:, -1] == 0).any()):
        warnings.warn(
            "prompts to be continued are padded on the right, so their continuations do not follow "
            "them directly; use padding_side='left'",
            stacklevel=2,
        )
    return mask


def name_token_types(model: Any, types: Tensor | None, ids: Tensor) -> Tensor | None:
    """Returns the token types of prompts int64 [B, T] that a model reads; None if it reads none.

    Tokenizers write zeros for texts of one segment. They mean nothing to a model that has no token
    types.

    Raises:
        ValueError: The types have another shape, or the model would ignore types that differ.
    """
    if types is None:
        return None
    if types.shape != ids.shape:
        raise ValueError(
            f"token_type_ids have shape {list(types.shape)}, but must have that of the ids, "
            f"{list(ids.shape)}"
        )
    if "token_type_ids" in model.positional_inputs:
        return types.to(ids.device)
    if bool((types != 0).any()):
        raise ValueError(
            f"a {type(model).__name__} has no token types: leave token_type_ids out, or pass zeros"
        )
    return None


def begin_decoder(
    given: Tensor | None,
    mask: Tensor | None,
    rows: int,
    settings: GenerationSettings,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Returns the beginning of an encoder-decoder's output, int64 [B, T], and its mask.

    It is the start token, followed by the given tokens, unless they begin with it already.
    """
    start = settings.decoder_start_token_id
    if start is None:
        start = settings.bos_token_id
    if start is None:
        raise ValueError(
            "the model's generation settings have no decoder_start_token_id: pass "
            "decoder_start_token_id=…"
        )
    first = torch.full((rows, 1), start, device=device)
    if given is None:
        return first, None
    given = given.to(device)
    if mask is not None:
        mask = mask.to(device)
    if len(given) != rows:
        raise ValueError(f"decoder_input_ids has {len(given)} rows for {rows} prompts")
    if bool((given[:, 0] != start).all()):
        given = torch.cat([first, given], 1)
        if mask is not None:
            mask = torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
    return given, mask
