"""Computes the cross-entropy of logits that are split along the vocabulary, without gathering the
logits.

Each rank reduces its columns to two or three numbers per token (`ops.cross_entropy` describes the
arithmetic). The ranks exchange only these numbers ([2 or 3, T] in fp32) and compute the loss of
every token from them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor

from ..ops import linear_cross_entropy, token_cross_entropy
from .collectives import start_all_gather, start_all_reduce
from .mesh import ParallelMesh, tp_size
from .token_ids import check_ids


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    num_classes: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    mesh: ParallelMesh | None = None,
) -> Tensor:
    """Computes `torch.nn.functional.cross_entropy` over a vocabulary that is split over the
    tensor-parallel ranks.

    The gradient has the dtype of the logits.

    Args:
        logits: [..., Vp], this rank's columns.
        labels: [...] integers, the same on every rank.
        num_classes: The vocabulary size without padding; later columns are padding and never enter
            the softmax. By default all tp * Vp columns.
        label_smoothing: See `ops.cross_entropy`.
        z_loss: See `ops.cross_entropy`.

    Returns:
        fp32 (fp64 for fp64 logits), the same on every rank: the mean over the labels that are not
        ignored (NaN if all labels are ignored, as in PyTorch), their sum, or one loss per label.

    Raises:
        ValueError: The shapes do not match, `num_classes` exceeds the number of columns, or a label
            is outside [0, num_classes).
    """
    columns = logits.shape[-1] * tp_size(mesh)
    classes = columns if num_classes is None else num_classes
    if not 0 < classes <= columns:
        raise ValueError(
            f"num_classes {classes} must be between 1 and the {columns} columns of all ranks"
        )
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} do not match logits {tuple(logits.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r} must be 'mean', 'sum' or 'none'")
    target = labels.reshape(-1)
    kept = target != ignore_index
    check_ids(target.masked_fill(~kept, 0), classes, "label")
    losses = token_cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target,
        num_classes=classes,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        **_describe_columns(mesh, logits.shape[-1]),
    )
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / kept.sum()


def head_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    num_classes: int,
    ignore_index: int = -100,
    partial_grad: bool = True,
    softcap: float | None = None,
    mesh: ParallelMesh | None = None,
) -> Tensor:
    """Returns the losses [T] of the logits hidden · weightᵀ + bias. The caller never holds the
    logits.

    The other arguments are those of `vocab_parallel_cross_entropy`.

    Args:
        hidden: [T, H], replicated.
        weight: [Vp, H], this rank's rows.
        bias: [Vp], this rank's part.
        target: int64 [T].
        partial_grad: False if the caller sums the gradient of `hidden` over the ranks.
        softcap: See `ops.linear_cross_entropy.cap_logits`.
    """
    check_ids(target.masked_fill(target == ignore_index, 0), num_classes, "label")
    sum_grad = None
    if mesh is not None and mesh.tp_size > 1 and partial_grad:
        sum_grad = partial(start_all_reduce, group=mesh.tp_group)
    return linear_cross_entropy(
        hidden,
        weight,
        bias,
        target,
        num_classes=num_classes,
        ignore_index=ignore_index,
        sum_grad=sum_grad,
        softcap=softcap,
        **_describe_columns(mesh, weight.shape[0]),
    )


def _describe_columns(mesh: ParallelMesh | None, columns: int) -> dict[str, Any]:
    """Returns the arguments that describe this rank's columns of the vocabulary to `ops`."""
    if mesh is None or mesh.tp_size == 1:
        return {}

    def gather(stats: Tensor) -> Tensor:
        return start_all_gather(
            stats[None], 0, mesh.tp_group
        )()  # [tp, 2, T], or 3 with label smoothing

    return {"first": mesh.tp_rank * columns, "gather": gather}
