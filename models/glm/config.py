"""Defines the original GLM's configuration, with the keys of its `config.json` on the Hugging Face
hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import Self

from ..config import (
    Activation,
    HeadCount,
    HiddenSize,
    InitializerScale,
    LayerCount,
    ModelConfig,
    PositionCount,
    Probability,
    Range,
    VocabSize,
)

_ORIGINAL_KEYS = ("num_layers", "block_position_encoding")


@dataclass
class GLMConfig(ModelConfig):
    """The sizes and constants of a GLM. Names, meanings and defaults are those of its authors.

    Attributes:
        vocab_size: The rows of the embedding, including the authors' padding rows, which take part
            in the softmax.
        max_sequence_length: The position tables have one row more.
        hidden_act: "gelu_new", the tanh approximation, with which every release was trained. The
            modeling code on the hub computes the exact function instead; "gelu" reproduces its
            numbers.
        attention_scale: Scales attention scores down before the product and up in the softmax, to
            stay within fp16. The softmax is fp32 here, so the value has no effect.
    """

    model_type: ClassVar[str] = "glm"
    architecture: ClassVar[str] = "GLMModel"
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "max_position_embeddings": "max_sequence_length",
    }
    layer_norm_eps: ClassVar[float] = 1e-5

    vocab_size: VocabSize = 30592
    num_layers: LayerCount = 24
    hidden_size: HiddenSize = 1024
    num_attention_heads: HeadCount = 16
    embedding_dropout_prob: Probability = 0.1
    attention_dropout_prob: Probability = 0.1
    output_dropout_prob: Probability = 0.1
    max_sequence_length: PositionCount = 512  # type: ignore[assignment] - a property of the base
    initializer_range: InitializerScale = 0.02
    attention_scale: Annotated[float, Range(0, 1e6, above=True)] = 1.0
    hidden_act: Activation = "gelu_new"
    relative_encoding: bool = False
    block_position_encoding: bool = True
    spell_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads(self.hidden_size, self.num_attention_heads)
        if self.relative_encoding or not self.block_position_encoding:
            raise ValueError(
                "only GLM's two-dimensional positions are supported: relative_encoding must be "
                "false and "
                "block_position_encoding true, as in every release"
            )
        if self.spell_length is not None:
            raise ValueError(
                f"prompt tuning (spell_length={self.spell_length}) is not supported; use "
                "spell_length=null"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns a configuration from the keys of a `config.json`.

        Raises:
            ValueError: The file is of the GLM-4 line of 2024, whose `model_type` is also "glm".
        """
        if not any(key in values for key in _ORIGINAL_KEYS):
            raise ValueError(
                'this configuration has model_type "glm" but neither of the keys num_layers and '
                "block_position_encoding: it belongs to the GLM-4 line of 2024 "
                "(GlmForCausalLM), another architecture. "
                "Only the original GLM of 2021-22, e.g. glm-10b or glm-large-chinese, and "
                "GLM-4-0414 (model_type "
                '"glm4") are supported'
            )
        # Only the zoo calls the positions so: the authors' classes ignore the common name.
        values = {
            name: value for name, value in values.items() if name != "max_position_embeddings"
        }
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of `config.json`, with the names of the classes on the hub.

        transformers loads those classes only with `trust_remote_code`. Without the names, it would
        load the folder as the other architecture of this `model_type`.
        """
        auto_map = {
            "AutoConfig": "configuration_glm.GLMConfig",
            "AutoModel": "modeling_glm.GLMModel",
            "AutoModelForSeq2SeqLM": "modeling_glm.GLMForConditionalGeneration",
        }
        return {**super().to_dict(), "auto_map": auto_map, "output_predict": True}
