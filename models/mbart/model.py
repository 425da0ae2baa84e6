"""mBART (Liu et al., 2020, "Multilingual Denoising Pre-training for Neural Machine Translation").

It is BART with pre-LayerNorm. A text ends with the code of its language, with which its decoding begins.
"""

from __future__ import annotations

from torch import Tensor

from ..bart.model import HEADS, BartBody
from ..language_model import IGNORED


class MBartBody(BartBody):
    """BART's stacks with an `MBartConfig`."""

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns int64 [B, T]: each row's last token, which is a language code, then the labels but the last."""
        ids = labels.masked_fill(labels == IGNORED, self.config.pad_token_id)
        last = (ids != self.config.pad_token_id).sum(1, keepdim=True) - 1  # padding is on the right
        start = ids.gather(1, last.clamp(min=0))
        ids = ids.roll(1, dims=1)
        ids[:, :1] = start
        return ids


__all__ = ["HEADS", "MBartBody"]
