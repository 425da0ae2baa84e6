"""Runs of the pretraining recipe on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from every_case import EVERY_CASE

STEPS = 20 if EVERY_CASE else 10
SHORT: dict[str, Any] = {
    "train_steps": STEPS, "warmup_steps": 4, "lr": 5e-3, "sequence_length": 64, "vocab_size": 400,
    "micro_batch_size": 4, "held_out_fraction": 0.1, "eval_sequences": 2, "final_eval_sequences": 5,
}  # fmt: skip


def arguments_of(folder: Path | None, objective: Any = None, **changes: Any) -> Any:
    """`PretrainingArguments` of a short run in a folder; objective: a name, or settings."""
    from shardzoo.data.objectives.registry import resolve_objective
    from shardzoo.pretraining.arguments import PretrainingArguments

    named = {} if objective is None else {"objective": resolve_objective(objective)}
    return PretrainingArguments(
        **{**SHORT, **named, "output_dir": folder and str(folder), **changes}
    )


def run_pretraining(
    mesh: Any, folder: Path | None, objective: Any = None, *, export: bool = True, **changes: Any
) -> Any:
    """Runs `arguments_of` on a rank of a mesh; returns the recorded metrics. Without `export` it ends with training."""
    from shardzoo.pretraining.inputs import choose_inputs
    from shardzoo.pretraining.run import Pretraining
    from shardzoo.trainer.launch.rank_info import RankInfo

    class Run(Pretraining):
        alone = 0.0

        def _finish(self, *results: Any) -> None:
            if export:
                super()._finish(*results)

        def _show_evaluation(self, loss: float) -> None:
            super()._show_evaluation(loss)
            self.alone = loss

    launch = RankInfo.from_environment()
    arguments = arguments_of(folder, objective, model_parallel_size=mesh.tp_size, **changes)
    run = Run(arguments, choose_inputs(arguments, launch), launch)
    run.run()
    return [{"final/loss": run.alone}] if arguments.eval_only else run.run_folder.metrics()


def train_losses(metrics: list[dict[str, float]]) -> list[float]:
    return [record["train/loss"] for record in metrics if "train/loss" in record]
