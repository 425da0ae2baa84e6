"""Defines the configuration of Gemma 3's language model, with the keys of Hugging Face's
`config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import Self

from ..blocks.rotary import (
    check_rope_parameters,
    ignore_partial_rotation,
    read_rope_parameters,
    read_ropes_by_layer_type,
)
from ..config import PositionCount, Range, VocabSize
from ..gemma2.config import Cap, Gemma2Config, LayerType

LOCAL_THETA = 10000.0


@dataclass
class Gemma3TextConfig(Gemma2Config):
    """The sizes and constants of the language model of a Gemma 3.

    Names, meanings and defaults are those of transformers.

    Attributes:
        rope_parameters: The rotation of the layers that attend to the whole sequence. A
            `config.json` of transformers 5 has an object for each type of layer there.
        rope_local_base_freq: The `rope_theta` of the layers with a window.
        sliding_window_pattern: Each so many-th layer attends to the whole sequence, unless
            `layer_types` lists them.
    """

    model_type: ClassVar[str] = "gemma3_text"
    default_theta: ClassVar[float] = 1000000.0
    qk_norm: ClassVar[bool] = True

    vocab_size: VocabSize = 262208
    max_position_embeddings: PositionCount = 131072
    rope_local_base_freq: Annotated[float, Range(0, 1e12, above=True)] = LOCAL_THETA
    sliding_window_pattern: Annotated[int, Range(1, 4096)] = 6
    final_logit_softcapping: Cap | None = None
    attn_logit_softcapping: Cap | None = None
    architecture: str = "Gemma3ForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rope_parameters(self.local_rope, self.head_size)
        if self.attn_logit_softcapping is not None:
            raise ValueError(
                f"a Gemma 3 does not cap scores: attn_logit_softcapping="
                f"{self.attn_logit_softcapping} must be null"
            )

    @property
    def attention_types(self) -> list[LayerType]:
        if self.layer_types is not None:
            return self.layer_types
        every = self.sliding_window_pattern
        layers = range(1, self.num_hidden_layers + 1)
        return ["sliding_attention" if i % every else "full_attention" for i in layers]

    @property
    def local_rope(self) -> dict[str, Any]:
        """The rotary parameters of the layers with a window."""
        return {"rope_type": "default", "rope_theta": self.rope_local_base_freq}

    @property
    def ropes(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            self.local_rope if kind == "sliding_attention" else self.rope
            for kind in self.attention_types
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns a configuration from a `config.json` of transformers 4 or 5, whose rotary keys
        differ.
        """
        values = dict(values)
        by_type = read_ropes_by_layer_type(values)
        if by_type is not None:
            whole, local = by_type
            positions = values.get("max_position_embeddings", cls.max_position_embeddings)
            theta = values.get("rope_local_base_freq") or LOCAL_THETA
            read = read_rope_parameters({"rope_parameters": local}, positions, theta=theta)
            read = ignore_partial_rotation(read)
            if read["rope_type"] != "default":
                raise ValueError(
                    "the layers of a Gemma 3 with a window rotate without a scaling: their "
                    f"rope_type={read['rope_type']!r} must be 'default'"
                )
            values["rope_local_base_freq"] = read["rope_theta"]
            values["rope_parameters"] = dict(whole)
        config = super().from_dict(values)
        pattern = config.with_changes(layer_types=None)
        return pattern if pattern.attention_types == config.attention_types else config

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values["layer_types"] = self.attention_types
        values["rope_parameters"] = {
            "full_attention": self.rope,
            "sliding_attention": self.local_rope,
        }
        return values
