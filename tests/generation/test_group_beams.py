"""Diverse beam search against transformers 4.49, the release behind `golden/group_beams.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from every_case import EVERY_CASE, every_day
from parity import load_stored
from safetensors import safe_open

GOLDEN = Path(__file__).parent.parent / "golden" / "group_beams.safetensors"


def search(mesh, config, stored, ids, mask, cases):
    import shardzoo
    from shardzoo.models import family

    model = shardzoo.from_config(config, mesh)
    load_stored(model, family(config["model_type"]).name_map, stored, mesh)
    return [
        model.generate(ids, mask, max_new_tokens=10, return_dict_in_generate=True, **case)
        for case in cases
    ]


@pytest.mark.parametrize("family", every_day(["gpt2"], more=["t5"]))
def test_sequences_and_scores(family, run_mesh):
    with safe_open(GOLDEN, "pt") as file:
        config, cases = json.loads(file.metadata()[family]), json.loads(file.metadata()["cases"])
        tensors = {name.removeprefix(family + "."): file.get_tensor(name) for name in file.keys()  # noqa: SIM118
                   if name.startswith(family + ".")}  # fmt: skip
    stored = {
        n.removeprefix("param."): tensor for n, tensor in tensors.items() if n.startswith("param.")
    }
    assert any(case.get("early_stopping") is True for case in cases)
    for size in (1, 2, 4) if EVERY_CASE else (1, 4):
        for found in run_mesh(size, search, config, stored, tensors["ids"], tensors["mask"], cases):
            for i, output in enumerate(found):
                assert torch.equal(output.sequences, tensors[f"sequences.{i}"]), (
                    f"{cases[i]} at TP {size}"
                )
                torch.testing.assert_close(
                    output.sequences_scores, tensors[f"scores.{i}"], rtol=1e-4, atol=1e-5
                )
