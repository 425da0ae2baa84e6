"""Fills the masked tokens of a text with an encoder, and the blanks of a text with a GLM.

A GLM fills the blanks of a text one after another from left to right (Du et al., 2021, section
2.1). Every blank is decoded after the text and the pieces that were filled before it, with
positions in two dimensions: the position of the blank, and the position within the piece. `[gMASK]`
at the end continues the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..data.tokenizers.glm_tokens import GLMTokens
from ..models.generation.generate import Extras, check_model, evaluating, fill, find_device
from ..models.generation.generation_config import resolve_settings
from ..models.generation.prompts import check_ids, check_mask
from ..models.generation.settings import GenerationSettings
from ..models.generation.vocabulary import find_best, log_probabilities, mask_padding
from ..models.registry import FAMILIES, family


@dataclass(frozen=True)
class MaskFills:
    """The best tokens at M masked positions.

    Attributes:
        places: int64 [M, 2], row and column of each mask, in reading order.
        tokens: int64 [M, k], best first.
        scores: fp32 [M, k], their probabilities.
    """

    places: Tensor
    tokens: Tensor
    scores: Tensor


def fills_masks(model_class: type) -> bool:
    """Returns whether models of a class predict the tokens at masked positions."""
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
    """Predicts the tokens at the masked positions.

    Only the masked positions go through the output head, and only the best tokens of each rank are
    exchanged.

    Args:
        input_ids: [B, S], as the model takes them.
        attention_mask: [B, S], as the model takes it.
        token_type_ids: [B, S], as the model takes them.
        mask_token_id: The id of masked positions in input_ids.
        top_k: Number of tokens to return for each position.

    Raises:
        ValueError: No token is masked, or the model does not predict masked tokens.
    """
    check_model(model)
    if not fills_masks(type(model)):
        able: list[str] = []
        for model_type in FAMILIES:
            for name, architecture in family(model_type).architectures.items():
                if fills_masks(architecture):
                    able.append(name)
        raise ValueError(
            f"a {type(model).__name__} cannot fill masks; load one of {', '.join(able)}"
        )
    if getattr(model, "stage", None) is not None:
        raise ValueError(
            "fill_mask needs all blocks in each process: load the model without pipeline stages"
        )
    vocab_size = model.config.vocab_size
    if not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k must be from 1 to the vocabulary's {vocab_size}, not {top_k}")
    ids = input_ids.to(find_device(model))
    check_ids(ids, vocab_size)
    places = (ids == mask_token_id).nonzero()  # [M, 2]
    if not len(places):
        raise ValueError(f"input_ids has no mask token ({mask_token_id}) to fill")
    segments: dict[str, Tensor] = {}
    if token_type_ids is not None:
        segments["token_type_ids"] = token_type_ids
    with evaluating(model):
        hidden = model.run_backbone(ids, attention_mask, **segments).states[-1]  # [B, S, H]
        logits = model.head(hidden[places[:, 0], places[:, 1]])  # [M, Vp]
    scores = log_probabilities(mask_padding(logits, vocab_size, model.mesh), model.mesh)
    values, tokens = find_best(scores, top_k, model.mesh)
    return MaskFills(places, tokens, values.exp())


@dataclass(frozen=True)
class BlankFills:
    """A text whose blanks are filled.

    Attributes:
        ids: The tokens of the whole text.
        pieces: The tokens of each blank, from left to right.
    """

    ids: list[int]
    pieces: list[list[int]]


@torch.inference_mode()
def fill_blanks(
    model: Any,
    input_ids: Tensor,
    tokens: GLMTokens,
    attention_mask: Tensor | None = None,
    *,
    generation_config: Any = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    **settings: Any,
) -> list[BlankFills]:
    """Fills every [MASK], [sMASK] and [gMASK] of each row.

    A piece ends before the end-of-piece or end-of-text token.

    Args:
        input_ids: int64 [B, S], starting with [CLS]. For glm-10b-chinese, in which [gMASK] has the
            id of the end of a piece, transformers' id 50009 for [gMASK] is accepted too. It is
            never generated, because its row of the vocabulary is a copy.
        tokens: Ids of the special tokens.
        attention_mask: [B, S], 0 for padding, on any side.
        generation_config: As for `generate`.
        logits_processor: As for `generate`.
        stopping_criteria: As for `generate`.
        settings: As for `generate`; max_new_tokens is for each blank.

    Raises:
        ValueError: No row has a blank, or the model cannot fill blanks.
    """
    check_model(model)
    if getattr(model, "generates", None) != "blanks":
        raise ValueError(
            f"a {type(model).__name__} cannot fill blanks; use generate, or fill_mask for masked "
            "tokens"
        )
    ids = input_ids.to(find_device(model))
    check_ids(ids, model.config.vocab_size)
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids.device)
    check_mask(mask, ids)
    texts = [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
    made = resolve_settings(model, generation_config, settings)
    made = replace(made, pad_token_id=tokens.pad, eos_token_id=[tokens.eop, tokens.eos])
    if made.num_return_sequences > 1:
        raise ValueError(
            "num_return_sequences must be 1, because a text is filled once; call again with "
            "another seed"
        )
    if tokens.gmask == tokens.eop:
        copy = tokens.eop + 2
        texts = [[tokens.gmask if token == copy else token for token in text] for text in texts]
        made = replace(made, suppress_tokens=[*(made.suppress_tokens or []), copy])
    places = [_find_blanks(text, tokens) for text in texts]
    if not any(places):
        raise ValueError("there is no blank to fill: append [gMASK] to continue a text")
    pieces: list[list[list[int]]] = [[] for _ in texts]
    extras = Extras(logits_processor or (), stopping_criteria or ())
    with evaluating(model):
        for number in range(max(map(len, places))):
            rows = [row for row, blanks in enumerate(places) if len(blanks) > number]
            prompts: list[_Prompt] = []
            for row in rows:
                prompts.append(_Prompt.from_text(texts[row], places[row], pieces[row], tokens))
            filled = _fill_next(model, prompts, tokens, made, extras)
            for row, piece in zip(rows, filled, strict=True):
                pieces[row].append(piece)
    fills: list[BlankFills] = []
    for text, blanks, filled in zip(texts, places, pieces, strict=True):
        fills.append(BlankFills(_insert_pieces(text, blanks, filled), filled))
    return fills


def _find_blanks(text: list[int], tokens: GLMTokens) -> list[int]:
    """Returns the positions of the blanks."""
    blanks = (tokens.mask, tokens.smask, tokens.gmask)
    return [place for place, token in enumerate(text) if token in blanks]


def _insert_pieces(text: list[int], places: list[int], pieces: list[list[int]]) -> list[int]:
    """Returns a text with pieces in the places of its blanks."""
    filled = dict(zip(places, pieces, strict=True))
    found: list[int] = []
    for place, token in enumerate(text):
        found += filled.get(place, [token])
    return found


@dataclass(frozen=True)
class _Prompt:
    """A text, the pieces filled so far, and the token that starts the next piece.

    Attributes:
        ids: All tokens.
        places: The first position of each token: that of the token or its blank in the text.
        steps: The second position of each token: that within its piece.
        text: The length of the text alone.
    """

    ids: list[int]
    places: list[int]
    steps: list[int]
    text: int

    @classmethod
    def from_text(
        cls, text: list[int], blanks: list[int], pieces: list[list[int]], tokens: GLMTokens
    ) -> _Prompt:
        """Returns the prompt for the first blank of a text that has no piece yet."""
        ids = list(text)
        places = list(range(len(text)))
        steps = [0] * len(text)
        for blank, piece in zip(blanks, [*pieces, []], strict=False):
            ids += [tokens.sop, *piece]
            places += [blank] * (len(piece) + 1)
            steps += range(1, len(piece) + 2)
        return cls(ids, places, steps, len(text))


def _fill_next(
    model: Any,
    prompts: list[_Prompt],
    tokens: GLMTokens,
    settings: GenerationSettings,
    extras: Extras,
) -> list[list[int]]:
    """Returns the tokens of the next piece of each prompt."""
    width = max(len(prompt.ids) for prompt in prompts)
    device = find_device(model)
    ids = torch.full((len(prompts), width), tokens.pad)
    positions = torch.zeros(len(prompts), 2, width, dtype=torch.int64)
    visible = torch.zeros(len(prompts), width, width, dtype=torch.bool)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    for row, prompt in enumerate(prompts):
        start = width - len(prompt.ids)
        ids[row, start:] = torch.tensor(prompt.ids)
        positions[row, :, start:] = torch.tensor([prompt.places, prompt.steps])
        visible[row, start:, start:] = causal[start:, start:]
        visible[row, start:, start : start + prompt.text] = True
    found = fill(model, ids.to(device), positions.to(device), visible.to(device), settings, extras)
    pieces: list[list[int]] = []
    for row in found.sequences[:, width:].tolist():
        piece: list[int] = []
        for token in row:
            if token in settings.eos_token_ids:
                break
            piece.append(token)
        pieces.append(piece)
    return pieces
