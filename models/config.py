"""Defines the base class of the model configurations, which read and write Hugging Face's
`config.json`.

A family annotates each field with one of the types below, which state the type and the range.
`ModelConfig` checks all fields when a configuration is created.
"""

from __future__ import annotations

import json
import types
import warnings
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import Self

from .blocks.activation_functions import ACTIVATIONS


@dataclass(frozen=True)
class Range:
    """The range of values that a number may have.

    Attributes:
        low, high: The bounds.
        above: Whether `low` itself is excluded.
        below: Whether `high` itself is excluded.
    """

    low: float
    high: float
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        """Returns whether a number is in the range. NaN is in no range."""
        if value != value:
            return False
        is_too_low = value < self.low or (self.above and value == self.low)
        is_too_high = value > self.high or (self.below and value == self.high)
        return not is_too_low and not is_too_high

    def __str__(self) -> str:
        low = "above" if self.above else "at least"
        high = "below" if self.below else "at most"
        return f"{low} {self.low:,} and {high} {self.high:,}"


@dataclass(frozen=True)
class OneOf:
    """The strings that a field may be set to."""

    choices: tuple[str, ...]

    def __contains__(self, value: str) -> bool:
        return value in self.choices

    def __str__(self) -> str:
        return f"one of {', '.join(self.choices)}"


# The upper bounds are far above any published model. They reject a damaged file before it creates
# millions of modules.
LayerCount = Annotated[int, Range(1, 512)]
HeadCount = Annotated[int, Range(1, 2**16)]
HiddenSize = Annotated[int, Range(1, 2**20)]
InnerSize = Annotated[int, Range(1, 2**24)]
VocabSize = Annotated[int, Range(1, 2**31 - 1)]
PositionCount = Annotated[int, Range(1, 2**31 - 1)]
ClassCount = Annotated[int, Range(1, 2**20)]
# Published files say "no such token" with -1, which transformers accepts with a warning.
TokenId = Annotated[int, Range(-1, 2**31 - 1)]
Probability = Annotated[float, Range(0, 1, below=True)]
NormEpsilon = Annotated[float, Range(0, 1, above=True)]
InitializerScale = Annotated[float, Range(0, 1000)]
Activation = Annotated[str, OneOf(tuple(ACTIVATIONS))]


@dataclass(frozen=True)
class ModelConfig:
    """Base of the families' frozen configurations.

    Raises:
        ValueError: A field's annotation does not allow its value, or the values of several fields
            conflict.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    attribute_map: ClassVar[dict[str, str]] = {}
    """Maps a common name (`hidden_size`) to this family's key (`n_embd`), as in transformers. A
    `config.json` may have either; if it has both, the value of the common name counts there.
    """

    ties_without_head: ClassVar[bool] = False
    """Whether the head is the word embedding if files do not store one, whatever they say."""

    vocab_size: VocabSize

    def __post_init__(self) -> None:
        for name, annotation in _find_annotations(type(self)).items():
            value = getattr(self, name)
            allowed = _describe_mismatch(annotation, value)
            if allowed is not None:
                raise ValueError(f"{name} must be {allowed}, not {shown(value)}")

    @property
    def attention_heads(self) -> int:
        """The number of attention heads, which limits the tensor-parallel size."""
        return getattr(self, self.attribute_map.get("num_attention_heads", "num_attention_heads"))

    @property
    def padding_idx(self) -> int | None:
        """The row of the word embedding that is not trained, that of padding; None for no such row.

        As in PyTorch, -1 is the last row.
        """
        padding: int | None = getattr(self, "pad_token_id", None)
        if padding is not None and padding < 0:
            return self.vocab_size + padding
        return padding

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence that the position table supports."""
        raise NotImplementedError

    @property
    def max_target_length(self) -> int | None:
        """The number of positions of an encoder-decoder's decoder; None for no limit."""
        return None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns a configuration from the keys of a `config.json`.

        It ignores keys that this family does not use.

        Raises:
            ValueError: A value is not allowed, or a key asks for another model than the zoo's.
        """
        if values.get("per_layer_config"):
            raise ValueError(
                "per_layer_config is not supported: all layers of a model have the same settings"
            )
        values = cls.replace_common_names(values)
        known = {field.name for field in fields(cls)}
        config = cls(**{name: value for name, value in values.items() if name in known})
        for name in known:
            if name.endswith("_token_id") and getattr(config, name) == -1:
                warnings.warn(f"{name} is -1, which is no token of the vocabulary", stacklevel=2)
        return config

    @classmethod
    def replace_common_names(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the contents of a `config.json` with this family's keys for the common names.

        As in transformers, which sets the attributes of common names last, their values count if
        the file has both.
        """
        replaced = dict(values)
        for common, own in cls.attribute_map.items():
            if common in values:
                replaced[own] = replaced.pop(common)
        return replaced

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of a `config.json` that transformers' `AutoConfig` reads."""
        return {"architectures": [self.architecture], "model_type": self.model_type, **asdict(self)}

    def fitted_to(self, stored_names: Collection[str]) -> Self:
        """Returns the configuration of the model whose tensors have these names, if the names
        decide a setting.
        """
        return self

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text(
            json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        )

    def with_changes(self, **changes: Any) -> Self:
        """Returns a copy with other values, which are named by this family's keys or by the common
        names.
        """
        own = {self.attribute_map.get(name, name): value for name, value in changes.items()}
        known = [field.name for field in fields(self)]
        if unknown := [name for name in own if name not in known]:
            raise ValueError(
                f"{self.model_type} has no setting {unknown[0]!r}; use one of {', '.join(known)}"
            )
        return replace(self, **own)

    def check_heads(self, hidden_size: int, heads: int) -> None:
        """Raises ValueError, with this family's keys, if the number of heads does not divide the
        hidden size.
        """
        if hidden_size % heads == 0:
            return
        width = self.attribute_map.get("hidden_size", "hidden_size")
        number = self.attribute_map.get("num_attention_heads", "num_attention_heads")
        most = min(hidden_size, 4 * heads)
        fitting = [n for n in range(1, most + 1) if hidden_size % n == 0]
        raise ValueError(
            f"{width}={hidden_size} is not a multiple of {number}={heads}; use {number} from "
            f"{fitting}"
        )


