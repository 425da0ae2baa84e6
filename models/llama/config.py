"""Defines Llama's configuration, with the keys of Hugging Face's `config.json`, and what its
siblings' share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

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
    TokenId,
    VocabSize,
    refuse_bidirectional,
)


class HeadDim:
    """Makes the field `head_dim`, which programs read as the size of a head.

    If it is not set, it follows `hidden_size` and `num_attention_heads`, and files do not have it.
    """

    def __get__(self, config: Any, owner: type) -> int | None:
        if config is None:
            return None  # the default of the field
        values = cast("dict[str, Any]", vars(config))
        own: int | None = values.get("head_dim")
        if own is None:
            own = int(config.hidden_size) // int(config.num_attention_heads)
        return own

    def __set__(self, config: Any, value: int | None) -> None:
        vars(config)["head_dim"] = value


_HEAD_DIM: Any = HeadDim()


@dataclass
class DecoderConfig(HeadsConfig):
    """The sizes and constants of a decoder like Llama. Names, meanings and defaults are those of
    transformers.

    A family declares how its blocks differ by the class variables and the properties.
    """

    default_theta: ClassVar[float] = 10000.0
    default_rotated: ClassVar[float] = 1.0
    """The part of each head that is rotated, unless `rope_parameters` have a
    `partial_rotary_factor`.
    """
    rotates_any_part: ClassVar[bool] = False
    """Whether a `partial_rotary_factor` other than 1 is allowed."""
    interleaved: ClassVar[bool] = False
    """Whether features 2i and 2i + 1 of a head rotate together, instead of i and i + R/2."""
    qk_norm: ClassVar[bool] = False
    """Whether each head's queries and keys pass through an RMSNorm."""
    norms_all_heads: ClassVar[bool] = False
    """Whether that norm is over all heads together."""
    attention_sinks: ClassVar[bool] = False
    """Whether each attention head has a trained logit that joins the softmax."""
    input_norms: ClassVar[bool] = True
    """Whether the inputs of attention and MLP pass through a norm."""
    sandwich_norms: ClassVar[bool] = False
    """Whether the outputs of attention and MLP pass through a norm before they are added."""
    norm_offset: ClassVar[float | None] = None
    """What the norms add to their weights; see `RMSNorm`."""

    vocab_size: VocabSize = 32000
    hidden_size: HiddenSize = 4096
    intermediate_size: InnerSize = 11008
    num_hidden_layers: LayerCount = 32
    num_attention_heads: HeadCount = 32  # type: ignore[assignment] - a property of the base
    num_key_value_heads: HeadCount | None = None
    head_dim: HiddenSize | None = _HEAD_DIM
    hidden_act: Activation = "silu"
    max_position_embeddings: PositionCount = 2048
    initializer_range: InitializerScale = 0.02
    rms_norm_eps: NormEpsilon = 1e-6
    rope_parameters: RopeParameters | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: Probability = 0.0
    tie_word_embeddings: bool = False
    classifier_dropout: Probability | None = None
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own_head_dim is None:
            self.check_heads(self.hidden_size, self.num_attention_heads)
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        values = {"rope_parameters": self.rope_parameters}
        object.__setattr__(
            self, "rope_parameters", self.read_rope(values, self.max_position_embeddings)
        )
        check_rope_parameters(self.rope, self.head_size)
        if not self.rotates_any_part:
            check_whole_rotation(self.rope, self.model_type)

    @property
    def rope(self) -> dict[str, Any]:
        return dict(self.rope_parameters or {})

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def own_head_dim(self) -> int | None:
        """`head_dim` if it is set, or else None: then it follows other sizes."""
        return vars(self)["head_dim"]

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def output_bias(self) -> bool:
        return self.attention_bias

    @property
    def clip(self) -> float | None:
        """The largest absolute value of queries, keys and values; None for any."""
        return None

    @property
    def attention_scale(self) -> float:
        """What the scores are multiplied by."""
        return self.head_size**-0.5

    @property
    def score_cap(self) -> float | None:
        """The largest absolute value of the scaled scores, which a tanh approaches; None for any."""
        return None

    @property
    def ropes(self) -> tuple[dict[str, Any], ...]:
        """The rotary parameters of each layer."""
        return (self.rope,) * self.num_hidden_layers

    @property
    def rotates(self) -> tuple[bool, ...]:
        """Whether each layer rotates queries and keys."""
        return (True,) * self.num_hidden_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None for attention to all earlier positions."""
        return (None,) * self.num_hidden_layers

    @property
    def classifier_dropout_prob(self) -> float:
        return 0.1 if self.classifier_dropout is None else self.classifier_dropout

    @property
    def max_sequence_length(self) -> int:
        """`max_position_embeddings`, or more if the frequencies are scaled for longer sequences
        than that.
        """
        original = self.rope.get("original_max_position_embeddings", self.max_position_embeddings)
        return max(self.max_position_embeddings, int(original * self.rope.get("factor", 1)))

    @classmethod
    def read_rope(cls, values: dict[str, Any], positions: int) -> RopeParameters:
        """Returns the rotary parameters of the contents of a `config.json`."""
        parameters = read_rope_parameters(
            values, positions, theta=cls.default_theta, partial=cls.default_rotated
        )
        return parameters if cls.rotates_any_part else ignore_partial_rotation(parameters)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns a configuration from a `config.json` of transformers 4 or 5, with either spelling
        of the rotation.
        """
        refuse_bidirectional(values)
        positions = values.get("max_position_embeddings", cls.max_position_embeddings)
        return super().from_dict({**values, "rope_parameters": cls.read_rope(values, positions)})

    def with_changes(self, **changes: Any) -> Self:
        """Returns a copy with other values; a `head_dim` that is not set stays so."""
        return super().with_changes(**{"head_dim": self.own_head_dim, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of a `config.json` that both transformers 4 and 5 read."""
        values = super().to_dict()
        rope = self.rope
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                values[name] = rope.pop(name)
        values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        values["head_dim"] = self.head_size
        if self.own_head_dim is None and type(self).head_dim is None:
            del values["head_dim"]  # some versions of transformers do not expect a null
        return values


@dataclass
class LlamaConfig(DecoderConfig):
    """A configuration of Llama."""

    model_type: ClassVar[str] = "llama"

    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    architecture: str = "LlamaForCausalLM"
