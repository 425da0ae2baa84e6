"""Defines Phi-3's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..blocks.rotary import RopeParameters
from ..config import (
    HiddenSize,
    InnerSize,
    NormEpsilon,
    PositionCount,
    Probability,
    TokenId,
    VocabSize,
)
from ..llama.config import DecoderConfig


@dataclass
class Phi3Config(DecoderConfig):
    """The sizes and constants of a Phi-3 or a Phi-4.

    Names, meanings and defaults are those of transformers.

    Attributes:
        original_max_position_embeddings: The length up to which `short_factor` of LongRoPE divides
            the frequencies.
        resid_pdrop: The dropout of the outputs of attention and MLP.
    """

    model_type: ClassVar[str] = "phi3"
    rotates_any_part: ClassVar[bool] = True

    vocab_size: VocabSize = 32064
    hidden_size: HiddenSize = 3072
    intermediate_size: InnerSize = 8192
    max_position_embeddings: PositionCount = 4096
    original_max_position_embeddings: PositionCount = 4096
    rms_norm_eps: NormEpsilon = 1e-5
    resid_pdrop: Probability = 0.0
    sliding_window: PositionCount | None = None
    pad_token_id: TokenId | None = 32000
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 32000
    architecture: str = "Phi3ForCausalLM"

    def __post_init__(self) -> None:
        if isinstance(self.rope_parameters, dict):
            rope = dict(self.rope_parameters)
            if rope.get("rope_type", "default") != "default":
                rope["original_max_position_embeddings"] = self.original_max_position_embeddings
            object.__setattr__(self, "rope_parameters", rope)
        super().__post_init__()

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers

    @classmethod
    def read_rope(cls, values: dict[str, Any], positions: int) -> RopeParameters:
        """Returns the rotary parameters. Older files call LongRoPE "su" or "yarn"."""
        parameters = super().read_rope(values, positions)
        if parameters["rope_type"] in ("su", "yarn"):
            parameters["rope_type"] = "longrope"
        if parameters["rope_type"] not in ("default", "longrope"):
            raise ValueError(
                f"phi3 has no rope_type {parameters['rope_type']!r}; use default or longrope"
            )
        return parameters
