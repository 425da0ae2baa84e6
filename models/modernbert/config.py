"""Defines ModernBERT's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from typing_extensions import Self

from ..blocks.rotary import (
    RopeParameters,
    check_rope_parameters,
    check_whole_rotation,
    ignore_partial_rotation,
    read_rope_parameters,
)
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
    Range,
    TokenId,
    VocabSize,
    shown,
)

AttentionType = Literal["full_attention", "sliding_attention"]
THETAS: dict[AttentionType, float] = {"full_attention": 160000.0, "sliding_attention": 10000.0}
OLD_THETAS: dict[AttentionType, str] = {
    "full_attention": "global_rope_theta",
    "sliding_attention": "local_rope_theta",
}


@dataclass
class ModernBertConfig(HeadsConfig):
    """The sizes and constants of a ModernBERT. Names, meanings and defaults are those of
    transformers.

    Attributes:
        global_attn_every_n_layers: The layers that attend to the whole sequence, unless
            `layer_types` lists them.
        local_attention: The positions that the other layers attend to, half of them on either side.
    """

    model_type: ClassVar[str] = "modernbert"

    vocab_size: VocabSize = 50368
    hidden_size: HiddenSize = 768
    intermediate_size: InnerSize = 1152
    num_hidden_layers: LayerCount = 22
    num_attention_heads: HeadCount = 12
    hidden_activation: Activation = "gelu"
    max_position_embeddings: PositionCount = 8192
    initializer_range: InitializerScale = 0.02
    initializer_cutoff_factor: Annotated[float, Range(0, 1000, above=True)] = 2.0
    norm_eps: NormEpsilon = 1e-5
    norm_bias: bool = False
    pad_token_id: TokenId | None = 50283
    bos_token_id: TokenId | None = 50281
    eos_token_id: TokenId | list[TokenId] | None = 50282
    cls_token_id: TokenId | None = 50281
    sep_token_id: TokenId | None = 50282
    attention_bias: bool = False
    attention_dropout: Probability = 0.0
    global_attn_every_n_layers: LayerCount = 3
    layer_types: list[AttentionType] | None = None
    rope_parameters: dict[str, RopeParameters] | None = None
    local_attention: Annotated[int, Range(2, 2**31 - 1)] = 128
    embedding_dropout: Probability = 0.0
    mlp_bias: bool = False
    mlp_dropout: Probability = 0.0
    decoder_bias: bool = True
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_dropout: Probability = 0.0
    classifier_bias: bool = False
    classifier_activation: Activation = "gelu"
    tie_word_embeddings: bool = True
    architecture: str = "ModernBertForMaskedLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads(self.hidden_size, self.num_attention_heads)
        if len(self.attention_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types lists {len(self.attention_types)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}; change both, or set layer_types to null"
            )
        values = {"rope_parameters": self.rope_parameters}
        read = self.read_rope
        object.__setattr__(self, "rope_parameters", read(values, self.max_position_embeddings))
        for parameters in self.rope.values():
            check_rope_parameters(parameters, self.head_size)
            check_whole_rotation(parameters, self.model_type)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def max_sequence_length(self) -> int:
        return self.max_position_embeddings

    @property
    def attention_types(self) -> list[AttentionType]:
        """Whether each layer attends to the whole sequence."""
        if self.layer_types is not None:
            return self.layer_types
        every = self.global_attn_every_n_layers
        return [
            "sliding_attention" if i % every else "full_attention"
            for i in range(self.num_hidden_layers)
        ]

    @property
    def rope(self) -> dict[str, dict[str, Any]]:
        """The parameters of the rotary positions of each type of layer."""
        return {kind: dict(parameters) for kind, parameters in (self.rope_parameters or {}).items()}

    @staticmethod
    def read_rope(values: dict[str, Any], positions: int) -> dict[AttentionType, RopeParameters]:
        """Returns the rotary parameters of each type of layer, from the keys of transformers 4 or
        5.
        """
        stored = _rope_object(values.get("rope_parameters"))
        scaling = _rope_object(values.get("rope_scaling"))
        if unknown := stored.keys() - THETAS.keys():
            raise ValueError(
                f"rope_parameters have an object for each of {', '.join(THETAS)}, not for "
                f"{min(unknown)!r}"
            )
        parameters: dict[AttentionType, RopeParameters] = {}
        for kind, theta in THETAS.items():
            given = {**_rope_object(stored.get(kind)), **scaling}
            theta = values.get(OLD_THETAS[kind]) or theta
            read = read_rope_parameters({"rope_parameters": given}, positions, theta=theta)
            parameters[kind] = ignore_partial_rotation(read)
        return parameters

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns a configuration from a `config.json` of transformers 4 or 5, whose rotary keys
        differ.
        """
        values = dict(values)
        if "sliding_window" in values:
            # In transformers, the positions on either side of the middle one; it is read last.
            values["local_attention"] = 2 * values.pop("sliding_window")
        positions = values.get("max_position_embeddings", cls.max_position_embeddings)
        config = super().from_dict({**values, "rope_parameters": cls.read_rope(values, positions)})
        pattern = config.with_changes(layer_types=None)
        return pattern if pattern.attention_types == config.attention_types else config

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of a `config.json` that both transformers 4 and 5 read."""
        values = super().to_dict()
        for kind, old in OLD_THETAS.items():
            values[old] = self.rope[kind]["rope_theta"]
        values["layer_types"] = self.attention_types
        return values


def _rope_object(value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"rope_parameters must be objects, not {shown(value)}")
    return cast(Mapping[str, Any], value or {})
