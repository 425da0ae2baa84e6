"""Defines BERT's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from ..config import (
    Activation,
    ClassCount,
    HeadCount,
    HeadsConfig,
    HiddenSize,
    InitializerScale,
    InnerSize,
    LayerCount,
    NormEpsilon,
    PositionCount,
    Probability,
    TokenId,
    VocabSize,
)

# How the names of the architectures end that may be decoders.
DECODERS = ("Model", "ForCausalLM")


@dataclass
class BertConfig(HeadsConfig):
    """The sizes and constants of a BERT. Names, meanings and defaults are those of transformers.

    Attributes:
        add_pooling_layer: Whether the bare model pools the first token's state; the files decide
            when it is loaded.
    """

    model_type: ClassVar[str] = "bert"
    position_types: ClassVar[tuple[str, ...]] = ("absolute",)
    """The kinds of positions that the family has."""

    vocab_size: VocabSize = 30522
    hidden_size: HiddenSize = 768
    num_hidden_layers: LayerCount = 12
    num_attention_heads: HeadCount = 12
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
    architecture: str = "BertForMaskedLM"
    add_pooling_layer: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads(self.hidden_size, self.num_attention_heads)
        if self.add_cross_attention and not self.is_decoder:
            raise ValueError("add_cross_attention needs is_decoder")
        if self.is_decoder and not self.architecture.endswith(DECODERS):
            raise ValueError(
                f"{self.architecture} is supported only as an encoder: is_decoder and "
                "add_cross_attention must be false"
            )
        if self.position_embedding_type not in self.position_types:
            raise ValueError(
                f"position_embedding_type {self.position_embedding_type!r} is not supported; use "
                f"{' or '.join(map(repr, self.position_types))}"
            )

    @property
    def max_sequence_length(self) -> int:
        return self.max_position_embeddings

    @property
    def embedding_width(self) -> int:
        """The width of the embeddings, which are projected to the hidden size if it is another."""
        return self.hidden_size

    @property
    def has_segments(self) -> bool:
        return True

    @property
    def head_act(self) -> str:
        """The activation inside the masked-language-model head."""
        return self.hidden_act

    @property
    def classifier_dropout_prob(self) -> float:
        return (
            self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout
        )

    @property
    def position_padding_idx(self) -> int | None:
        """The position of padding, which is not learned; None if padding has the same positions as
        other tokens.
        """
        return None

    def fitted_to(self, stored_names: Collection[str]) -> Self:
        """Returns the configuration of a bare model with a pooler only if the files have one."""
        if not self.architecture.endswith("Model") or self.architecture.endswith("LMHeadModel"):
            return self
        return self.with_changes(add_pooling_layer=any("pooler." in name for name in stored_names))

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        # With false, transformers would leave the head's bias untied too. It finds out by itself
        # that the files store a head that differs from the word embedding.
        values["tie_word_embeddings"] = True
        if self.add_pooling_layer:  # transformers has no such key
            del values["add_pooling_layer"]
        return values
