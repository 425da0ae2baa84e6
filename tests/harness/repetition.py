"""transformers' repetition penalty, in any of its releases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TokensArePenalized:
    """Penalizes the tokens of each row once, but not the padding before it: the definition in plain loops.

    Args:
        penalty: What positive scores are divided by, and negative ones multiplied with.
        mask: int64 [B, T] of the prompts, 0 at padding.
    """

    def __init__(self, penalty: float, mask: Tensor) -> None:
        self.penalty = penalty
        self.padding = [row.index(1) for row in mask.tolist()]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        beams = len(ids) // len(self.padding)
        for row, tokens in enumerate(ids.tolist()):
            for token in set(tokens[self.padding[row // beams] :]):
                score = scores[row, token]
                scores[row, token] = score / self.penalty if score > 0 else score * self.penalty
        return scores


def generate_as_newest(reference, ids: Tensor, mask: Tensor, **options: Any) -> Any:
    """Calls transformers' `generate`, whose older releases penalize the padding before a prompt as if it were a token:
    there it gets the penalty of newer ones as a processor."""
    penalty = options.get("repetition_penalty")
    if penalty is not None and not reference.config.is_encoder_decoder and not _knows_padding():
        del options["repetition_penalty"]
        options["logits_processor"] = [TokensArePenalized(penalty, mask)]
    return reference.generate(ids, attention_mask=mask, **options)


def _knows_padding() -> bool:
    from transformers import RepetitionPenaltyLogitsProcessor

    try:
        RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.zeros(1, dtype=torch.long))
    except ValueError:
        return False
    return True
