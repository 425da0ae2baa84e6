"""Defines GPT-2's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from ..config import (
    Activation,
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
    refuse_bidirectional,
)


@dataclass
class GPT2Config(HeadsConfig):
    """The sizes and constants of a GPT-2.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "gpt2"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }

    vocab_size: VocabSize = 50257
    n_positions: PositionCount = 1024
    n_embd: HiddenSize = 768
    n_layer: LayerCount = 12
    n_head: HeadCount = 12
    n_inner: InnerSize | None = None
    activation_function: Activation = "gelu_new"
    resid_pdrop: Probability = 0.1
    embd_pdrop: Probability = 0.1
    attn_pdrop: Probability = 0.1
    layer_norm_epsilon: NormEpsilon = 1e-5
    initializer_range: InitializerScale = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 50256
    eos_token_id: TokenId | list[TokenId] | None = 50256
    pad_token_id: TokenId | None = None
    classifier_dropout: Probability | None = None
    summary_type: str = "cls_index"
    summary_use_proj: bool = True
    summary_activation: str | None = None
    summary_proj_to_labels: bool = True
    summary_first_dropout: Probability = 0.1
    architecture: str = "GPT2LMHeadModel"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads(self.n_embd, self.n_head)
        if self.architecture != "GPT2DoubleHeadsModel":
            return
        kind = (self.summary_type, self.summary_use_proj, self.summary_proj_to_labels)
        if kind != ("cls_index", True, True) or self.summary_activation is not None:
            raise ValueError(
                "GPT2DoubleHeadsModel scores a choice by the state of its classification token and "
                "one projection: summary_type, summary_use_proj, summary_proj_to_labels and "
                "summary_activation must be 'cls_index', true, true and null"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        refuse_bidirectional(values)
        return super().from_dict(values)

    @property
    def inner_size(self) -> int:
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    @property
    def classifier_dropout_prob(self) -> float:
        return 0.1 if self.classifier_dropout is None else self.classifier_dropout

    @property
    def max_sequence_length(self) -> int:
        return self.n_positions
