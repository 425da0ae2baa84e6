"""The families that no other table of the trainer's tests has: each split in every way, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny_models import tiny
from training import losses, on_ranks

FAMILIES = {
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "olmo2": {},
    "olmo3": {},
    "modernbert-decoder": {},
    "esm": {"architectures": ["EsmForMaskedLM"]},
    "deberta-v2": {"architectures": ["DebertaV2ForMaskedLM"]},
    "longt5": {},
    "t5gemma": {},
    "t5gemma, encoder alone": {
        "architectures": ["T5GemmaForTokenClassification"],
        "is_encoder_decoder": False,
        "num_labels": 97,
    },
    "t5gemma2": {},
}
# Sizes of the mesh, and arguments of the trainer.
LAYOUTS = {
    "tensor": ({"tp": 2}, {"env_type": "deepspeed+mpu", "model_parallel_size": 2}),
    "pipeline": ({"stages": 2}, {"env_type": "deepspeed+mpu", "pipeline_parallel_size": 2}),
    # Of encoder-decoders each stack is cut, too.
    "long pipeline": ({"stages": 4}, {"env_type": "deepspeed+mpu", "pipeline_parallel_size": 4}),
    "FSDP2": ({"data_ranks": 2}, {"env_type": "fsdp"}),
    "context": ({"context": 2}, {"env_type": "pytorchDDP", "context_parallel_size": 2}),
}
ENCODER_DECODERS = ("longt5", "t5gemma", "t5gemma2")
UNSPLIT = ("deberta-v2", "longt5")  # whose sequences are not split over ranks


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

    model_type = family.partition(",")[0]
    return from_config(tiny(model_type, 0.1, layers=2, **FAMILIES[family]), mesh)


SETTINGS = {
    "data": Samples(),
    "train_steps": 3,
    "lr": 5e-3,
    "adam_eps": 1e-6,
    "global_batch_size": 4,
    "micro_batch_size": 2,
}


@pytest.mark.before_release
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_takes_the_steps_of_one_process(run_mesh, tmp_path, family):
    settings = {**SETTINGS, "model": partial(build, family=family)}
    [(whole, _)] = on_ranks(run_mesh, tmp_path / "whole", env_type="pytorch", **settings)
    norms = [step["grad_norm"] for step in whole]
    assert len({*losses(whole)}) == 3
    for name, (sizes, arguments) in LAYOUTS.items():
        if name == "context" and family in UNSPLIT:
            continue
        if name == "long pipeline" and family not in ENCODER_DECODERS:
            continue
        for steps, _ in on_ranks(run_mesh, tmp_path / name, **settings, **sizes, **arguments):
            assert losses(steps) == pytest.approx(losses(whole), rel=1e-5), name
            assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-4), name
