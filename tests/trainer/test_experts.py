"""Mixtures of experts train the same curve under every layout, with the auxiliary loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import by_turns, every_day
from training import endless_losses

MIXTURE = {
    "model_type": "mixtral", "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3,
    "num_hidden_layers": 2, "intermediate_size": 20, "vocab_size": 97, "max_position_embeddings": 24,
    "attention_dropout": 0.1, "num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
}  # fmt: skip
SAME_LOSS = {"rel": 1e-5, "abs": 0}


@pytest.fixture
def train(run_mesh, tmp_path):
    def run(tp: int, data: int = 1, folder: str = "run", config=MIXTURE, **changes) -> list[float]:
        training = partial(endless_losses, folder=tmp_path / folder, config=config, **changes)
        by_rank = run_mesh(tp, training, data=data)
        assert all(losses == by_rank[0] for losses in by_rank)
        return by_rank[0]

    return run


LAYOUTS = {"TP 2 x DP 2, ZeRO 1": (2, 2, {"zero_stage": 1, "sequence_parallel": True})}
MORE = {
    "DP 4": (1, 4, {"zero_stage": 0}),
    "DDP": (1, 2, {"env_type": "pytorchDDP"}),
    "ZeRO 2": (2, 2, {"zero_stage": 2}),
    "one micro-batch": (2, 1, {"micro_batch_size": 8}),
}


@pytest.mark.parametrize("name", every_day(list(LAYOUTS), more=list(MORE)))
def test_every_layout_trains_the_same_curve(train, name):
    tp, data, changes = (LAYOUTS | MORE)[name]
    expected = train(1, folder="unsplit")
    assert train(tp, data, **changes) == pytest.approx(expected, **SAME_LOSS)


def _train_dealt(
    tensor: int, expert: int, folder: Path, config: dict[str, Any], **changes: Any
) -> list[float]:
    from shardzoo.mpu import ParallelMesh

    mesh = ParallelMesh(tensor, expert_parallel_size=expert)
    size = mesh.size("data", "expert")
    settings = {"micro_batch_size": 4 // size, "zero_stage": None, **changes}
    return endless_losses(mesh, folder, config, expert_parallel_size=expert, **settings)


@pytest.fixture
def deal(run_ranks, tmp_path):
    """`deal(tensor, expert, processes)`: trains with experts that are dealt over ranks."""

    def run(tensor: int, expert: int, processes: int, folder: str = "dealt", **changes):
        training = partial(_train_dealt, folder=tmp_path / folder, config=MIXTURE, **changes)
        by_rank = run_ranks(processes, training, tensor, expert)
        assert all(losses == by_rank[0] for losses in by_rank)
        return by_rank[0]

    return run


DEALT = {
    "TP 2 x EP 2": (2, 2, 4, {"sequence_parallel": True, "recompute": "full"}),
    "EP 2 x DP 2, DDP": (1, 2, 4, {"env_type": "pytorchDDP"}),
}
MORE_DEALT = {
    "EP 2 x DP 2": (1, 2, 4, {}),
    "EP 4": (1, 4, 4, {}),
    "one micro-batch": (1, 2, 2, {"micro_batch_size": 4}),
}


@pytest.mark.parametrize("name", by_turns(DEALT | MORE_DEALT, 5))
def test_dealt_experts_train_the_same_curve_and_resume_anywhere(train, deal, tmp_path, name):
    tensor, expert, processes, changes = (DEALT | MORE_DEALT)[name]
    expected = train(1, folder="unsplit", save_interval=4)
    losses = deal(tensor, expert, processes, save_interval=4, **changes)
    assert losses == pytest.approx(expected, **SAME_LOSS)
    # Resumed in the same layout, in one process, and with experts dealt anew.
    start = str(tmp_path / "dealt" / "checkpoints" / "step-000004")
    resumed = deal(tensor, expert, processes, folder="again", load_dir=start, **changes)
    assert resumed == losses[4:]
    assert train(1, folder="one", load_dir=start) == pytest.approx(losses[4:], **SAME_LOSS)
    start = str(tmp_path / "unsplit" / "checkpoints" / "step-000004")
    again = deal(tensor, expert, processes, folder="dealt again", load_dir=start, **changes)
    assert again == pytest.approx(expected[4:], **SAME_LOSS)


REFUSED = [
    ({"env_type": "pytorch"}, "env_type='pytorch'"),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
    ({"context_parallel_size": 2}, "context_parallel_size=2"),
    ({"zero_stage": 1}, "zero_stage=1"),
    ({"env_type": "fsdp"}, "env_type='fsdp'"),
    ({"optimizer": "muon"}, "optimizer='muon'"),
    ({"lora_rank": 2}, "lora_rank=2"),
    ({"precision": "bf16"}, "precision='bf16'"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_what_does_not_work_with_dealt_experts_is_refused_at_once(changes, named):
    from shardzoo.trainer import TrainingArguments

    settings = {"env_type": "deepspeed+mpu", "expert_parallel_size": 2, "train_steps": 1}
    with pytest.raises(ValueError, match="expert_parallel_size=2 does not work with") as caught:
        TrainingArguments(**{**settings, **changes})
    assert named in str(caught.value)


def _train_without_experts(folder: Path) -> str:
    from shardzoo.mpu import ParallelMesh

    mesh = ParallelMesh(expert_parallel_size=2)
    dense = {**MIXTURE, "model_type": "mistral"}
    for name in ("num_local_experts", "num_experts_per_tok", "output_router_logits"):
        del dense[name]
    del dense["router_aux_loss_coef"]
    try:
        endless_losses(
            mesh, folder, dense, expert_parallel_size=2, zero_stage=None, micro_batch_size=2
        )
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_without_experts_is_refused(run_ranks, tmp_path):
    [message, _] = run_ranks(2, _train_without_experts, tmp_path)
    assert "has none; use expert_parallel_size=1" in message


def test_the_auxiliary_loss_is_in_the_loss(train):
    plain = train(
        1, folder="plain", config={**MIXTURE, "output_router_logits": False}, train_steps=1
    )
    balanced = train(1, folder="balanced", train_steps=1)
    assert balanced[0] - plain[0] == pytest.approx(0.3 * 2, rel=0.1)  # 2: experts of a token


@pytest.mark.before_release
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(train, tmp_path):
    losses = train(2, folder="run", save_interval=4)
    start = str(tmp_path / "run" / "checkpoints" / "step-000004")
    assert train(2, folder="again", load_dir=start) == losses[4:]
    other = train(1, folder="other", load_dir=start)
    assert other == pytest.approx(losses[4:], **SAME_LOSS)


def test_a_pipeline_refuses_the_auxiliary_loss(run_mesh):
    [message, *_] = run_mesh(1, _call, pipeline=2)
    assert "not supported with pipeline parallelism" in message


def _call(mesh) -> str:
    from shardzoo.models import from_config

    model = from_config(MIXTURE, mesh)
    ids = torch.arange(8)[None]
    try:
        model(input_ids=ids, labels=ids)
    except ValueError as error:
        return str(error)
    return ""
