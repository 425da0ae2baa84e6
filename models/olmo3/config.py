"""Defines OLMo 3's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import Self

from ..blocks.rotary import ignore_partial_rotation, read_rope_parameters, read_ropes_by_layer_type
from ..config import PositionCount, Range
from ..gemma2.config import LayerType
from ..olmo2.config import Olmo2Config


@dataclass
class Olmo3Config(Olmo2Config):
    """The sizes and constants of an OLMo 3.

    Names, meanings and defaults are those of transformers.

    Attributes:
        rope_parameters: The rotation of the layers that attend to the whole sequence. A
            `config.json` of transformers 5 has an object for each type of layer there.
        local_rope_theta: The `rope_theta` of the layers with a window; None for that of the others.
            Files have it in `rope_parameters`.
        layer_types: Of each layer; by default each fourth one attends to the whole sequence.
    """

    model_type: ClassVar[str] = "olmo3"
    default_theta: ClassVar[float] = 500000.0

    sliding_window: PositionCount = 4096
    layer_types: list[LayerType] | None = None
    local_rope_theta: Annotated[float, Range(0, 1e12, above=True)] | None = None
    architecture: str = "Olmo3ForCausalLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.attention_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types lists {len(self.attention_types)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}; change both, or set layer_types to null"
            )
        if self.local_rope_theta == self.rope["rope_theta"]:
            object.__setattr__(self, "local_rope_theta", None)

    @property
    def attention_types(self) -> list[LayerType]:
        """Whether each layer attends to the whole sequence."""
        if self.layer_types is not None:
            return self.layer_types
        layers = range(1, self.num_hidden_layers + 1)
        return ["sliding_attention" if i % 4 else "full_attention" for i in layers]

    @property
    def local_rope(self) -> dict[str, Any]:
        """The rotary parameters of the layers with a window."""
        theta = self.local_rope_theta or self.rope["rope_theta"]
        return {"rope_type": "default", "rope_theta": theta}

    @property
    def ropes(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            self.local_rope if kind == "sliding_attention" else self.rope
            for kind in self.attention_types
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(
            self.sliding_window if kind == "sliding_attention" else None
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
            theta = values.get("rope_theta") or cls.default_theta
            read = read_rope_parameters({"rope_parameters": local}, positions, theta=theta)
            read = ignore_partial_rotation(read)
            if read["rope_type"] != "default":
                raise ValueError(
                    "the layers of an OLMo 3 with a window rotate without a scaling: their "
                    f"rope_type={read['rope_type']!r} must be 'default'"
                )
            values["local_rope_theta"] = read["rope_theta"]
            values["rope_parameters"] = dict(whole)
        config = super().from_dict(values)
        pattern = config.with_changes(layer_types=None)
        return pattern if pattern.attention_types == config.attention_types else config

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        del values["local_rope_theta"]
        values["layer_types"] = self.attention_types
        values["rope_parameters"] = {
            "full_attention": self.rope,
            "sliding_attention": self.local_rope,
        }
        return values
