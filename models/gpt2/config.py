"""GPT-2's configuration: the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..common.config import ModelConfig


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """Sizes and constants of a GPT-2; names, meanings and defaults are transformers'."""

    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256

    def __post_init__(self) -> None:
        if self.add_cross_attention:
            raise ValueError("GPT-2 is a decoder alone here: add_cross_attention must be false")
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_embd % self.n_head:
            fitting = [n for n in range(1, self.n_embd + 1) if self.n_embd % n == 0 and n <= 4 * self.n_head]
            raise ValueError(
                f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}; use n_head from {fitting}"
            )

    @property
    def inner_size(self) -> int:
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    @property
    def num_attention_heads(self) -> int:
        return self.n_head

    @property
    def max_sequence_length(self) -> int:
        return self.n_positions
