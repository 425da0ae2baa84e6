"""Lists the released XLM-RoBERTa-XL sizes under Hugging Face's names."""

from __future__ import annotations

from .config import XLMRobertaXLConfig

PRESETS: dict[str, XLMRobertaXLConfig] = {
    "xlm-roberta-xl": XLMRobertaXLConfig(),
    "xlm-roberta-xxl": XLMRobertaXLConfig(
        hidden_size=4096, num_hidden_layers=48, intermediate_size=16384
    ),
}
