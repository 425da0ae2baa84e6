"""Shows the output head of an unsplit model to programs that multiply by its weight themselves."""

from __future__ import annotations

from torch import Tensor, nn

from ..mpu import VocabParallelHead


class UnpaddedHead(nn.Module):
    """A head without the padding of its vocabulary, in the form of an `nn.Linear`.

    A `VocabParallelHead` has rows for ids after the vocabulary, so that each rank has as many. A
    program that computes logits from `weight` would give them probabilities.

    Args:
        padded: The head, of a model that is not split. Gradients reach its parameters.
    """

    def __init__(self, padded: VocabParallelHead) -> None:
        super().__init__()
        self.padded = padded
        self.in_features = padded.hidden_size
        self.out_features = padded.num_embeddings

    @property
    def weight(self) -> Tensor:
        """The rows of the vocabulary, [V, H]."""
        return self.padded.weight[: self.out_features]

    @property
    def bias(self) -> Tensor | None:
        """The bias of the vocabulary, [V], or None."""
        if self.padded.fixed_bias is not None:
            return self.padded.fixed_bias[0, : self.out_features]
        if self.padded.bias is not None:
            return self.padded.bias[: self.out_features]
        return None

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits [B, S, V] of hidden states [B, S, H]."""
        return self.padded(hidden)[..., : self.out_features]
