"""Damaged folders of every family: one message of one line, or a model; never another error."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import by_turns
from matrix import architecture_of, build, load_rows
from safetensors.torch import load_file, save_file

import shardzoo
from shardzoo.models import config_from_dict, family
from shardzoo.models.mapping import NativeModel

ROWS = load_rows()
FIRST = {
    family_name: name for name, (family_name, _) in reversed(ROWS.items())
}  # a row of each family
CLASSIFIERS = [
    name for name in ROWS if "Sequence" in (head := architecture_of(name)) or "Token" in head
]
NUMBERS: list[Any] = [-1, 0, 1, 7, 2.5, math.nan, math.inf, 10**9, "12", None, True, [], {}]
LISTS: list[Any] = [[], ["unknown"], [3], "full_attention", {}, None, math.nan]
OBJECTS: list[Any] = [
    {}, [], "yarn", {"rope_type": None}, {"rope_type": "unknown"}, {"rope_type": "yarn"}, {"rope_type": "longrope"},
    {"rope_type": "linear", "factor": -1.0}, {"rope_type": "linear", "factor": math.nan},
    {"rope_type": "llama3", "factor": "8"},
]  # fmt: skip
TEXTS: list[Any] = ["unknown", "", 3, None, ["gelu"], math.nan]


def hostile_values(value: Any) -> list[Any]:
    """Values of other types and out of range, by the type of the right value."""
    if isinstance(value, bool):
        return [0, "true", None, []]
    if isinstance(value, (int, float)):
        return NUMBERS
    if isinstance(value, list):
        return [*LISTS, value[:-1], value * 2]
    if isinstance(value, dict):
        missing = [{k: v for k, v in value.items() if k != key} for key in value]
        return [
            *OBJECTS,
            *missing,
            *({**value, key: bad} for key in value for bad in (None, -1, math.nan, "x", [])),
        ]
    return TEXTS if isinstance(value, str) else [*NUMBERS, *TEXTS, *OBJECTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`folders(name)`: the checkpoint of a row, which is never written to."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("hostile") / "hf"
            build(name, ROWS[name][1], made[name])
        return made[name]

    return get


def message_of(call) -> str:
    """What a ValueError says, in one short line; "" if there is none."""
    message = ""
    try:
        call()
    except ValueError as error:
        message = str(error) or "an empty message\n"
    assert "\n" not in message
    assert len(message) < 1500
    return message


def attempt(values: dict[str, Any]) -> str:
    """What building the model of a `config.json` says; "" if it works."""
    try:
        return message_of(lambda: NativeModel.from_config(config_from_dict(values)))
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error


@pytest.mark.parametrize("family_name", by_turns(FIRST, 5))
def test_every_value_of_a_configuration_makes_a_model_or_one_message(family_name, folders):
    values = json.loads((folders(FIRST[family_name]) / "config.json").read_text())
    known = {field.name for field in fields(family(family_name).config)} | {
        "layer_types",
        "rope_parameters",
    }
    wrong, refused = [], 0
    for key in [key for key in values if key in known or key.startswith(("rope", "num_", "max_"))]:
        for bad in hostile_values(values[key]):
            try:
                refused += bool(attempt({**values, key: bad}))
            except AssertionError as error:
                wrong.append(f"{key}={bad!r}: {error}")
    assert not wrong
    assert refused > 50


@pytest.mark.parametrize("family_name", by_turns(FIRST, 5))
def test_a_damaged_folder_names_what_is_wrong(family_name, folders, tmp_path):
    source = folders(FIRST[family_name])
    config = (source / "config.json").read_text()
    tensors = load_file(source / "model.safetensors")

    def message(config: str | None = config, **changes: torch.Tensor | None) -> str:
        (tmp_path / "config.json").write_text(config or "")
        kept = {name: value for name, value in {**tensors, **changes}.items() if value is not None}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return message_of(lambda: shardzoo.from_pretrained(tmp_path))

    assert message() == ""
    for length in (0, 1, len(config) // 2, len(config) - 3):
        assert "config.json" in message(config[:length])
    assert "config.json" in message("[]")
    assert "no model family 'unknown'" in message(
        json.dumps({**json.loads(config), "model_type": "unknown"})
    )
    # A bias of the logits that is zero is not added, whatever its shape.
    name_map = family(family_name).name_map
    unread = {name for name in tensors if name_map.is_ignored(name) or name in name_map.zeros}
    named = sorted(tensors.keys() - unread)
    for name in named[:: max(1, len(named) // 6)]:
        assert name in message(**{name: tensors[name].flatten()[:-1].clone()})
        assert name in message(**{name: torch.zeros(3, *tensors[name].shape)})
        assert name in message(**{name: None})
    assert "an.unknown.tensor" in message(**{"an.unknown.tensor": torch.zeros(2)})


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_another_number_of_labels_than_the_files_have_is_refused(name, folders, tmp_path):
    source = folders(name)
    values = json.loads((source / "config.json").read_text())
    labels = {str(i): f"LABEL_{i}" for i in range(13)}
    changed = {
        **values,
        "id2label": labels,
        "label2id": {label: int(i) for i, label in labels.items()},
    }
    (tmp_path / "config.json").write_text(json.dumps(changed))
    shutil.copy(source / "model.safetensors", tmp_path)
    found = message_of(lambda: shardzoo.from_pretrained(tmp_path))
    assert "13" in found
    assert "shape" in found
