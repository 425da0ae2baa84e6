"""Every family trains the same under `deepspeed+mpu` at TP=1, 2 and 4, and goes on from any of them."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from every_case import EVERY_CASE, by_turns
from tiny_models import tiny
from training import losses, on_ranks

FAMILIES = {
    "glm": {},
    "t5": {},
    "mt5": {},
    "bert": {"architectures": ["BertForMaskedLM"]},
    "roberta": {},
    "electra": {},
    "modernbert": {},
    "umt5": {},
    "bart": {"init_std": 0.2},
    "llama": {},
    "eurobert": {},
    "xlm-roberta-xl": {},
    "megatron-bert": {},
}
STEPS = 4


class Samples:
    """Equal lengths, unequal numbers of targets."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, 97, (16,), generator=generator)
        labels = tokens.clone()
        labels[: 2 + index % 5] = -100
        return {"input_ids": tokens, "labels": labels}


def build(mesh, family: str):
    from shardzoo.models import from_config

    return from_config(tiny(family, layers=2, **FAMILIES[family]), mesh)


@pytest.mark.parametrize("family", by_turns(FAMILIES, 7))
def test_splitting_changes_nothing_and_any_split_goes_on(run_mesh, tmp_path, family):
    """Every day, families are split in two and go on whole, or go on split in four, in turn."""
    settings = {
        "env_type": "deepspeed+mpu",
        "model": partial(build, family=family),
        "data": Samples(),
        "train_steps": STEPS,
        "lr": 5e-3,
        "global_batch_size": 4,
    }
    [(whole, _)] = on_ranks(run_mesh, tmp_path / "1", save_interval=2, **settings)
    assert losses(whole)[-1] < losses(whole)[0]
    first = str(tmp_path / "1" / "checkpoints" / "step-000002")
    splits = [
        (2, 0, {"save_interval": 2}),
        (4, 2, {"load_dir": first, "recompute": "full"}),
        (4, 0, {}),
    ]
    number = list(FAMILIES).index(family) // 2 % 2
    for tp, start, arguments in splits if EVERY_CASE else splits[number : number + 1]:
        split = {**settings, **arguments, "model_parallel_size": tp}
        runs = on_ranks(run_mesh, tmp_path / f"{tp} {start}", tp=tp, **split)
        for steps, _ in runs:
            assert losses(steps) == pytest.approx(losses(whole)[start:], rel=1e-5), (tp, arguments)
            norms = [s["grad_norm"] for s in steps]
            assert norms == pytest.approx([s["grad_norm"] for s in whole][start:], rel=1e-4)
    back = tmp_path / "2 0" / "checkpoints" / "step-000002"
    if not back.exists():
        return
    [(rest, _)] = on_ranks(run_mesh, tmp_path / "back", load_dir=str(back), **settings)
    assert losses(rest) == pytest.approx(losses(whole)[2:], rel=1e-5)


def build_with_dropout(mesh, reduction: str = "auto"):
    """The model; compiled, its products are operators, as large ones are."""
    from shardzoo.models import ParallelConfig, from_config
    from shardzoo.mpu import collectives
    from shardzoo.ops.cpu import products

    mock.patch.object(products, "MIN_PRODUCT", 1).start()
    assert collectives._reductions[mesh.tp_group] == reduction
    config = ParallelConfig(sequence_parallel=mesh is not None and mesh.tp_size > 1)
    return from_config(tiny("gpt2", 0.1, layers=2), mesh, parallel_config=config)


@pytest.mark.before_release
def test_compiled_blocks_take_the_same_steps(run_mesh, tmp_path):
    """Split, also along the sequence, with dropout and recomputation; each step has new masks."""
    settings = {
        "env_type": "deepspeed+mpu", "model": build_with_dropout, "data": Samples(), "train_steps": STEPS, "lr": 5e-3,
        "micro_batch_size": 2, "recompute": "full", "gradient_accumulation_steps": 2, "isolated": True,
    }  # fmt: skip
    [(plain, _)] = on_ranks(run_mesh, tmp_path / "plain", **settings)
    compiled = {"model": partial(build_with_dropout, reduction="native"), "tensor_parallel_reduction": "native",
                "torch_compile": True, "torch_compile_backend": "aot_eager", "model_parallel_size": 2,
                "sequence_parallel": True}  # fmt: skip
    for steps, _ in on_ranks(run_mesh, tmp_path / "compiled", tp=2, **{**settings, **compiled}):
        assert losses(steps) == pytest.approx(losses(plain), rel=1e-5)
