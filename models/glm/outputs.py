"""What GLM's forward returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..common.language_model import ModelOutput


@dataclass
class GLMOutput(ModelOutput):
    """loss: scalar fp32, mean over the labels that are not -100; None without labels.

    logits: [B, S, Vp], this rank's columns of the padded vocabulary ([B, S, V] in one process);
        `model.gather_logits` gives [B, S, V]. With labels they are calculated when first read.
    mems: the embedding output and each block's output at all positions so far, [B, M + S, H] each, before the final
        norm and cut off from autograd; what the next call takes as `mems`. None where not asked for.
    hidden_states: the same of this call's positions, the last one after the final norm; None unless asked for.
    """

    loss: Tensor | None
    logits: Tensor
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
