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
    TYPE_CHECKING,
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

from ..checkpoint.folder_files import CONFIG
from ..checkpoint.hub import find_config_folder
from ..files.strict_json import read_folder_json
from ..files.working_copies import writing
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


# Keys of a `config.json` that belong to the file or to its weights, and that no attribute keeps.
FILE_KEYS = frozenset(
    {
        "architectures",
        "auto_map",
        "model_type",
        "quantization_config",
        "transformers_version",
        # Spellings of the rotary parameters, which the families with rotary positions read.
        "global_rope_theta",
        "local_rope_theta",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
    }
)
# Attributes that files do not have: where a model came from, and the type of its parameters.
UNSAVED = ("name_or_path", "dtype")
# What a call of a model does unless its arguments say otherwise, for every family.
CALL_SETTINGS = (
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "chunk_size_feed_forward",
    "name_or_path",
    "dtype",
)
# Other names of attributes, for every family.
SPELLINGS = {"_name_or_path": "name_or_path", "torch_dtype": "dtype"}


class ConfigType(type):
    """Makes configurations from transformers' keyword arguments.

    These are the family's keys, the common names of `attribute_map`, and any other names, which the
    configuration keeps as attributes.
    """

    if not TYPE_CHECKING:  # A type checker shall see the fields.

        def __call__(cls, *values: Any, **settings: Any) -> Any:
            known = {field.name for field in fields(cls)}
            own: dict[str, Any] = {}
            extras: dict[str, Any] = {}
            for name, value in settings.items():
                name = cls.attribute_map.get(name, name)
                target = own if name in known else extras
                target[name] = value
            names = extras.pop("architectures", None)
            if names and "architecture" in known:
                own.setdefault("architecture", names[0])
            labels = own.get("id2label")
            if isinstance(labels, dict):
                own.setdefault("num_labels", len(labels))

            config = super().__call__(*values, **own)
            # From now on, `__setattr__` checks what is set.
            vars(config)["_owner"] = ""
            for name, value in extras.items():
                if name not in FILE_KEYS:
                    setattr(config, name, value)
            return config


