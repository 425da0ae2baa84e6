"""Defines ELECTRA's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..bert.config import BertConfig
from ..config import HeadCount, HiddenSize, InnerSize, Probability


@dataclass
class ElectraConfig(BertConfig):
    """The sizes and constants of an ELECTRA. Names, meanings and defaults are those of
    transformers.

    Attributes:
        summary_last_dropout: The dropout of the head for multiple choice.
    """

    model_type: ClassVar[str] = "electra"

    embedding_size: HiddenSize = 128
    hidden_size: HiddenSize = 256
    num_attention_heads: HeadCount = 4
    intermediate_size: InnerSize = 1024
    summary_type: str = "first"
    summary_use_proj: bool = True
    summary_activation: str = "gelu"
    summary_last_dropout: Probability = 0.1
    architecture: str = "ElectraForMaskedLM"

    def __post_init__(self) -> None:
        super().__post_init__()
        summary = (self.summary_type, self.summary_use_proj, self.summary_activation)
        if self.architecture == "ElectraForMultipleChoice" and summary != ("first", True, "gelu"):
            raise ValueError(
                "multiple choice summarizes a sequence by its first token, a projection and "
                "GELU: summary_type, "
                "summary_use_proj and summary_activation must be 'first', true and 'gelu', not "
                f"{summary}"
            )

    @property
    def embedding_width(self) -> int:
        return self.embedding_size

    @property
    def head_act(self) -> str:
        return "gelu"

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values.pop("add_pooling_layer", None)
        return values
