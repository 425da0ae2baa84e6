"""How every architecture of the zoo's table is split stays as it was, because folders on disk are split so.

`golden/zoo_layouts.json` was written by `digest_layouts` below with the package of the commit 7dfb116; rows of later
architectures were added when those were.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import transformers
from every_case import by_turns
from matrix import architecture_of, find_class, load_rows

from shardzoo.models import config_from_dict
from shardzoo.models.auto import build_on_meta

GOLDEN = Path(__file__).parent.parent / "golden" / "zoo_layouts.json"
SIZES = (1, 2, 3, 4, 5, 8)
ROWS = load_rows()


def build(name: str):
    """The model of a row, whole, without storage."""
    architecture = architecture_of(name)
    config = find_class(architecture).config_class(**ROWS[name][1].config)
    values = json.loads(
        json.dumps({**config.to_dict(), "architectures": [architecture]}, default=str)
    )
    return build_on_meta(config_from_dict(values), None)


def describe_split(shard, size: int):
    """Shape, held ranges and computed ranges of each rank."""
    try:
        return [
            [
                shard.local_shape(rank, size),
                shard.ranges(rank, size),
                shard.compute_ranges(rank, size),
            ]
            for rank in range(size)
        ]
    except ValueError:
        return "refused"


def digest_layouts(name: str) -> dict[str, str]:
    """A digest for each tensor-parallel size of how all parameters are split."""
    parameters = list(build(name).named_parameters())
    digests = {}
    for size in SIZES:
        layout = {}
        for parameter_name, parameter in parameters:
            shard = getattr(parameter, "shard", None)
            if shard is None:
                layout[parameter_name] = list(parameter.shape)
            else:
                layout[parameter_name] = [shard.dim, shard.shape, describe_split(shard, size)]
        digests[str(size)] = hashlib.sha256(
            json.dumps(layout, sort_keys=True).encode()
        ).hexdigest()[:16]
    return digests


@pytest.mark.parametrize("family", by_turns(sorted({family for family, _ in ROWS.values()}), 3))
def test_every_parameter_is_split_as_it_was(family):
    transformers.logging.set_verbosity_error()
    golden = json.loads(GOLDEN.read_text())
    names = [name for name, (other, _) in ROWS.items() if other == family]
    assert {name: digest_layouts(name) for name in names} == {name: golden[name] for name in names}


def test_every_row_has_a_record():
    assert ROWS.keys() == json.loads(GOLDEN.read_text()).keys()