@dataclass
class ModelConfig(metaclass=ConfigType):
    """Base of the families' configurations.

    Attributes can be set, also by the common names of `attribute_map`. A model has a copy of the
    configuration that it is built from. In that copy, what is built into the model's modules cannot
    be changed any more.

    Attributes:
        use_cache, return_dict, output_hidden_states, output_attentions: What a call of the model
            does unless its arguments say otherwise.
        name_or_path: Where the model was loaded from.
        dtype: The type of the parameters, if a program has set it; files do not have it.

    Raises:
        ValueError: A field's annotation does not allow its value, or the values of several fields
            conflict.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    attribute_map: ClassVar[dict[str, str]] = {}
    """Maps a common name (`hidden_size`) to this family's key (`n_embd`), as in transformers. A
    `config.json` may have either; if it has both, the value of the common name counts there, unless
    it is one of `weak_names`.
    """

    weak_names: ClassVar[frozenset[str]] = frozenset()
    """Common names whose value counts only if a `config.json` does not have the family's key."""

    ties_without_head: ClassVar[bool] = False
    """Whether the head is the word embedding if files do not store one, whatever they say."""

    live_settings: ClassVar[tuple[str, ...]] = ("problem_type", "label2id", "tokenizer_class")
    """The settings, beside the ids of tokens, that a model reads in each call."""

    # Settings that transformers' configurations have in every family. They are no fields, so files
    # have them only where they differ from these values.
    use_cache: ClassVar[bool] = True
    return_dict: ClassVar[bool] = True
    output_hidden_states: ClassVar[bool] = False
    output_attentions: ClassVar[bool] = False
    is_encoder_decoder: ClassVar[bool] = False
    chunk_size_feed_forward: ClassVar[int] = 0
    name_or_path: ClassVar[str] = ""
    sub_configs: ClassVar[dict[str, Any]] = {}
    dtype: ClassVar[Any] = None
    _attn_implementation: ClassVar[str] = "sdpa"

    vocab_size: VocabSize

    def __post_init__(self) -> None:
        for name, annotation in _find_annotations(type(self)).items():
            _check_value(name, annotation, getattr(self, name))

    if not TYPE_CHECKING:  # A type checker shall find misspelled attributes.

        def __getattr__(self, name: str) -> Any:
            """Returns an attribute by its common name. Python asks for what it does not find."""
            own = type(self).attribute_map.get(name) or SPELLINGS.get(name)
            if own is None:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return getattr(self, own)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, after a check of its type and range.

        Raises:
            ValueError: The value is not allowed, or is built into the modules of a model.
        """
        name = self.attribute_map.get(name, name)
        name = SPELLINGS.get(name, name)
        owner = vars(self).get("_owner")
        annotation = _find_annotations(type(self)).get(name)
        if owner is None or name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if name == "architectures":
            self._set_architectures(value)
            return
        if annotation is not None:
            _check_value(name, annotation, value)
        elif isinstance(getattr(type(self), name, None), property):
            raise ValueError(f"{name} follows from other settings of {type(self).__name__}")
        elif name == "is_encoder_decoder" and value != self.is_encoder_decoder:
            raise ValueError(
                f"is_encoder_decoder must be {self.is_encoder_decoder}, as every {self.model_type} is"
            )
        is_live = name.endswith("_token_id") or name in self.live_settings
        is_built = owner != "" and annotation is not None and not is_live
        if is_built and value != getattr(self, name):
            raise ValueError(
                f"{name}={shown(value)} cannot be set: the modules of this {owner} were built with "
                f"{name}={shown(getattr(self, name))}; change the configuration before the model "
                "is built"
            )
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy gets: it belongs to no model, so all of it can be changed."""
        state = dict(vars(self))
        if state.get("_owner"):
            state["_owner"] = ""
        return state

    def _set_architectures(self, names: Any) -> None:
        if not names or names[0] == self.architecture:
            return
        if "architecture" not in _find_annotations(type(self)):
            raise ValueError(
                f"architectures must be {[self.architecture]}, the only one of {self.model_type}, "
                f"not {shown(names)}"
            )
        setattr(self, "architecture", names[0])  # noqa: B010 - a field, in families with several

    @property
    def architectures(self) -> list[str]:
        """The name of the model's class, as transformers has it."""
        return [self.architecture]

    @property
    def use_return_dict(self) -> bool:
        """Whether a call returns an output with names, unless its arguments say otherwise."""
        return self.return_dict

    def copy_for_model(self, owner: str, **changes: Any) -> Self:
        """Returns a copy that a model keeps, with other values of some fields.

        Fields that were set one by one are checked together here.

        Args:
            owner: The name of the model's class.
        """
        copy = self.with_changes(**changes)
        copy.bind_to_model(owner)
        return copy

    def bind_to_model(self, owner: str) -> None:
        """Refuses from now on the changes that the modules of a model would not follow."""
        vars(self)["_owner"] = owner

    def change_built(self, **changes: Any) -> None:
        """Sets fields of a built model whose modules have been changed accordingly."""
        vars(self).update(changes)

    def list_extras(self) -> dict[str, Any]:
        """Returns the attributes that are no fields, and differ from the class's."""
        known = _find_annotations(type(self))
        extras: dict[str, Any] = {}
        for name, value in vars(self).items():
            is_own = name in known or name.startswith("_")
            if not is_own and value != getattr(type(self), name, None):
                extras[name] = value
        return extras

    @property
    def attention_heads(self) -> int:
        """The number of attention heads, which limits the tensor-parallel size."""
        return getattr(self, self.attribute_map.get("num_attention_heads", "num_attention_heads"))

    @property
    def expert_count(self) -> int:
        """The number of experts of each mixture; 0 for a model without mixtures."""
        return 0

    @property
    def extra_layers(self) -> range:
        """The numbers of layers that files may have and the model does not."""
        return range(0)

    @property
    def has_own_embeddings(self) -> bool:
        """Whether the stacks of an encoder-decoder have word embeddings of their own."""
        return False

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

        Keys that this family does not use become attributes, which change nothing and are saved.

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
        for name, value in values.items():
            # Names of properties and methods, and of settings that every model of the family has.
            is_taken = hasattr(cls, name) and name not in CALL_SETTINGS
            is_kept = name not in FILE_KEYS and not is_taken and not name.startswith("_")
            if name not in known and is_kept and value is not None:
                setattr(config, name, value)
        for name in known:
            if name.endswith("_token_id") and getattr(config, name) == -1:
                warnings.warn(f"{name} is -1, which is no token of the vocabulary", stacklevel=2)
        return config

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, token: str | None = None, **changes: Any
    ) -> Self:
        """Returns the configuration of a folder, a file, or a name on the Hub.

        Args:
            changes: Settings that replace the file's.

        Raises:
            ValueError: There is no configuration of this family, or a value is not allowed.
        """
        source = str(pretrained_model_name_or_path)
        options = {} if token is None else {"token": token}
        path = Path(find_config_folder(source, options))
        folder = path if path.is_dir() else path.parent
        values = read_folder_json(folder, CONFIG if path.is_dir() else path.name)
        if values is None:
            raise ValueError(f"{source} is neither a folder with a {CONFIG} nor such a file")
        found = values.get("model_type", cls.model_type)
        if found != cls.model_type:
            raise ValueError(f"{source} has a configuration of {found}, not of {cls.model_type}")
        config = cls.from_dict(values)
        for name, value in changes.items():
            setattr(config, name, value)
        vars(config)["name_or_path"] = source
        return config

    @classmethod
    def replace_common_names(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the contents of a `config.json` with this family's keys for the common names.

        As in transformers, which sets the attributes of common names last, their values count if
        the file has both; but it sets those of `weak_names` first.
        """
        replaced = dict(values)
        for common, own in cls.attribute_map.items():
            if common not in values:
                continue
            value = replaced.pop(common)
            if common not in cls.weak_names or own not in values:
                replaced[own] = value
        return replaced

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of a `config.json` that transformers' `AutoConfig` reads."""
        values = {"architectures": self.architectures, "model_type": self.model_type}
        values |= asdict(self)
        for name, value in self.list_extras().items():
            if name not in UNSAVED:
                values.setdefault(name, value)
        return values

    def to_diff_dict(self) -> dict[str, Any]:
        """Returns what differs from the family's default configuration, and the model's type."""
        default = cast(Any, type(self))(architectures=self.architectures).to_dict()
        changed: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            if name in ("architectures", "model_type") or default.get(name) != value:
                changed[name] = value
        return changed

    def to_json_string(self, use_diff: bool = True) -> str:
        """Returns the contents of a `config.json` as text.

        Args:
            use_diff: Leave out what is the family's default.
        """
        values = self.to_diff_dict() if use_diff else self.to_dict()
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | Path, use_diff: bool = True) -> None:
        """Writes the text of `to_json_string`."""
        Path(json_file_path).write_text(self.to_json_string(use_diff), encoding="utf-8")

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Self:
        """Returns itself: the part of a configuration that describes the text model."""
        return self

    @property
    def per_layer_config(self) -> list[Self]:
        """The configuration of each layer, which are all built alike."""
        name = "num_hidden_layers"
        return [self] * int(getattr(self, self.attribute_map.get(name, name)))

    def update(self, config_dict: Mapping[str, Any]) -> None:
        """Sets several attributes."""
        for name, value in config_dict.items():
            setattr(self, name, value)

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False) -> None:
        """Writes `config.json` into a folder, which is made if needed, or into that of a URL.

        Raises:
            ValueError: `push_to_hub` is set: a model is committed with its configuration.
        """
        if push_to_hub:
            raise ValueError("push_to_hub of a configuration alone is not supported; push a model")
        with writing(save_directory) as folder:
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"{folder} is a file; name a folder to save the configuration in")
            folder.mkdir(parents=True, exist_ok=True)
            self.save(folder)

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
        extras = self.list_extras()
        for name in list(own):
            if name in CALL_SETTINGS or name in extras:
                extras[name] = own.pop(name)
        if unknown := [name for name in own if name not in known]:
            raise ValueError(
                f"{self.model_type} has no setting {unknown[0]!r}; use one of {', '.join(known)}"
            )
        changed = replace(self, **own)
        for name, value in extras.items():
            setattr(changed, name, value)
        vars(changed)["_attn_implementation"] = self._attn_implementation
        return changed

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


