"""Defines BERT's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from typing_extensions import Self

from ..common.config import (
    Activation,
    ClassCount,
    HeadCount,
    HiddenSize,
    InitializerScale,
    InnerSize,
    LayerCount,
    ModelConfig,
    NormEpsilon,
    PositionCount,
    Probability,
    TokenId,
    VocabSize,
    shown,
)

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """The sizes and constants of a BERT. Names, meanings and defaults are those of transformers.

    Attributes:
        architecture: The transformers class name, which selects the head.
        num_labels, problem_type: Settings of the sequence classification head; `config.json` stores the number of
            labels as the length of `id2label`.
        id2label, label2id: The names of the labels; `LABEL_0`, … by default.
    """

    model_type: ClassVar[str] = "bert"
    architectures: ClassVar[tuple[str, ...]] = (
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForSequenceClassification",
    )

    vocab_size: VocabSize = 30522
    hidden_size: HiddenSize = 768
    num_hidden_layers: LayerCount = 12
    num_attention_heads: HeadCount = 12  # type: ignore[assignment] - a property of the base
    intermediate_size: InnerSize = 3072
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    max_position_embeddings: PositionCount = 512
    type_vocab_size: ClassCount = 2
    initializer_range: InitializerScale = 0.02
    layer_norm_eps: NormEpsilon = 1e-12
    pad_token_id: TokenId | None = 0
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    classifier_dropout: Probability | None = None
    is_decoder: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    position_embedding_type: str = "absolute"
    architecture: str = "BertForMaskedLM"  # type: ignore[misc] - a class variable of the families with one head
    num_labels: ClassCount = 2
    problem_type: ProblemType | None = None
    id2label: dict[str, str] | dict[int, str] | None = None
    label2id: dict[str, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads(self.hidden_size, self.num_attention_heads)
        if self.architecture not in self.architectures:
            raise ValueError(
                f"architecture {shown(self.architecture)} is not supported; use one of {', '.join(self.architectures)}"
            )
        if self.is_decoder or self.add_cross_attention:
            raise ValueError(
                f"{self.model_type} is supported only as an encoder: is_decoder and add_cross_attention must be false"
            )
        if not self.tie_word_embeddings:
            raise ValueError(f"{self.model_type}'s output head is the word embedding: tie_word_embeddings must be true")
        if self.position_embedding_type != "absolute":
            raise ValueError(
                f"position_embedding_type {self.position_embedding_type!r} is not supported; use 'absolute'"
            )
        if self.problem_type == "single_label_classification" and self.num_labels == 1:
            raise ValueError("problem_type='single_label_classification' needs num_labels of at least 2, not 1")
        if self.id2label is not None and len(self.id2label) != self.num_labels:
            raise ValueError(
                f"id2label names {len(self.id2label)} labels, but num_labels is {self.num_labels}; "
                "change both, or set id2label and label2id to None"
            )
        if self.id2label is not None and set(map(str, self.id2label)) != set(map(str, range(self.num_labels))):
            raise ValueError(
                f"id2label must name the labels 0 to {self.num_labels - 1}, not {shown(list(self.id2label))}"
            )

    @property
    def max_sequence_length(self) -> int:
        return self.max_position_embeddings

    @property
    def head_act(self) -> str:
        """The activation inside the masked-language-model head."""
        return self.hidden_act

    @property
    def classifier_dropout_prob(self) -> float:
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout

    @property
    def position_padding_idx(self) -> int | None:
        """The position of padding, which is not learned; None if padding has the same positions as other tokens."""
        return None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        values = dict(values)
        if architectures := values.get("architectures"):
            if not isinstance(architectures, list):
                raise ValueError(f"architectures must be a list of class names, not {shown(architectures)}")
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
