"""The most likely tokens at the masked places of BERT's and RoBERTa's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.registry import FAMILIES, family
from .api import check_model, device_of, evaluating
from .prompts import check_ids
from .vocabulary import best, log_probabilities, without_padding


@dataclass(frozen=True)
class MaskFills:
    """places: int64 [M, 2], row and column of each mask, in reading order. tokens: int64 [M, k], best first.
    scores: fp32 [M, k], their probabilities."""

    places: Tensor
    tokens: Tensor
    scores: Tensor


def fills_masks(model_class: type) -> bool:
    """Whether models of a class predict the tokens at masked places."""
    return getattr(model_class, "generates", None) == "masks"


@torch.no_grad()
def fill_mask(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    *,
    mask_token_id: int,
    top_k: int = 5,
) -> MaskFills:
    """input_ids, attention_mask, token_type_ids: [B, S], as the model takes them.

    Only the masked places go through the output head, and only the best tokens of each rank are exchanged. ValueError
    without a mask, and for a model that fills none.
    """
    check_model(model)
    if not fills_masks(type(model)):
        able = [n for name in FAMILIES for n, model in family(name).architectures.items() if fills_masks(model)]
        raise ValueError(f"a {type(model).__name__} fills no masks; load one of {', '.join(able)}")
    vocab_size = model.config.vocab_size
    if not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be from 1 to the vocabulary's {vocab_size}, not {top_k}")
    ids = input_ids.to(device_of(model))
    check_ids(ids, vocab_size)
    places = (ids == mask_token_id).nonzero()  # [M, 2]
    if not len(places):
        raise ValueError(f"no token of input_ids is the mask, {mask_token_id}")
    with evaluating(model):
        hidden = model.encoder(ids, attention_mask, token_type_ids)[0][-1]  # [B, S, H]
        logits = model.head(hidden[places[:, 0], places[:, 1]])  # [M, Vp]
    scores = log_probabilities(without_padding(logits, vocab_size, model.mesh), model.mesh)
    values, tokens = best(scores, top_k, model.mesh)
    return MaskFills(places, tokens, values.exp())