@dataclass
class HeadsConfig(ModelConfig):
    """Base of the configurations of families with several heads.

    Attributes:
        architecture: The transformers class name, which selects the head.
        num_labels, problem_type: Settings of the classification heads; `config.json` stores the
            number of labels as the length of `id2label`.
        id2label, label2id: The names of the labels by their numbers, and back; `LABEL_0`, … by
            default. As in transformers, they need not name all labels.
        crf: Whether the labels of tokens are those of a conditional random field, which
            transformers does not have. Other heads do not read it, and files have it only if true.
        pointer_size: The features of a query and of a key of a global pointer, which scores spans of
            tokens for each label, and which transformers does not have; None for labels of tokens.
            Other heads do not read it, and files have it only if it is set.
    """

    _: KW_ONLY
    architecture: str  # type: ignore[misc] - a class variable of the families with one head
    num_labels: ClassCount = 2
    problem_type: ProblemType | None = None
    id2label: dict[str, str] | dict[int, str] | None = None
    label2id: dict[str, int] | None = None
    crf: bool = False
    pointer_size: HiddenSize | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pointer_size is not None and self.pointer_size % 2:
            raise ValueError(
                f"pointer_size must be even, because pairs of features rotate, not {self.pointer_size}"
            )
        if self.pointer_size is not None and self.crf:
            raise ValueError(
                "a model has a conditional random field (crf) or a pointer_size, not both"
            )
        if self.id2label is None:
            object.__setattr__(self, "id2label", name_labels(self.num_labels))
            if not self.label2id:
                numbers = {name: i for i, name in name_labels(self.num_labels).items()}
                object.__setattr__(self, "label2id", numbers)
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
        numbered = {int(number): name for number, name in self.id2label.items()}
        if len(numbered) != self.num_labels:
            raise ValueError(f"id2label names a label twice: {shown(list(self.id2label))}")
        object.__setattr__(self, "id2label", numbered)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. As in transformers, another number of labels gets new names, and
        `id2label` sets the number.
        """
        # Scripts name labels by whole numbers too; a file has their texts.
        if name == "label2id" and isinstance(value, dict):
            numbers = cast(dict[Any, Any], value)
            value = {_name_label(label): number for label, number in numbers.items()}
        if name == "id2label" and isinstance(value, dict):
            labels = cast(dict[Any, Any], value)
            value = {number: _name_label(label) for number, label in labels.items()}
        has_number = vars(self).get("_owner") is not None
        if has_number and name == "num_labels" and value != self.num_labels:
            super().__setattr__(name, value)
            vars(self)["id2label"] = name_labels(self.num_labels)
            vars(self)["label2id"] = {text: i for i, text in name_labels(self.num_labels).items()}
            return
        if has_number and name == "id2label":
            changed = self.with_changes(id2label=value, num_labels=len(value or ()) or 2)
            super().__setattr__("num_labels", changed.num_labels)
            vars(self)["id2label"] = changed.id2label
            return
        super().__setattr__(name, value)

    def with_changes(self, **changes: Any) -> Self:
        """Returns a copy with other values; see `ModelConfig.with_changes`.

        The default names of labels follow their number.
        """
        has_new_number = changes.get("num_labels", self.num_labels) != self.num_labels
        if has_new_number and self.id2label == name_labels(self.num_labels):
            changes.setdefault("id2label", None)
            changes.setdefault("label2id", None)
        return super().with_changes(**changes)

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
            default_names = name_labels(len(names))
            if {str(number): name for number, name in names.items()} == {
                str(number): name for number, name in default_names.items()
            }:
                values["id2label"] = None
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
        del values["num_labels"]
        if not self.crf:
            del values["crf"]
        if self.pointer_size is None:
            del values["pointer_size"]
        names = self.id2label or {}
        values["id2label"] = {str(number): name for number, name in names.items()}
        return values


def _name_label(label: Any) -> Any:
    """Returns the text of a label that is a whole number; anything else as it is."""
    return str(label) if isinstance(label, int) else label


def name_labels(count: int) -> dict[int, str]:
    """Returns transformers' names of labels that have none."""
    return {number: f"LABEL_{number}" for number in range(count)}


def _check_value(name: str, annotation: Any, value: Any) -> None:
    """Raises ValueError if the annotation of a field does not allow its value."""
    allowed = _describe_mismatch(annotation, value)
    if allowed is not None:
        raise ValueError(f"{name} must be {allowed}, not {shown(value)}")


@lru_cache
def _find_annotations(config_class: type[ModelConfig]) -> dict[str, Any]:
    """Returns the annotation of each field of a configuration."""
    # To Python 3.10 the marker of keyword-only fields, an object, is no annotation; its class is one.
    marker = {"KW_ONLY": type(KW_ONLY)}
    hints = get_type_hints(config_class, localns=marker, include_extras=True)
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
    if annotation is object:  # what a file has, and the zoo only keeps
        return None
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
