"""A linear-chain conditional random field over the labels of a sequence (Lafferty et al., 2001,
"Conditional Random Fields: Probabilistic Models for Segmenting and Labeling Sequence Data").

The score of a sequence of labels y_1 … y_n is

    start[y_1] + Σ emission_t[y_t] + Σ transition[y_(t-1), y_t] + end[y_n]

and its probability is the exponential of the score, divided by the sum over all sequences. The
positions of a chain are those that are kept; positions between them are skipped, as if the sequence
did not have them. All computations are in fp32, or in fp64 for emissions in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ConditionalRandomField(nn.Module):
    """Scores sequences of C labels from the scores of each position's labels, the emissions.

    The parameters have the meaning and the names of the package pytorch-crf. They are replicated.

    Attributes:
        start_transitions, end_transitions: [C], added for the first and for the last label.
        transitions: [C, C], added for each label (row) that another (column) follows.
    """

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.num_labels = num_labels
        self.start_transitions = nn.Parameter(torch.empty(num_labels))
        self.end_transitions = nn.Parameter(torch.empty(num_labels))
        self.transitions = nn.Parameter(torch.empty(num_labels, num_labels))

    def extra_repr(self) -> str:
        return f"num_labels={self.num_labels}"

    def negative_log_likelihood(self, emissions: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
        """Returns -log p(labels) of each sequence, [B]; 0 for one without positions.

        Args:
            emissions: [B, S, C].
            labels: int64 [B, S]; those of positions that are not kept may be anything.
            kept: bool [B, S], the positions of the chain.

        Raises:
            ValueError: A label is no class. On an accelerator, where a check would wait for the
                device, PyTorch stops the process instead.
        """
        order, valid = order_positions(kept)
        emissions = take_positions(emissions, order)  # [B, S, C]
        classes = labels.gather(1, order).masked_fill(~valid, 0)  # [B, S]
        start, end, transitions = self._widen_parameters(emissions.dtype)

        # The score of the labels.
        try:
            scores = emissions.gather(2, classes[..., None])[..., 0]  # [B, S]
        except RuntimeError:
            wrong = classes[(classes < 0) | (classes >= emissions.shape[2])]
            if not len(wrong):
                raise
            raise ValueError(
                f"label {int(wrong[0])} is no class of the model, which has {emissions.shape[2]}"
            ) from None
        steps = transitions[classes[:, :-1], classes[:, 1:]]  # [B, S-1]
        scores = scores + torch.cat([start[classes[:, :1]], steps], 1)
        last = classes.gather(1, (valid.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]  # [B]
        score = scores.masked_fill(~valid, 0).sum(1) + end[last]

        # The logarithm of the sum over all sequences, by the forward algorithm.
        forward = start + emissions[:, 0]  # [B, C]
        for position in range(1, emissions.shape[1]):
            paths = forward[:, :, None] + transitions  # [B, C, C]
            following = paths.logsumexp(1) + emissions[:, position]
            forward = torch.where(valid[:, position, None], following, forward)
        log_sum = (forward + end).logsumexp(1)

        return (log_sum - score).masked_fill(~valid[:, 0], 0)

    @torch.no_grad()
    def decode(self, emissions: Tensor, kept: Tensor, filler: int) -> Tensor:
        """Returns the most probable labels int64 [B, S], by Viterbi's algorithm.

        Positions that are not kept have the label `filler`. For the arguments see
        `negative_log_likelihood`.
        """
        order, valid = order_positions(kept)
        emissions = take_positions(emissions, order)  # [B, S, C]
        start, end, transitions = self._widen_parameters(emissions.dtype)

        # The best score of a sequence that ends with each label, and the label before it there.
        best = start + emissions[:, 0]  # [B, C]
        same = torch.arange(best.shape[1], device=best.device).expand(best.shape)
        previous: list[Tensor] = []  # of each position but the first, [B, C]
        for position in range(1, emissions.shape[1]):
            scores, labels = (best[:, :, None] + transitions).max(1)
            continues = valid[:, position, None]
            best = torch.where(continues, scores + emissions[:, position], best)
            previous.append(torch.where(continues, labels, same))

        label = (best + end).argmax(1, keepdim=True)  # [B, 1]
        chosen = [label]
        for labels in reversed(previous):
            label = labels.gather(1, label)
            chosen.append(label)
        decoded = torch.cat(chosen[::-1], 1).masked_fill(~valid, filler)  # [B, S]
        return torch.empty_like(decoded).scatter(1, order, decoded)

    def _widen_parameters(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the start, end and other transitions in a type."""
        start = self.start_transitions.to(dtype)
        return start, self.end_transitions.to(dtype), self.transitions.to(dtype)


def order_positions(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the positions of each row with the kept ones first, int64 [B, S], and which of these
    are kept, bool [B, S].
    """
    order = kept.logical_not().long().argsort(dim=1, stable=True)
    return order, kept.gather(1, order)


def take_positions(emissions: Tensor, order: Tensor) -> Tensor:
    """Returns emissions [B, S, C] of any type at the positions `order` [B, S], in fp32 or fp64."""
    wide = emissions.to(torch.promote_types(emissions.dtype, torch.float32))
    return wide.gather(1, order[..., None].expand(-1, -1, wide.shape[2]))
