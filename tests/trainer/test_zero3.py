"""ZeRO 3 under the zoo's own models: parameters are whole only while their layers run, and the steps are the same."""

from __future__ import annotations

import json

import pytest
import torch
from every_case import by_turns, every_day
from tiny_models import tiny
from training import losses, on_ranks

CONFIGS = {
    "tied": tiny("t5"),
    "untied": tiny("mt5"),
    "causal": tiny("gpt2"),
    "masked": tiny("bert"),
}


class Sequences:
    def __init__(self, count: int = 32) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 60, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.flip(0)}


class Model:
    """Builds a model on a rank, and looks at it after each step."""

    def __init__(self, config: dict, recompute: str = "none") -> None:
        self.config, self.recompute = config, recompute

    def __call__(self, mesh):
        from shardzoo.models import from_config
        from shardzoo.models.parallel_config import ParallelConfig

        self.built = from_config(
            self.config, parallel_config=ParallelConfig(recompute=self.recompute)
        )
        return self.built

    def is_released(self, step: int, loss: float) -> None:
        assert not any(parameter.numel() for parameter in self.built.parameters())


def accuracy(logits, labels):
    return (logits.argmax(-1) == labels).float().mean().item()


@pytest.mark.parametrize(
    ("config", "recompute"),
    by_turns(
        every_day(
            [("tied", "none"), ("masked", "selective")],
            more=[("causal", "full"), ("untied", "none"), ("causal", "none")],
        ),
        2,
    ),
)
def test_steps_equal_those_of_one_process(run_mesh, tmp_path, config, recompute):
    """With evaluation between them, whose metric reads the logits, also where a rank has no samples left."""
    model = Model(CONFIGS[config], recompute)
    settings = {
        "model": model,
        "data": Sequences(),
        "train_steps": 3,
        "global_batch_size": 8,
        "lr": 1e-3,
    }
    settings |= {
        "valid": Sequences(33),
        "metrics": {"accuracy": accuracy},
        "eval_interval": 2,
        "adam_eps": 1e-3,
        "warmup_steps": 0,
    }
    [(steps, reference)] = on_ranks(run_mesh, tmp_path / "one", micro_batch_size=8, **settings)
    nothing_stays = tmp_path / "deepspeed.json"  # small parameters would not be split
    nothing_stays.write_text(
        json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}})
    )
    split = {"env_type": "deepspeed", "zero_stage": 3, "deepspeed_config": str(nothing_stays)}
    for own, weights in on_ranks(
        run_mesh, tmp_path / "split", data_ranks=2, on_step=model.is_released, **split, **settings
    ):
        assert losses(own) == pytest.approx(losses(steps), rel=2e-6)
        assert own[1]["valid_loss"] == pytest.approx(steps[1]["valid_loss"], rel=2e-6)
        assert own[1]["valid_accuracy"] == pytest.approx(steps[1]["valid_accuracy"], rel=1e-6)
        for name, value in weights.items():
            assert (value - reference[name]).abs().max() < 1e-6, name
