"""Every architecture against transformers; `python tests/zoo/table.py` runs the whole matrix."""

from __future__ import annotations

import pytest
from matrix import architecture_of, check_case, load_rows

from shardzoo.models import FAMILIES, family

ROWS = load_rows()
BOTH = "sequence parallel and recompute"
LAYOUTS = (("plain", "fp32"), (BOTH, "fp32"), (BOTH, "dropout"), ("plain", "bf16"))


@pytest.mark.parametrize("name", ROWS)
def test_equal_to_transformers(name, run_mesh, tmp_path):
    """At one tensor-parallel size, which differs from row to row."""
    split = [size for size in ROWS[name][1].sizes if size > 1]
    figures = check_case(name, ROWS[name], tmp_path, run_mesh, [split[len(name) % len(split)]], LAYOUTS)
    assert not figures.problems, "\n".join(figures.problems)


def test_every_architecture_has_a_row():
    covered = {architecture_of(name) for name in ROWS}
    lacking = [
        name for model_type in FAMILIES if family(model_type).in_transformers
        for name in family(model_type).architectures if name not in covered
    ]  # fmt: skip
    assert not lacking, "add rows to tests/zoo/rows/"
