"""Defines BART's configuration, with the keys of Hugging Face's `config.json`. mBART and M2M100
have the same keys.
"""

from __future__ import annotations

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
    PositionCount,
    Probability,
    TokenId,
    VocabSize,
    refuse_bidirectional,
)


@dataclass
class BartConfig(HeadsConfig):
    """The sizes and constants of a BART. Names, meanings and defaults are those of transformers.

    The class variables are what distinguishes the families.

    Attributes:
        pre_norm: Whether the norms are before attention and MLP, with one more after the last
            block.
        embedding_norm: Whether the embeddings are normalized.
        learned_positions: Whether the positions are learned; otherwise they are sinusoids.
        positions_count_padding: Whether sinusoids are those of the places in the row, so that
            padding is counted like other tokens.
        has_logits_bias: Whether the language model of the family may add a stored vector to the
            logits.
        encoder_layerdrop, decoder_layerdrop: The share of blocks that a training step leaves out.
            The zoo computes all blocks, so training needs 0.
        tie_word_embeddings: False if the files have an output head that differs from the word
            embedding. `config.json` keeps true, unless `own_embeddings` is set; transformers finds
            out about the head as the zoo does.
        own_embeddings: Whether encoder and decoder have word embeddings of their own, and the head
            is none of them. `config.json` says so by `tie_word_embeddings: false`. As in
            transformers there is a shared embedding too, which is unused then.
        final_logits_bias: Whether the head adds that vector. The files decide: transformers writes
            it into every one of them, nearly always as zeros.
    """

    model_type: ClassVar[str] = "bart"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
    }
    pre_norm: ClassVar[bool] = False
    embedding_norm: ClassVar[bool] = True
    learned_positions: ClassVar[bool] = True
    positions_count_padding: ClassVar[bool] = False
    has_logits_bias: ClassVar[bool] = True

    vocab_size: VocabSize = 50265
    max_position_embeddings: PositionCount = 1024
    encoder_layers: LayerCount = 12
    encoder_ffn_dim: InnerSize = 4096
    encoder_attention_heads: HeadCount = 16
    decoder_layers: LayerCount = 12
    decoder_ffn_dim: InnerSize = 4096
    decoder_attention_heads: HeadCount = 16
    encoder_layerdrop: Probability = 0.0
    decoder_layerdrop: Probability = 0.0
    activation_function: Activation = "gelu"
    d_model: HiddenSize = 1024
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.0
    activation_dropout: Probability = 0.0
    init_std: InitializerScale = 0.02
    classifier_dropout: Probability = 0.0
    scale_embedding: bool = False
    is_encoder_decoder: bool = True  # type: ignore[misc] - a constant of most families
    tie_word_embeddings: bool = True
    own_embeddings: bool = False
    pad_token_id: TokenId | None = 1
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenId | list[TokenId] | None = 2
    decoder_start_token_id: TokenId | None = 2
    forced_bos_token_id: TokenId | None = None
    forced_eos_token_id: TokenId | list[TokenId] | None = 2
    num_labels: ClassCount = 3
    final_logits_bias: bool = False
    architecture: str = "BartForConditionalGeneration"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_own_embeddings and self.tie_word_embeddings:
            raise ValueError(
                "own_embeddings needs tie_word_embeddings=false: the head is none of the embeddings"
            )
        skips_padding = not self.learned_positions and not self.positions_count_padding
        if self.pad_token_id is None and skips_padding:
            raise ValueError(
                f"pad_token_id must be a token of the vocabulary, because {self.model_type} counts "
                "the positions of all other tokens"
            )
        self.check_heads(self.d_model, self.encoder_attention_heads)
        self.check_heads(self.d_model, self.decoder_attention_heads)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        refuse_bidirectional(values)
        if values.get("tie_word_embeddings", True) is False:
            values = {**values, "own_embeddings": True}
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values["tie_word_embeddings"] = self.tie_word_embeddings or not self.own_embeddings
        del values["own_embeddings"]
        del values["final_logits_bias"]
        return values

    @property
    def has_own_embeddings(self) -> bool:
        # One stack alone has one embedding in any case.
        return self.own_embeddings and not self.architecture.endswith(("ForCausalLM", "Encoder"))

    @property
    def may_add_logits_bias(self) -> bool:
        return self.has_logits_bias and self.architecture.endswith(
            ("ForConditionalGeneration", "MTModel")
        )

    @property
    def mlp_dropout(self) -> float:
        """The rate of the dropout behind the feed-forward part."""
        return self.dropout

    @property
    def num_attention_heads(self) -> int:
        return self.encoder_attention_heads

    @property
    def max_sequence_length(self) -> int:
        return self.max_position_embeddings

    @property
    def max_target_length(self) -> int | None:
        has_table = self.learned_positions or self.positions_count_padding
        return self.max_position_embeddings if has_table else None
