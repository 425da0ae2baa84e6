"""What a model's forward returns: Hugging Face's field names, vocabulary-parallel logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class CausalLMOutput:
    """Result of a causal language model.

    loss: scalar fp32, mean over the labels that are not -100; None without labels.
    logits: [B, S, Vp], this rank's columns of the (padded) vocabulary; `model.gather_logits` gives [B, S, V].
    hidden_states: the embedding output and each block's output, [B, S, H] each (the last one after the final
        norm, as in transformers); None unless asked for.
    """

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
