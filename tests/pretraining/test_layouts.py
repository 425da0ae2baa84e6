"""Each family learns each of its objectives alike under every layout, with its dropout.

Every day, a pair of family and objective visits one layout.
"""

from __future__ import annotations

from functools import partial

import pytest
from every_case import EVERY_CASE, every_day
from pretraining_runs import STEPS, run_pretraining, train_losses

# Losses in fp32 differ by the order of sums alone.
SAME_LOSS = {"rel": 1e-5, "abs": 0}
CASES = [
    ("bert", "bert-nsp"), ("t5", "prefix-lm"), ("glm", "glm"),
]  # fmt: skip
CASES = every_day(
    CASES,
    more=[
        ("gpt2", "gpt"),
        ("bart", "bart"),
        ("roberta", "roberta"),
        ("mt5", "ul2"),
        ("umt5", "t5"),
        ("t5", "t5"),
        ("llama", "gpt"),
        ("bert", "bert-sop"),
        ("bert", "roberta"),
        ("t5", "ul2"),
        ("mt5", "t5"),
        ("mt5", "prefix-lm"),
    ],
)
LAYOUTS = [(2, 1), (4, 1), (2, 2)]  # tensor-parallel, data-parallel
ALL_LAYOUTS = CASES if EVERY_CASE else []


@pytest.mark.parametrize(("family", "objective"), CASES)
def test_every_layout_has_the_same_losses(run_mesh, tmp_path, texts, config, family, objective):
    model = str(config(family))

    def losses(tp: int, data_ranks: int, source: str) -> list[float]:
        folder = tmp_path / f"{tp}-{data_ranks}"
        run = partial(
            run_pretraining, folder=folder, objective=objective, model=model, data=(source,), export=False,
            global_batch_size=8, micro_batch_size=4 // data_ranks,
        )  # fmt: skip
        return train_losses(run_mesh(tp, run, data=data_ranks)[0])

    unsplit = losses(1, 1, str(texts))
    assert len(unsplit) == STEPS
    assert unsplit[-1] < unsplit[0] - 0.1
    prepared = str(tmp_path / "1-1" / "data" / "train")
    pair = family, objective
    for tp, data_ranks in LAYOUTS if pair in ALL_LAYOUTS else [LAYOUTS[CASES.index(pair) % 3]]:
        assert losses(tp, data_ranks, prepared) == pytest.approx(unsplit, **SAME_LOSS), (
            tp,
            data_ranks,
        )
