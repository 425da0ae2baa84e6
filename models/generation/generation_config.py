"""Reads and writes the generation settings that belong to a model.

As in transformers 5, they are those of `generation_config.json` alone. A folder without that file,
as transformers wrote it before release 4.26, has them in its `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.folder_files import CONFIG, GENERATION_CONFIG
from ...files.strict_json import read_folder_json
from .settings import UNSUPPORTED, GenerationSettings, select_settings, setting_names

RETURN_DICT = "return_dict_in_generate"
FORCE_FIRST = "force_bos_token_to_be_generated"
TOKENS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
"""The settings that the families' configurations have, too."""


class GenerationConfig:
    """Holds the settings of `generate` that a call does not name, like transformers'
    `model.generation_config`.

    A setting that is not stored is None. Settings can be assigned:
    `model.generation_config.num_beams = 4`.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        vars(self).update(values or {})

    @classmethod
    def from_config(cls, config: Any) -> GenerationConfig:
        """Returns the settings of a new model: the tokens that its configuration names."""
        values: dict[str, Any] = {}
        for name in TOKENS:
            value = getattr(config, name, None)
            if value is not None:
                values[name] = value
        return cls(values)

    @classmethod
    def from_folder(cls, folder: Path, config: Any) -> GenerationConfig:
        """Returns the settings of a model's folder.

        Args:
            config: The model's configuration, which decides if the folder has no file of
                transformers.

        Raises:
            ValueError: A file is not a JSON object.
        """
        values = read_folder_json(folder, GENERATION_CONFIG)
        if values is not None:
            if values.get("_from_model_config"):
                return cls(_force_first_token(values))
            return cls(values)
        values = read_folder_json(folder, CONFIG)
        if values is not None:
            return cls(select_of_model_config(values))
        return cls.from_config(config)

    def __getattr__(self, name: str) -> Any:
        if name in setting_names():
            return None
        raise AttributeError(f"generation has no setting {name!r}")

    def __repr__(self) -> str:
        return f"GenerationConfig({self.to_dict()})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the stored settings by name."""
        return dict(vars(self))

    @property
    def returns_dict(self) -> bool:
        """Whether `generate` returns a `GenerateOutput` unless a call says otherwise."""
        return bool(vars(self).get(RETURN_DICT))

    def follows_from(self, model_config: Mapping[str, Any]) -> bool:
        """Returns whether a folder with this `config.json` alone has the same settings."""
        return select_of_model_config(vars(self)) == select_of_model_config(model_config)

    def save(self, folder: Path) -> None:
        """Writes the folder's `generation_config.json`."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        (folder / GENERATION_CONFIG).write_text(text + "\n", encoding="utf-8")


def select_of_model_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the generation settings in the contents of a `config.json`."""
    known = {*setting_names(), *UNSUPPORTED, RETURN_DICT, FORCE_FIRST}
    # A configuration may have a seed for another purpose (transformers' settings have none), and
    # use_cache changes no token.
    known -= {"seed", "use_cache"}
    selected: dict[str, Any] = {}
    for name, value in values.items():
        if name in known and value is not None:
            selected[name] = value
    return _force_first_token(selected)


def _force_first_token(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with today's name of the first BARTs' switch for their first token."""
    found = dict(values)
    if found.pop(FORCE_FIRST, False):
        found["forced_bos_token_id"] = found.get("bos_token_id")
    return found


def resolve_settings(model: Any, given: Any, arguments: Mapping[str, Any]) -> GenerationSettings:
    """Returns the settings of one call of `generate`.

    Arguments of the call come before `given`, and that before the model's `generation_config`.
    As in transformers, an argument that is None unsets what the others say.

    Args:
        given: None, `GenerationSettings`, or transformers' `GenerationConfig` as an object or as
            the contents of its file.
        arguments: Settings by name.

    Raises:
        ValueError: An argument is unknown (the message suggests a similar one), or a value is not
            possible.
    """
    stored = getattr(model, "generation_config", None)
    if stored is None:
        stored = GenerationConfig.from_config(model.config)
    values = select_settings(stored.to_dict())
    if isinstance(given, GenerationSettings):
        values |= given.named_values()
    elif given is not None:
        entries: Any = given
        if not isinstance(given, Mapping):
            entries = given.to_dict()
        values |= select_settings(entries)
    return GenerationSettings.from_values(values, arguments)
