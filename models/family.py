"""Declares what the rest of the library needs to know about each model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from ..checkpoint.formats.gguf_file import GgufArchitecture
from ..checkpoint.stored_tensor import StoredTensor
from ..data.objectives.objective import Format
from .activations import Activations
from .config import ModelConfig
from .megatron import MegatronMap
from .name_map import NameEntry, NameMap

Kind = Literal["decoder", "encoder", "encoder-decoder"]
# A fine-tuning task -> the end of the name of the architecture that is trained for it.
HEADS_OF_TASKS = {
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
    "multiple-choice": "ForMultipleChoice",
}
# The conditional random field of a token classifier. transformers has none, and ignores these names.
CRF_ENTRIES = tuple(
    NameEntry(name, name)
    for name in (
        "crf_layer.start_transitions",
        "crf_layer.end_transitions",
        "crf_layer.transitions",
    )
)


class BlankText(Protocol):
    """Encodes texts with blanks, for a family that fills blanks."""

    tokens: Any  # ids of the special tokens

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text whose blanks are written as `[MASK]`, `[sMASK]` or
        `[gMASK]`.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        ...


@dataclass(frozen=True)
class Family:
    """The facts about a model family. The package `models/<model_type>/` exports them as `FAMILY`.

    How a model generates is declared by its class: see `LanguageModel.generates`.

    Attributes:
        config: The configuration class. Its `model_type` is the folder's name, with hyphens for
            underscores.
        architectures: Name of an architecture, as in `config.json` -> its class. The first is the
            default.
        name_map: Where a Hugging Face checkpoint stores each parameter. `find_names` returns it
            with the names of a configuration's experts.
        name_map_of: Returns the name map of a configuration, where it depends on more than the
            numbers of experts and layers; `name_map` is then that of the default configuration.
        presets: Name of a preset -> its configuration.
        kind: Which stacks of blocks the models have.
        objective: Name of the default pretraining objective in `shardzoo.data`.
        pretrains: Format of an objective's samples -> the architecture that is pretrained on them.
        tokenizer: Kind of tokenizer that is trained for a new model; see
            `shardzoo.data.train_tokenizer`.
        tokenizers: A configuration's `tokenizer_class` -> the kind for it, where that is another
            one.
        activations: Returns what a model of a configuration keeps for its backward pass; see
            docs/estimate.md.
        tasks: Name of a fine-tuning task -> the architecture that is trained for it. Those that
            follow from the names of the architectures are added.
        in_transformers: Whether transformers has this family under the same `model_type`.
        transformers_agrees: Whether transformers' model computes what this one does, so that it can
            evaluate what was trained here.
        masks_padding: Whether a 0 in `attention_mask` [B, S] means padding, as in transformers.
        blank_text: Makes the `BlankText` of a folder. Its second argument names the vocabulary;
            None finds it.
        has_config: Returns whether the contents of a `config.json` without a `model_type` belong to
            this family.
        infer_config: Infers the configuration from the tensors of each rank's file, for files
            without a `config.json`.
        megatron: How Megatron-LM stores the models, if it has the family.
        gguf: How GGUF files store the models: one way for each name that they have there.
        upcycled: Of a family of mixtures, the `model_type` of a dense family whose models it makes
            mixtures of -> a function of a dense configuration and the numbers of experts and of a
            token's experts, which returns the keys of the mixture's configuration. The mixture's
            first forward pass must compute what the dense model does.
    """

    config: type[ModelConfig]
    architectures: Mapping[str, type[nn.Module]]
    name_map: NameMap
    presets: Mapping[str, Any]
    kind: Kind
    objective: str
    pretrains: Mapping[Format, str]
    tokenizer: str
    activations: Callable[[Any], Activations]
    name_map_of: Callable[[Any], NameMap] | None = None
    tokenizers: Mapping[str, str] = field(default_factory=dict[str, str])
    tasks: Mapping[str, str] = field(default_factory=dict[str, str])
    in_transformers: bool = True
    transformers_agrees: bool = True
    masks_padding: bool = True
    blank_text: Callable[[Path, Any], BlankText] | None = None
    has_config: Callable[[Mapping[str, Any]], bool] | None = None
    infer_config: Callable[[Sequence[Mapping[str, StoredTensor]]], ModelConfig] | None = None
    megatron: MegatronMap | None = None
    gguf: Sequence[GgufArchitecture] = ()
    upcycled: Mapping[str, Callable[[Any, int, int], dict[str, Any]]] = field(
        default_factory=dict[str, Callable[[Any, int, int], "dict[str, Any]"]]
    )

    def __post_init__(self) -> None:
        found: dict[str, str] = {}
        for task, end in HEADS_OF_TASKS.items():
            for name in self.architectures:
                if name.endswith(end):
                    found[task] = name
        # A text is embedded by a model without a head; of an encoder-decoder by its encoder alone.
        for name, architecture in self.architectures.items():
            is_alone = name.endswith(("EncoderModel", "Encoder"))
            is_encoder = self.kind != "encoder-decoder" or is_alone
            if getattr(architecture, "is_bare", False) and is_encoder:
                found.setdefault("embedding", name)
        if "text-classification" in found:
            found["reranking"] = found["text-classification"]
            found["reward"] = found["text-classification"]
        for task in ("text-generation", "text2text-generation"):
            if task in self.tasks and self.blank_text is None:
                found.setdefault("preference", self.tasks[task])
        if self.kind == "encoder":  # generates with a mask of attention (UniLM)
            found["text2text-generation"] = next(
                name for name in self.architectures if name.endswith("ForMaskedLM")
            )
        elif "text-generation" in self.tasks:
            found["chat"] = self.tasks["text-generation"]
        object.__setattr__(self, "tasks", {**self.tasks, **found})
        if "token-classification" in found:
            names = replace(self.name_map, entries=self.name_map.entries + CRF_ENTRIES)
            object.__setattr__(self, "name_map", names)

    def find_names(self, config: ModelConfig) -> NameMap:
        """Returns where a checkpoint of a configuration's model stores each parameter."""
        names = self.name_map if self.name_map_of is None else self.name_map_of(config)
        names = names.with_experts(config.expert_count).ignoring_layers(config.extra_layers)
        return names.with_own_embeddings() if config.has_own_embeddings else names

    def tokenizer_of(self, config: ModelConfig) -> str:
        """Returns the kind of tokenizer that is trained for a new model of a configuration."""
        return self.tokenizers.get(getattr(config, "tokenizer_class", None) or "", self.tokenizer)


def by_name(*architectures: type[nn.Module]) -> dict[str, type[nn.Module]]:
    """Returns architectures by the names of their classes, which `config.json` stores."""
    return {architecture.__name__: architecture for architecture in architectures}
