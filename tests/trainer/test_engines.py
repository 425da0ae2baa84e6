"""Every engine takes the same steps, whatever the micro-batches, ranks and lengths."""

from __future__ import annotations

import pytest
import torch
from every_case import by_turns, every_day
from training import losses, native_t5, on_ranks

ONE_STEP = 1e-6  # fp32; the order of sums differs


@pytest.fixture(scope="module")
def big_batch(run_mesh, tmp_path_factory):
    """One process, one micro-batch of 8."""
    return on_ranks(run_mesh, tmp_path_factory.mktemp("big"), micro_batch_size=8)[0]


def assert_same(run, reference) -> None:
    assert losses(run[0]) == pytest.approx(losses(reference[0]), rel=2e-6)
    assert [s["grad_norm"] for s in run[0]] == pytest.approx(
        [s["grad_norm"] for s in reference[0]], rel=1e-5
    )


ENGINES = [
    ({"env_type": "pytorchDDP"}, 2),
    ({"env_type": "deepspeed", "zero_stage": 0}, 2),
    ({"env_type": "deepspeed", "zero_stage": 1}, 2),
    ({"env_type": "deepspeed", "zero_stage": 2}, 2),
    ({"env_type": "deepspeed", "zero_stage": 2, "offload_optimizer": True}, 2),
    ({"env_type": "deepspeed", "zero_stage": 3}, 2),
    ({"env_type": "fsdp"}, 2),
    ({"env_type": "pytorch"}, 1),
]


@pytest.mark.parametrize(("arguments", "ranks"), by_turns(ENGINES, 4), ids=lambda value: str(value))
def test_engines_and_accumulation_equal_the_big_batch(
    run_mesh, tmp_path, big_batch, arguments, ranks
):
    """Ragged micro-batches of 2, accumulated over 2 or 4 passes."""
    runs = on_ranks(run_mesh, tmp_path, data_ranks=ranks, global_batch_size=8, **arguments)
    for run in runs:
        assert_same(run, big_batch)


@pytest.mark.parametrize(
    ("stage", "model"),
    by_turns(
        every_day(
            [(1, native_t5), (2, None), (3, native_t5)], more=[(1, None), (2, native_t5), (3, None)]
        ),
        2,
    ),
)
def test_each_pass_counts_once_in_bf16(run_mesh, tmp_path, stage, model):
    """Eight passes of one sample have the gradient of one pass of eight."""
    arguments = {
        "env_type": "deepspeed",
        "zero_stage": stage,
        "precision": "bf16",
        "global_batch_size": 8,
        "train_steps": 2,
    }
    norms = []
    for size in (8, 1):
        [(steps, _)] = on_ranks(
            run_mesh, tmp_path / str(size), model=model, micro_batch_size=size, **arguments
        )
        norms.append([step["grad_norm"] for step in steps])
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


def left_behind(mesh):
    from deepspeed.utils import groups
    from torch.nn import functional

    return functional.linear is torch._C._nn.linear, groups.mpu


def test_deepspeed_leaves_nothing_behind(run_mesh, tmp_path):
    """Neither the product that stage 3 puts in place of torch's, which rounds twice, nor the mesh."""
    on_ranks(run_mesh, tmp_path / "mesh", data_ranks=2, train_steps=1, env_type="deepspeed+mpu")
    on_ranks(
        run_mesh,
        tmp_path / "stage",
        data_ranks=2,
        train_steps=1,
        env_type="deepspeed",
        zero_stage=3,
    )
    assert run_mesh(1, left_behind, data=2) == [(True, None)] * 2


@pytest.mark.parametrize(("arguments", "ranks"), by_turns(ENGINES, 2), ids=lambda value: str(value))
def test_one_step_gives_the_same_weights(run_mesh, tmp_path, arguments, ranks):
    settings = {
        "train_steps": 1,
        "lr": 1e-3,
        "optimizer": "adamw",
        "adam_eps": 1e-3,
        "warmup_steps": 0,
    }
    [(_, reference)] = on_ranks(run_mesh, tmp_path / "one", micro_batch_size=8, **settings)
    runs = on_ranks(
        run_mesh, tmp_path / "many", data_ranks=ranks, global_batch_size=8, **arguments, **settings
    )
    for _, weights in runs:
        assert weights.keys() == reference.keys()
        for name, value in weights.items():
            assert (value - reference[name]).abs().max() < ONE_STEP, name


def with_an_idle_layer(mesh):
    from training import tiny_t5

    model = tiny_t5()
    model.idle = torch.nn.Linear(4, 4)
    return model


def test_ddp_makes_no_step_without_a_gradient_of_each_parameter(run_mesh, tmp_path):
    """Its exchange would not be complete."""
    settings = {"model": with_an_idle_layer, "train_steps": 1, "env_type": "pytorchDDP"}
    with pytest.raises(
        AssertionError, match=r"gave no gradient to idle\.bias, idle\.weight, and .* freeze"
    ):
        on_ranks(run_mesh, tmp_path, data_ranks=2, isolated=True, **settings)
    assert not list(tmp_path.glob("checkpoints/step-*"))