def refuse_bidirectional(values: Mapping[str, Any]) -> None:
    """Raises ValueError if a `config.json` turns a decoder into an encoder.

    transformers reads `is_causal` for every family whose blocks are causal.
    """
    if not values.get("is_causal", True):
        raise ValueError(
            "is_causal=false makes an encoder of a decoder, which is not supported: it must be true"
        )


ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


@dataclass(frozen=True)
class HeadsConfig(ModelConfig):
    """Base of the configurations of families with several heads.

    Attributes:
        architecture: The transformers class name, which selects the head.
        num_labels, problem_type: Settings of the classification heads; `config.json` stores the
            number of labels as the length of `id2label`.
        id2label, label2id: The names of the labels; `LABEL_0`, … by default. As in transformers,
            they need not name all labels.
    """

    _: KW_ONLY
    architecture: str  # type: ignore[misc] - a class variable of the families with one head
    num_labels: ClassCount = 2
    problem_type: ProblemType | None = None
    id2label: dict[str, str] | dict[int, str] | None = None
    label2id: dict[str, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.problem_type == "single_label_classification" and self.num_labels == 1:
            raise ValueError(
                "problem_type='single_label_classification' needs num_labels of at least 2, not 1"
            )
        if self.id2label is None:
            return
        if len(self.id2label) != self.num_labels:
            raise ValueError(
                f"id2label names {len(self.id2label)} labels, but num_labels is {self.num_labels}; "
                "change both, or set id2label and label2id to None"
            )
        if not all(str(number).isdecimal() for number in self.id2label):
            raise ValueError(
                f"id2label must name numbers of labels, from 0 to {self.num_labels - 1}, not "
                f"{shown(list(self.id2label))}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        values = dict(values)
        architectures = values.get("architectures")
        if architectures:
            if not isinstance(architectures, list):
                raise ValueError(
                    f"architectures must be a list of class names, not {shown(architectures)}"
                )
            values["architecture"] = architectures[0]

        names: Any = values.get("id2label")
        if isinstance(names, dict):
            names = cast(dict[Any, Any], names)
            values["num_labels"] = len(names)
            default_names = {f"LABEL_{number}" for number in range(len(names))}
            if set(map(str, names.values())) == default_names:
                values["id2label"] = None
                values["label2id"] = None
            elif {*map(str, names)} != {*map(str, range(len(names)))}:
                warnings.warn(
                    f"id2label does not name the labels 0 to {len(names) - 1}, of which the model "
                    f"has {len(names)}, but {shown(list(names))}",
                    stacklevel=2,
                )

        # Some programs write the numbers of the labels as strings.
        numbers: Any = values.get("label2id")
        if isinstance(numbers, dict):
            read: dict[Any, Any] = {}
            for name, number in cast(dict[Any, Any], numbers).items():
                is_text = isinstance(number, str) and number.isdecimal() and len(number) < 10
                read[name] = int(number) if is_text else number
            values["label2id"] = read
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        del values["architecture"]
        number = values.pop("num_labels")
        if self.id2label is None:
            values["id2label"] = {str(i): f"LABEL_{i}" for i in range(number)}
            values["label2id"] = {f"LABEL_{i}": i for i in range(number)}
        return values


@lru_cache
def _find_annotations(config_class: type[ModelConfig]) -> dict[str, Any]:
    """Returns the annotation of each field of a configuration."""
    hints = get_type_hints(config_class, include_extras=True)
    return {field.name: hints[field.name] for field in fields(config_class)}


_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    types.NoneType: "null",
}


def _describe_mismatch(annotation: Any, value: Any) -> str | None:
    """Returns what a value must be if the annotation does not allow it, or None if the annotation
    allows it.
    """
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        kind, constraint = arguments
        mismatch = _describe_mismatch(kind, value)
        if mismatch is None and value not in constraint:
            return str(constraint)
        return mismatch
    if origin in (Union, types.UnionType):
        mismatches = [_describe_mismatch(option, value) for option in arguments]
        if None in mismatches:
            return None
        return " or ".join(map(str, mismatches))
    if origin is Literal:
        return None if value in arguments else " or ".join(map(repr, arguments))
    if origin in (list, dict):
        return _describe_mismatched_items(origin, arguments, value)
    kinds = (int, float) if annotation is float else annotation
    is_flag = isinstance(value, bool) and annotation is not bool  # bool is a subclass of int
    if isinstance(value, kinds) and not is_flag:
        return None
    return _NAMES[annotation]


def _describe_mismatched_items(kind: type, annotations: tuple[Any, ...], value: Any) -> str | None:
    """Does what `_describe_mismatch` does for a list or a dictionary."""
    name = "a list" if kind is list else "an object"
    if not isinstance(value, kind):
        return name
    parts = [value] if kind is list else [value.keys(), value.values()]
    for annotation, items in zip(annotations, parts, strict=True):
        for item in items:
            mismatch = _describe_mismatch(annotation, item)
            if mismatch is not None:
                return f"{name} with each item {mismatch}"
    return None


def shown(value: Any) -> str:
    """Returns a user's value as short text for an error message."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    if len(text) <= 100:
        return text
    return f"{text[:100]}…"
