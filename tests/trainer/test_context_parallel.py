"""Runs whose sequences are split over the context axis train, resume and evaluate like runs in one process.

Oracle: one process with the same global batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_case import every_day
from tiny_models import tiny
from training import Pairs, losses, run_training

FAMILIES = {
    "gpt2": {},
    "llama": {},
    "mistral": {},
    "bert": {"architecture": "BertForMaskedLM"},
    "modernbert": {"architecture": "ModernBertForMaskedLM"},
    "t5": {},
    "mt5": {},
    "bart": {},
}


def train(mesh: Any, folder: Any, family: str, **arguments: Any) -> Any:
    """Losses, validation losses and weights of a run on ragged samples with dropout.

    With AdamW's default epsilon, 1e-8, single elements with gradients of that size follow the rounding errors, which
    depend on the processor.
    """
    from shardzoo.models import ParallelConfig, from_config

    config = tiny(family, 0.1, **FAMILIES[family])
    parallel = ParallelConfig(
        arguments.get("sequence_parallel", False),
        context_exchange=arguments.get("context_exchange", "auto"),
    )
    settings = {
        "micro_batch_size": 8 // arguments.get("replicas", 1),
        "train_steps": 6,
        "lr": 3e-3,
        "adam_eps": 1e-6,
    }
    arguments.pop("replicas", None)
    steps, weights = run_training(
        mesh,
        folder,
        model=lambda mesh: from_config(config, mesh, parallel_config=parallel, seed=2).train(),
        data=Pairs(),
        valid=[Pairs()[i] for i in range(5)],
        eval_interval=3,
        **{**settings, **arguments},
    )
    validation = [step["valid_loss"] for step in steps if "valid_loss" in step]
    return losses(steps), validation, weights


STAGES = {"env_type": "deepspeed+mpu", "pipeline_parallel_size": 2}
CASES = {
    "gpt2 ddp": ("gpt2", {"context": 2}, {"env_type": "pytorchDDP"}),
    "t5 zero": ("t5", {"context": 2}, {"env_type": "deepspeed+mpu"}),
    "gpt2 fsdp": ("gpt2", {"context": 2}, {"env_type": "fsdp"}),
    "llama keys data": ("llama", {"context": 2, "data": 2},
                        {"env_type": "deepspeed+mpu", "context_exchange": "keys", "zero_stage": 2}),
    "t5 stages": ("t5", {"context": 2, "pipeline": 2}, STAGES),
}  # fmt: skip
FSDP = {"env_type": "fsdp"}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
MORE = {
    "llama fsdp": ("llama", {"context": 2, "data": 2}, FSDP),
    "llama fsdp replicas": ("llama", {"context": 2, "data": 2}, {**FSDP, "fsdp_replicas": 2}),
    "gpt2 compiled": ("gpt2", {"context": 2}, {"env_type": "deepspeed+mpu", **COMPILED}),
    "bert compiled": ("bert", {"context": 2}, {"env_type": "pytorchDDP", **COMPILED, "context_exchange": "keys"}),
    "t5 fsdp tensor": ("t5", {"context": 2, "tensor": 2},
                       {**FSDP, "model_parallel_size": 2, "sequence_parallel": True}),
    "bert fsdp": ("bert", {"context": 2}, {**FSDP, "context_exchange": "keys"}),
    "bert tensor": ("bert", {"context": 2, "tensor": 2},
                    {"env_type": "deepspeed+mpu", "sequence_parallel": True, "model_parallel_size": 2}),
    "modernbert": ("modernbert", {"context": 2}, {"env_type": "deepspeed+mpu", "context_exchange": "keys"}),
    "mistral four": ("mistral", {"context": 4}, {"env_type": "deepspeed+mpu"}),
    "mt5": ("mt5", {"context": 2, "data": 2}, {"env_type": "pytorchDDP"}),
    "gpt2 stages": ("gpt2", {"context": 2, "pipeline": 2}, {**STAGES, "global_batch_size": 8, "micro_batch_size": 4,
                                                            "context_exchange": "keys"}),
    "bert stages": ("bert", {"context": 2, "pipeline": 2}, {**STAGES, "zero_stage": 0}),
    "bart stages": ("bart", {"context": 2, "pipeline": 2}, {**STAGES, "recompute": "selective"}),
    "llama ring": ("llama", {"context": 4}, {"env_type": "deepspeed+mpu", "context_exchange": "ring"}),
    "bart": ("bart", {"context": 2}, {"env_type": "deepspeed+mpu", "zero_stage": 0}),
}  # fmt: skip


@pytest.mark.parametrize("case", every_day(CASES, more=MORE))
def test_the_curve_is_that_of_one_process(run_mesh, tmp_path, case):
    family, sizes, arguments = {**CASES, **MORE}[case]
    expected, validation, weights = train(None, tmp_path / "one", family, env_type="pytorch")
    tensor = sizes.get("tensor", 1)
    results = run_mesh(
        tensor,
        train,
        tmp_path / "split",
        family,
        context=sizes["context"],
        data=sizes.get("data", 1),
        pipeline=sizes.get("pipeline", 1),
        context_parallel_size=sizes["context"],
        replicas=sizes.get("data", 1),
        **arguments,
    )
    for own, own_validation, own_weights in results:
        assert own == pytest.approx(expected, abs=1e-5)
        assert own_validation == pytest.approx(validation, abs=1e-5)
        for name, value in own_weights.items():
            if tensor == 1:
                torch.testing.assert_close(value, weights[name], atol=1e-5, rtol=1e-5)


def test_a_run_goes_on_without_the_axis_and_back(run_mesh, tmp_path):
    shared = {"lr_schedule": "constant", "warmup_ratio": 0.0, "save_interval": 2}
    expected, _, weights = train(None, tmp_path / "one", "llama", env_type="pytorch", **shared)
    folder = tmp_path / "moved"
    split = {"context_parallel_size": 2, "env_type": "deepspeed+mpu", "zero_stage": 1}
    first = run_mesh(1, train, folder, "llama", context=2, train_steps=2, **split, **shared)[0][0]
    one = {"env_type": "pytorch", "resume": True}
    second = train(None, folder, "llama", train_steps=4, **one, **shared)[0]
    third, _, last = run_mesh(1, train, folder, "llama", context=2, resume=True, **split, **shared)[
        0
    ]
    assert [*first, *second, *third] == pytest.approx(expected, abs=1e-5)
    for name, value in last.items():
        torch.testing.assert_close(value, weights[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "engine",
    every_day([{"env_type": "fsdp"}], more=[{"env_type": "deepspeed+mpu", "zero_stage": 1}]),
)
def test_muon_moves_matrices_along_the_context_axis_too(run_mesh, tmp_path, engine):
    """Its products are in bf16, and the ranks share them as if the axis were a part of the data's."""
    muon = {"optimizer": "muon"}
    expected, _, _ = train(None, tmp_path / "one", "gpt2", env_type="pytorch", **muon)
    split = {"context_parallel_size": 2, **muon, **engine}
    for own, _, _ in run_mesh(1, train, tmp_path / "split", "gpt2", context=2, **split):
        assert own == pytest.approx(expected, rel=2e-2)


def test_what_is_not_built_is_refused_before_anything_starts():
    from shardzoo.trainer import TrainingArguments

    for wrong in (
        {"env_type": "pytorch"},
        {"env_type": "deepspeed", "zero_stage": 3},
        {"env_type": "deepspeed+mpu", "torch_compile": True, "context_exchange": "ring"},
    ):
        with pytest.raises(ValueError, match="context_parallel_size=2 does not work with"):
            TrainingArguments(cp=2, train_steps=1, **wrong)
