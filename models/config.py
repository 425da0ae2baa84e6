"""Defines the base class of the model configurations, which read and write Hugging Face's
`config.json`.

A family annotates each field with one of the types below, which state the type and the range.
`ModelConfig` checks all fields when a configuration is created.
"""

from __future__ import annotations

import json
import types
from collections.abc import Collection
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
        return (self.low < value if self.above else self.low <= value) and (
            value < self.high if self.below else value <= self.high
        )

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
TokenId = Annotated[int, Range(0, 2**31 - 1)]
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
    """Maps a common name (`hidden_size`) to this family's key (`n_embd`), like transformers'
    `attribute_map`.
    """

    vocab_size: VocabSize

    def __post_init__(self) -> None:
        for name, annotation in _annotations(type(self)).items():
            value = getattr(self, name)
            if allowed := _mismatch(annotation, value):
                raise ValueError(f"{name} must be {allowed}, not {shown(value)}")

    @property
    def attention_heads(self) -> int:
        """The number of attention heads, which limits the tensor-parallel size."""
        return getattr(self, self.attribute_map.get("num_attention_heads", "num_attention_heads"))

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
        """
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

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
        if hidden_size % heads:
            width, number = (
                self.attribute_map.get(key, key) for key in ("hidden_size", "num_attention_heads")
            )
            fitting = [n for n in range(1, min(hidden_size, 4 * heads) + 1) if hidden_size % n == 0]
            raise ValueError(
                f"{width}={hidden_size} is not a multiple of {number}={heads}; use {number} from {fitting}"
            )


ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


@dataclass(frozen=True)
class HeadsConfig(ModelConfig):
    """Base of the configurations of families with several heads.

    Attributes:
        architecture: The transformers class name, which selects the head.
        num_labels, problem_type: Settings of the classification heads; `config.json` stores the
            number of labels as the length of `id2label`.
        id2label, label2id: The names of the labels; `LABEL_0`, … by default.
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
        if self.id2label is not None and len(self.id2label) != self.num_labels:
            raise ValueError(
                f"id2label names {len(self.id2label)} labels, but num_labels is {self.num_labels}; "
                "change both, or set id2label and label2id to None"
            )
        if self.id2label is not None and set(map(str, self.id2label)) != set(
            map(str, range(self.num_labels))
        ):
            raise ValueError(
                f"id2label must name the labels 0 to {self.num_labels - 1}, not {shown(list(self.id2label))}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        values = dict(values)
        if architectures := values.get("architectures"):
            if not isinstance(architectures, list):
                raise ValueError(
                    f"architectures must be a list of class names, not {shown(architectures)}"
                )
            values["architecture"] = architectures[0]
        names: Any = values.get("id2label")
        if isinstance(names, dict):
            names = cast(dict[Any, Any], names)
            values["num_labels"] = len(names)
            if set(map(str, names.values())) == {f"LABEL_{i}" for i in range(len(names))}:
                values["id2label"] = values["label2id"] = None  # transformers' default names
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
def _annotations(config_class: type[ModelConfig]) -> dict[str, Any]:
    hints = get_type_hints(config_class, include_extras=True)
    return {field.name: hints[field.name] for field in fields(config_class)}


_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    types.NoneType: "null",
}


def _mismatch(annotation: Any, value: Any) -> str | None:
    """Returns what a value must be if the annotation does not allow it, or None if the annotation
    allows it.
    """
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        kind, constraint = arguments
        return _mismatch(kind, value) or (None if value in constraint else str(constraint))
    if origin in (Union, types.UnionType):
        wanted = [_mismatch(option, value) for option in arguments]
        return None if None in wanted else " or ".join(map(str, wanted))
    if origin is Literal:
        return None if value in arguments else " or ".join(map(repr, arguments))
    if origin in (list, dict):
        return _mismatched_items(origin, arguments, value)
    kinds = (int, float) if annotation is float else annotation
    is_flag = isinstance(value, bool) and annotation is not bool  # bool is a subclass of int
    return None if isinstance(value, kinds) and not is_flag else _NAMES[annotation]


def _mismatched_items(kind: type, annotations: tuple[Any, ...], value: Any) -> str | None:
    """Does what `_mismatch` does for a list or a dictionary."""
    name = "a list" if kind is list else "an object"
    if not isinstance(value, kind):
        return name
    for annotation, items in zip(
        annotations, [value] if kind is list else [value.keys(), value.values()], strict=True
    ):
        for item in items:
            if wanted := _mismatch(annotation, item):
                return f"{name} with each item {wanted}"
    return None


def shown(value: Any) -> str:
    """Returns a user's value as short text for an error message."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
