"""The trainer underneath: it also measures what is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..mpu import ParallelMesh
from ..trainer.evaluation import Metric
from ..trainer.trainer import Trainer
from .arguments import TrainerArguments
from .metrics import perplexity


class TuningTrainer(Trainer):
    """measure: more validation values of the bare model, by the names `measured`; collective over all ranks."""

    def __init__(self, arguments: TrainerArguments, mesh: ParallelMesh | None = None) -> None:
        super().__init__(arguments, mesh=mesh)
        self.is_language_model = True
        self.measure: Callable[[nn.Module], dict[str, float]] | None = None
        self.measured: tuple[str, ...] = ()

    def check(self, validates: bool, metrics: Mapping[str, Metric]) -> None:
        """ValueError for what `train` would refuse of the arguments, so that it can be before the run has a folder."""
        best = self.arguments.save_best
        if best is not None and not validates:
            raise ValueError(
                f"save_best={best!r} is a value of validation, and nothing validates: it takes a "
                "validation_file or a validation_split above 0, and train(valid=True)"
            )
        of_texts = ["perplexity"] if self.is_language_model else []
        self.check_arguments(["loss", *of_texts, *metrics, *self.measured])

    def validate(
        self, model: Any, module: nn.Module, dataset: Any, metrics: Mapping[str, Metric], collate: Callable[[Any], Any]
    ) -> dict[str, float]:
        values = super().validate(model, module, dataset, metrics, collate)
        if self.is_language_model:
            values = {"loss": values["loss"], "perplexity": perplexity(values["loss"]), **values}
        return {**values, **(self.measure(module) if self.measure else {})}
