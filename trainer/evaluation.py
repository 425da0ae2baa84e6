"""Evaluates over data-parallel ranks, one micro-batch at a time, so that it needs no more memory
than training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.loading.collate import Batch
from ..models.language_model import IGNORED
from ..models.pipeline import is_last_stage
from .batches.dataset_kinds import is_table
from .batches.loss_normalization import LossNormalizer, find_loss, find_output_field, to_device
from .engines.engine import ForwardStep
from .launch.phase import phase
from .launch.ranks import Ranks

# (logits, labels) of a micro-batch -> the mean over its rows, or [sum, count]. The logits have the
# full vocabulary. An integer is taken as a number of hits, as FlagAI's metrics return it.
Metric = Callable[[Tensor, Tensor], Any]
SMALLEST_COUNT = 1e-300


def metric_functions(
    metrics: Mapping[str, Metric] | Iterable[Sequence[Any]] | None,
) -> dict[str, Metric]:
    """Returns metrics by name, from a mapping or from FlagAI's list of [name, function]."""
    pairs: Any = metrics
    if isinstance(metrics, Mapping):
        pairs = metrics.items()
    elif metrics is None:
        pairs = ()
    elif not isinstance(metrics, Iterable):
        pairs = (metrics,)
    named: dict[str, Metric] = {}
    for pair in pairs:
        is_pair = isinstance(pair, Sequence) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not callable(pair[1]):
            raise ValueError(
                "metric_methods must be {name: function} or a list of [name, function], not "
                f"{pair!r}"
            )
        name, function = pair
        if name in named:
            raise ValueError(f"two metrics have the name {name!r}; give the metric another one")
        if name in ("loss", "step"):
            raise ValueError(
                f"a value of every evaluation already has the name {name!r}; give the metric "
                "another one"
            )
        named[name] = function
    return named


def check_samples(samples: Any) -> None:
    """Raises ValueError for validation data that is empty or cannot be indexed."""
    readable = (
        hasattr(samples, "__len__") and hasattr(samples, "__getitem__") and not is_table(samples)
    )
    if not readable or isinstance(samples, (type, str, bytes, Mapping)):
        kind = f"a {type(samples).__name__}"
        if isinstance(samples, type):
            kind = f"the class {samples.__name__}"
        raise ValueError(
            "validation data must be a dataset with __len__ and __getitem__, such as a list of "
            f"samples, not {kind}"
        )
    if not len(samples):
        raise ValueError("the validation data is empty")


@phase("evaluation")
@torch.no_grad()
def evaluate(
    forward_step: ForwardStep,
    model: Any,
    module: nn.Module,
    samples: Any,
    ranks: Ranks,
    *,
    batch_size: int,
    collate: Callable[[Sequence[Any]], Batch],
    metrics: Mapping[str, Metric] | None = None,
    collect: Callable[[range, Batch, Any], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """Returns the mean loss over all targets of `samples`, in nats per token, and the metrics; the
    same on every rank.

    Each sample is evaluated once. A rank that has no samples left repeats the first ones without
    counting them, because a forward pass may be collective.

    Args:
        model: The object that runs forward passes: the model, or the engine's wrapper of it.
        module: The model itself.
        batch_size: Samples in one forward pass of a rank.
        collect: Takes the numbers of a micro-batch's samples, the batch, and the output of its
            forward pass.
        notify: Is told of metrics whose values are taken as numbers of hits.
    """
    check_samples(samples)
    was_training = module.training
    module.eval()
    device = next(module.parameters()).device
    normalizer = LossNormalizer(module, mean_losses=True)
    counting: set[str] = set()
    sums = {name: [0.0, 0.0] for name in ("loss", *(metrics or {}))}
    per_round = batch_size * ranks.dp_size
    for start in range(0, len(samples), per_round):
        first = start + ranks.dp_rank * batch_size
        rows = range(first, min(first + batch_size, len(samples)))
        first_samples = range(min(batch_size, len(samples)))
        batch = to_device(collate([samples[i] for i in rows or first_samples]), device)
        output = forward_step(batch, model, None)
        # Logits may be computed collectively too, so a rank without rows of its own asks for them.
        logits = find_output_field(output, "logits") if metrics else None
        if not rows or not is_last_stage(module):
            continue
        if collect is not None:
            collect(rows, batch, output)
        count = normalizer.count(batch)[0]
        if count:
            _add(sums["loss"], float(find_loss(output)) * count, count)
        for name, metric in (metrics or {}).items():
            if logits is None or "labels" not in batch:
                raise ValueError(
                    f"the metric {name} needs logits of forward_step and labels in the batch"
                )
            gather: Any = getattr(module, "gather_logits", None)
            whole = gather(logits) if gather else logits
            value = metric(whole, batch["labels"])
            if _is_count(value):
                counting.add(name)
                value = (value, int((batch["labels"] != IGNORED).sum()))
            _add(sums[name], *_sum_and_count(name, value, len(rows)))
        output = logits = whole = None  # frees them before the next forward pass
    module.train(was_training)
    if counting and notify is not None:
        notify(
            f"{', '.join(sorted(counting))}: integers are taken as numbers of hits, and divided by "
            "the number of labels; return a mean or (sum, count) if they are something else"
        )
    numbers = ranks.sum_replicas(*(number for pair in sums.values() for number in pair))
    # Without any target, the loss is 0.
    return {
        name: total / max(count, SMALLEST_COUNT)
        for name, total, count in zip(sums, numbers[::2], numbers[1::2], strict=True)
    }


def _add(pair: list[float], total: float, count: float) -> None:
    pair[0] += total
    pair[1] += count


def _is_count(value: Any) -> bool:
    """Returns whether a metric's value is a number of hits: an integer, and no truth value."""
    if isinstance(value, Tensor):
        is_integer = not value.is_floating_point() and value.dtype != torch.bool
        return value.numel() == 1 and is_integer
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _sum_and_count(name: str, value: Any, rows: int) -> tuple[float, float]:
    """Returns the sum and the count of a metric, from its `value` for `rows` rows."""
    try:
        if isinstance(value, (tuple, list)):
            total, count = value
            return float(total), float(count)
        return float(value) * rows, rows
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"{value!r:.60}"
        if isinstance(value, Tensor):
            found = f"a tensor of shape {tuple(value.shape)}"
        raise ValueError(
            f"the metric {name} must return a number or [sum, count], not {found}"
        ) from error
