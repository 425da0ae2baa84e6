"""Mixtures of experts train the same curve under every layout, with the auxiliary loss."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from every_case import every_day
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


LAYOUTS = {
    "TP 3, sequence parallel, recompute": (3, 1, {"recompute": "full"}),
    "TP 2 x DP 2, ZeRO 1": (2, 2, {"zero_stage": 1, "sequence_parallel": True}),
}
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


def test_the_auxiliary_loss_is_in_the_loss(train):
    plain = train(
        1, folder="plain", config={**MIXTURE, "output_router_logits": False}, train_steps=1
    )
    balanced = train(1, folder="balanced", train_steps=1)
    assert balanced[0] - plain[0] == pytest.approx(0.3 * 2, rel=0.1)  # 2: experts of a token


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
