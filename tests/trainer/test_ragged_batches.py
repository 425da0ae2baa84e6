"""Ragged samples train alike however they are grouped: the width that a micro-batch is padded to changes nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from every_case import EVERY_CASE, by_turns
from tiny_models import tiny
from training import losses, on_ranks

GLOBAL, STEPS = 8, 4
LAYOUTS = [(1, 1, 8), (1, 1, 4), (1, 1, 2), (1, 4, 2), (2, 1, 8), (2, 2, 2)]  # TP, DP, micro-batch


class Ragged:
    """Sample i is a function of i, of 4 to 15 tokens, for T5 to 99, some of which have no label.

    So batches of T5 are wide enough for attention's kernel, or not.
    """

    def __init__(self, family: str) -> None:
        self.family = family

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(index)
        tokens = random.integers(3, 97, random.integers(4, 100 if self.family == "t5" else 16))
        labels = np.where(random.random(len(tokens)) < 0.3, -100, tokens)
        labels[-1] = tokens[-1]
        sample = {
            "input_ids": tokens,
            "labels": labels if "t5" not in self.family else labels[: 1 + index % 7],
        }
        if self.family == "glm":  # its mask is a number, the length of part A
            sample |= {
                "position_ids": np.stack(
                    [np.arange(len(tokens)), np.zeros(len(tokens), dtype=np.int64)]
                )
            }
            sample |= {"attention_mask": np.asarray(2)}
        return sample


def build(mesh: Any, family: str) -> torch.nn.Module:
    from shardzoo.models import from_config

    architectures = {"architectures": ["BertForMaskedLM"]} if family == "bert" else {}
    return from_config(tiny(family, 0.1, layers=2, **architectures), mesh)


FAMILIES = ["gpt2", "bert", "roberta", "t5", "mt5", "glm"]


@pytest.mark.parametrize("family", by_turns(FAMILIES, 4))
def test_ragged_samples_train_alike_in_micro_batches_of_any_size(run_mesh, tmp_path, family):
    runs = {}
    first = FAMILIES.index(family) // 2 % 2  # every day, the other layouts by turns
    for tp, data, size in LAYOUTS if EVERY_CASE else [LAYOUTS[0], *LAYOUTS[2 + first :: 2]]:
        engine = "deepspeed+mpu" if tp > 1 else "pytorchDDP"
        [(steps, _), *_] = on_ranks(
            run_mesh, tmp_path / f"{tp}-{data}-{size}", tp=tp, data_ranks=data, env_type=engine,
            model=partial(build, family=family), data=Ragged(family), train_steps=STEPS, lr=5e-3,
            global_batch_size=GLOBAL, micro_batch_size=size, model_parallel_size=tp,
        )  # fmt: skip
        runs[tp, data, size] = losses(steps)
    whole = runs.pop((1, 1, 8))
    for layout, other in runs.items():
        assert other == pytest.approx(whole, rel=1e-5), layout
