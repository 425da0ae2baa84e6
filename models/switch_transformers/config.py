"""Defines the configuration of Switch Transformers, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from typing_extensions import Self

from ..config import HeadCount, HiddenSize, LayerCount, Range
from ..mixtral.config import ExpertCount, LossWeight
from ..t5.config import T5Config

SparseStep = Annotated[int, Range(0, 2**16)]


@dataclass
class SwitchTransformersConfig(T5Config):
    """The sizes and constants of a Switch Transformer. Names, meanings and defaults are those of
    transformers.

    Attributes:
        expert_capacity: The number of tokens of a row that an expert computes at most.
        num_sparse_encoder_layers, num_sparse_decoder_layers: How many layers of each stack have
            mixtures: they say how far apart these are, unless the next two do.
        encoder_sparse_step, decoder_sparse_step: The distance between layers with mixtures, of
            which layer 1 is the first one, and with a distance of 1 layer 0; 0 for none.
        router_jitter_noise: By how much a router's input is randomly scaled in training. The noise
            would depend on the layout, so training needs 0.
        router_z_loss_coef, router_aux_loss_coef: The factors of the auxiliary losses.
        output_router_logits: Whether a call that does not say so itself adds them to the loss.
    """

    model_type: ClassVar[str] = "switch_transformers"

    d_model: HiddenSize = 768
    num_layers: LayerCount = 12
    num_decoder_layers: LayerCount | None = 12
    num_heads: HeadCount = 12
    num_sparse_encoder_layers: Annotated[int, Range(0, 2**16)] = 3
    num_sparse_decoder_layers: Annotated[int, Range(0, 2**16)] = 3
    encoder_sparse_step: SparseStep | None = None
    decoder_sparse_step: SparseStep | None = None
    num_experts: ExpertCount = 8
    expert_capacity: Annotated[int, Range(1, 2**31 - 1)] = 64
    router_bias: bool = False
    router_jitter_noise: Annotated[float, Range(0, 1)] = 0.01
    router_dtype: Literal["float32"] = "float32"
    router_ignore_padding_tokens: bool = False
    router_z_loss_coef: LossWeight = 0.001
    router_aux_loss_coef: LossWeight = 0.001
    add_router_probs: bool = False
    output_router_logits: bool = False
    architecture: str = "SwitchTransformersForConditionalGeneration"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_gated:
            raise ValueError("experts with a gate are not supported in switch_transformers")
        if not self.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings=false is not supported in switch_transformers: transformers "
                "gives encoder and decoder word embeddings of their own then"
            )
        if self.encoder_sparse_step is None:
            step = _find_step(self.num_layers, self.num_sparse_encoder_layers)
            object.__setattr__(self, "encoder_sparse_step", step)
        if self.decoder_sparse_step is None:
            layers = self.num_layers
            if self.num_decoder_layers is not None:
                layers = self.num_decoder_layers
            step = _find_step(layers, self.num_sparse_decoder_layers)
            object.__setattr__(self, "decoder_sparse_step", step)

    @property
    def expert_count(self) -> int:
        return self.num_experts

    def has_experts(self, layer: int, is_decoder: bool) -> bool:
        """Returns whether a layer of a stack has a mixture instead of a single MLP."""
        step = self.find_sparse_step(is_decoder)
        return step == 1 or (step > 1 and layer % step == 1)

    def find_sparse_step(self, is_decoder: bool) -> int:
        """Returns the distance between a stack's layers with mixtures."""
        step = self.decoder_sparse_step if is_decoder else self.encoder_sparse_step
        assert step is not None  # The configuration has completed it.
        return step

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        values = dict(values)
        # transformers reads the activation from `dense_act_fn` alone.
        values.pop("feed_forward_proj", None)
        # The head's input is scaled exactly if the head is tied.
        values.pop("scale_decoder_outputs", None)
        layers = cls.num_decoder_layers
        if "num_decoder_layers" in values and values["num_decoder_layers"] is None:
            layers = values.get("num_layers", values.get("num_hidden_layers", cls.num_layers))
        if values.get("num_decoder_layers") is None:
            values["num_decoder_layers"] = layers
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values["dense_act_fn"] = self.activation
        for name in ("feed_forward_proj", "is_gated_act", "scale_decoder_outputs"):
            values.pop(name, None)
        return values

    @classmethod
    def ties_in_version(cls, values: dict[str, Any]) -> bool:
        return True


def _find_step(layers: int, sparse_layers: int) -> int:
    """Returns the distance between layers with mixtures, as transformers computes it."""
    if sparse_layers == 0:
        return layers
    return layers // sparse_layers
