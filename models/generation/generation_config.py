"""Reads and writes the generation settings that belong to a model.

As in transformers 5, they are those of `generation_config.json` alone. A folder without that file,
as transformers wrote it before release 4.26, has them in its `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from ...checkpoint.folder_files import CONFIG, GENERATION_CONFIG
from ...files.strict_json import read_folder_json
from .assistance_settings import AssistanceSettings
from .outputs import OutputSettings
from .settings import (
    REFUSALS,
    WITHOUT_EFFECT,
    GenerationSettings,
    check_refused,
    select_settings,
    setting_names,
    suggest_name,
)

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
OUTPUT_NAMES = tuple(entry.name for entry in fields(OutputSettings))
ASSISTANCE_NAMES = tuple(entry.name for entry in fields(AssistanceSettings))


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

    @classmethod
    def from_object(cls, settings: Any) -> GenerationConfig:
        """Returns the settings of a mapping, or of transformers' `GenerationConfig`."""
        if isinstance(settings, GenerationConfig):
            return settings
        entries: Any = settings
        if not isinstance(settings, Mapping):
            entries = settings.to_dict()
        return cls({name: value for name, value in entries.items() if value is not None})

    def __getattr__(self, name: str) -> Any:
        if name in known_names():
            return None
        raise AttributeError(f"generation has no setting {name!r}")

    def __repr__(self) -> str:
        return f"GenerationConfig({self.to_dict()})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the stored settings by name."""
        return dict(vars(self))

    def to_diff_dict(self) -> dict[str, Any]:
        """Returns the stored settings that are not None by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def to_json_string(self) -> str:
        """Returns the text of a `generation_config.json`.

        A `compile_config` is an object of transformers that changes nothing, and is left out.
        """
        values = self.to_dict()
        values.pop("compile_config", None)
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    def update(self, **settings: Any) -> dict[str, Any]:
        """Stores settings of `generate`. Returns those that `generate` does not know."""
        unused: dict[str, Any] = {}
        for name, value in settings.items():
            target = vars(self) if name in known_names() else unused
            target[name] = value
        return unused

    def follows_from(self, model_config: Mapping[str, Any]) -> bool:
        """Returns whether a folder with this `config.json` alone has the same settings."""
        return select_of_model_config(vars(self)) == select_of_model_config(model_config)

    def save(self, folder: Path) -> None:
        """Writes the folder's `generation_config.json`."""
        (folder / GENERATION_CONFIG).write_text(self.to_json_string(), encoding="utf-8")


def known_names() -> Iterator[str]:
    """Yields the names of all settings of `generate` that a `generation_config.json` may have."""
    yield from setting_names()
    yield from OUTPUT_NAMES
    yield from ASSISTANCE_NAMES
    yield from REFUSALS
    yield from WITHOUT_EFFECT


def select_of_model_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the generation settings in the contents of a `config.json`."""
    known = {*setting_names(), *REFUSALS, RETURN_DICT, FORCE_FIRST}
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


@dataclass(frozen=True)
class CallSettings:
    """The settings of one call of `generate`."""

    generation: GenerationSettings
    outputs: OutputSettings
    assistance: AssistanceSettings


def resolve_settings(model: Any, given: Any, arguments: Mapping[str, Any]) -> GenerationSettings:
    """Returns the settings of one call of `generate` that decide its tokens.

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
    return resolve_call(model, given, arguments).generation


def resolve_call(model: Any, given: Any, arguments: Mapping[str, Any]) -> CallSettings:
    """Returns all settings of one call of `generate`; see `resolve_settings`."""
    sources = [_read_source(getattr(model, "generation_config", None) or _new_config(model))]
    if isinstance(given, GenerationSettings):
        sources.append(given.named_values())
    elif given is not None:
        sources.append(_read_source(given))

    settings: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for source in sources:
        settings |= select_settings(source)
        for name in (*OUTPUT_NAMES, *ASSISTANCE_NAMES):
            if source.get(name) is not None:
                others[name] = source[name]

    named: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in REFUSALS:
            check_refused(name, value)
        elif name in OUTPUT_NAMES or name in ASSISTANCE_NAMES:
            others.pop(name, None)
            if value is not None:
                others[name] = value
        elif name in setting_names():
            named[name] = value
        elif name not in WITHOUT_EFFECT:
            raise ValueError(
                f"generation has no argument {name!r}{suggest_name(name, known_names())}"
            )
    return CallSettings(
        GenerationSettings.from_values(settings, named),
        OutputSettings(**{name: others[name] for name in OUTPUT_NAMES if name in others}),
        AssistanceSettings(**{name: others[name] for name in ASSISTANCE_NAMES if name in others}),
    )


def _new_config(model: Any) -> GenerationConfig:
    return GenerationConfig.from_config(model.config)


def _read_source(settings: Any) -> Mapping[str, Any]:
    """Returns the settings of transformers' object, or of the contents of its file, by name."""
    if isinstance(settings, Mapping):
        return cast(Mapping[str, Any], settings)
    return settings.to_dict()
