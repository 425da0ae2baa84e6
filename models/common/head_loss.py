"""The loss of an output head, from logits that exist only where there is a label."""

from __future__ import annotations

import torch
from torch import Tensor

from ...mpu import VocabParallelHead, gather_sequence, head_losses, vocab_parallel_cross_entropy

IGNORED = -100


def head_loss(
    head: VocabParallelHead,
    hidden: Tensor,
    labels: Tensor,
    table: Tensor | None = None,
    *,
    num_items: Tensor | int | None = None,
    sparse_labels: bool = False,
) -> Tensor:
    """Cross-entropy of the head's logits with labels int64 [B, S], of which -100 is ignored: their mean, NaN of none,
    or their sum divided by `num_items`. fp32.

    hidden: [B, S, H], or [B, S/tp, H] under sequence parallelism. table: see `VocabParallelHead.forward`.
    sparse_labels: look for the labelled positions on an accelerator too, where the host has to wait for the answer.
    ValueError for shapes that do not match and for labels outside the vocabulary.
    """
    if torch.compiler.is_compiling():  # a compiler traces neither gradients written over logits nor a number of rows
        logits = head(hidden, table)
        reduction = "mean" if num_items is None else "sum"
        loss = vocab_parallel_cross_entropy(
            logits, labels, num_classes=head.num_embeddings, mesh=head.mesh, reduction=reduction
        )
        return loss if num_items is None else loss / num_items
    if head.sequence_parallel:
        hidden = gather_sequence(hidden, head.mesh)
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} do not match the positions {tuple(hidden.shape[:-1])}")
    rows, target = hidden.flatten(0, -2), labels.reshape(-1)
    labelled = target != IGNORED
    count = labelled.sum() if num_items is None else num_items
    if hidden.is_cpu or sparse_labels:
        chosen = labelled.nonzero()[:, 0]
        if len(chosen) < len(target):
            chosen = chosen if len(chosen) else torch.zeros_like(target[:1])  # an ignored one, for zero gradients
            rows, target = rows[chosen], target[chosen]
    losses = head_losses(
        rows,
        head.shared_weight(table),
        head.bias,
        target,
        num_classes=head.num_embeddings,
        partial_grad=not head.sequence_parallel,
        mesh=head.mesh,
    )
    return losses.sum() / count
