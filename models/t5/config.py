"""Defines T5's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import Self

from ..blocks.activation_functions import ACTIVATIONS
from ..config import (
    Activation,
    HeadCount,
    HeadsConfig,
    HiddenSize,
    InitializerScale,
    InnerSize,
    LayerCount,
    NormEpsilon,
    Probability,
    Range,
    TokenId,
    VocabSize,
    refuse_bidirectional,
    shown,
)

PRETRAINED_LENGTH = 512  # positions are relative, so longer sequences also work


@dataclass
class T5Config(HeadsConfig):
    """The sizes and constants of a T5. Names, meanings and defaults are those of transformers.

    Attributes:
        tie_word_embeddings: Whether the output head is the word embedding (v1.0) or a separate
            matrix (v1.1). When weights are loaded, their files decide; see `from_dict`.
        scale_decoder_outputs: Whether the head's input is multiplied by d_model^-0.5. None means
            the value of tie_word_embeddings.
        dense_act_fn, is_gated_act: The MLP's activation, and whether it has a gate. They override
            `feed_forward_proj`, as in transformers; None means what that says.
        tokenizer_class: The transformers class of the model's tokenizer, which only ByT5's files
            name.
    """

    model_type: ClassVar[str] = "t5"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
    }
    ties_without_head: ClassVar[bool] = True
    shares_relative_bias: ClassVar[bool] = True
    """Whether the layers of a stack share one relative bias."""

    vocab_size: VocabSize = 32128
    d_model: HiddenSize = 512
    d_kv: HiddenSize = 64
    d_ff: InnerSize = 2048
    num_layers: LayerCount = 6
    num_decoder_layers: LayerCount | None = None
    num_heads: HeadCount = 8
    relative_attention_num_buckets: Annotated[int, Range(4, 2**16)] = 32
    relative_attention_max_distance: Annotated[int, Range(3, 2**31 - 1)] = 128
    dropout_rate: Probability = 0.1
    layer_norm_epsilon: NormEpsilon = 1e-6
    classifier_dropout: Probability = 0.0
    initializer_factor: InitializerScale = 1.0
    feed_forward_proj: str = "relu"
    dense_act_fn: Activation | None = None
    is_gated_act: bool | None = None
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None
    is_encoder_decoder: bool = True  # type: ignore[misc] - a constant of most families
    pad_token_id: TokenId = 0
    eos_token_id: TokenId | list[TokenId] | None = 1
    decoder_start_token_id: TokenId = 0
    tokenizer_class: str | None = None
    architecture: str = "T5ForConditionalGeneration"

    def __post_init__(self) -> None:
        super().__post_init__()
        # The encoder uses half of the buckets for each direction.
        exact = self.relative_attention_num_buckets // 4
        if self.relative_attention_max_distance <= 2 * exact:
            raise ValueError(
                f"relative_attention_max_distance={self.relative_attention_max_distance} must be "
                "more than half of "
                f"relative_attention_num_buckets={self.relative_attention_num_buckets}; use at "
                f"least {2 * exact + 1}"
            )
        if self.feed_forward_proj.removeprefix("gated-") not in ACTIVATIONS:
            raise ValueError(
                f"feed_forward_proj={shown(self.feed_forward_proj)} must be ACTIVATION or "
                "gated-ACTIVATION, "
                f"where ACTIVATION is one of {', '.join(ACTIVATIONS)}"
            )
        if self.scale_decoder_outputs is None:
            object.__setattr__(self, "scale_decoder_outputs", self.scales_by_default())

        # Equal models have equal configurations, however their files say it.
        activation, is_gated = self._read_feed_forward_proj()
        if self.dense_act_fn == activation:
            object.__setattr__(self, "dense_act_fn", None)
        if self.is_gated_act == is_gated:
            object.__setattr__(self, "is_gated_act", None)

    def scales_by_default(self) -> bool:
        """Returns whether to scale the decoder's output: version 1.0 ties and scales, version 1.1
        does neither.
        """
        return self.tie_word_embeddings

    def _read_feed_forward_proj(self) -> tuple[str, bool]:
        """Returns the activation, and whether there is a gate, according to `feed_forward_proj`.

        "gated-gelu" means the tanh approximation of GELU, as in transformers.
        """
        activation = self.feed_forward_proj.split("-")[-1]
        if self.feed_forward_proj == "gated-gelu":
            activation = "gelu_new"
        return activation, self.feed_forward_proj.startswith("gated-")

    @property
    def activation(self) -> str:
        """The name of the MLP's activation."""
        if self.dense_act_fn is not None:
            return self.dense_act_fn
        return self._read_feed_forward_proj()[0]

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        if self.is_gated_act is not None:
            return self.is_gated_act
        return self._read_feed_forward_proj()[1]

    @property
    def decoder_layers(self) -> int:
        if self.architecture.endswith(("EncoderModel", "ForTokenClassification")):
            return 0
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    def bucketing(self, is_decoder: bool) -> dict[str, Any]:
        """Returns how a stack's relative biases put distances into buckets."""
        return {
            "buckets": self.relative_attention_num_buckets,
            "max_distance": self.relative_attention_max_distance,
            "bidirectional": not is_decoder,
        }

    @property
    def max_sequence_length(self) -> int:
        return PRETRAINED_LENGTH

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns a configuration from the keys of a `config.json`.

        transformers 5 writes `tie_word_embeddings: true` into the file of every T5
        (huggingface/transformers#48154). For such files the version of the architecture decides
        instead.
        """
        refuse_bidirectional(values)
        values = {name: value for name, value in values.items() if value is not None}
        if "num_hidden_layers" in values:
            # transformers derives the decoder's layers before it reads the common name.
            values.setdefault("num_decoder_layers", values.get("num_layers", cls.num_layers))
        version = str(values.get("transformers_version", "0")).split(".")[0]
        is_version_5 = version.isdigit() and int(version) >= 5
        if is_version_5 and values.get("tie_word_embeddings") is not False:
            values["tie_word_embeddings"] = cls.ties_in_version(values)
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of a `config.json`, which do not repeat `feed_forward_proj`."""
        values = super().to_dict()
        for name in ("dense_act_fn", "is_gated_act"):
            if values[name] is None:
                del values[name]
        return values

    @classmethod
    def ties_in_version(cls, values: dict[str, Any]) -> bool:
        """Returns whether the head is tied in the version of the architecture that a transformers 5
        file describes.
        """
        return bool(values.get("scale_decoder_outputs", True))
