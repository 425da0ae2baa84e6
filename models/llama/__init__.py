"""Llama (Touvron et al., 2023), and what declares a family of decoders like it."""

from collections.abc import Mapping
from typing import Any

from ..heads import with_heads
from ..language_model import Body
from ..megatron import MegatronMap
from ..name_map import NameMap
from ..registry import Family
from .config import DecoderConfig, LlamaConfig
from .hf import NAME_MAP
from .megatron import megatron
from .memory import activations
from .model import HEADS, HEADS_WITH_ANSWERS, DecoderBody
from .presets import PRESETS


def decoder_family(
    config: type[DecoderConfig],
    stem: str,
    name_map: NameMap,
    presets: dict[str, Any],
    heads: Mapping[str, type[Body]] = HEADS_WITH_ANSWERS,
    megatron: MegatronMap | None = None,
) -> Family:
    """Returns the facts about a family of decoders; the names of its architectures begin with `stem`."""
    return Family(
        config=config,
        architectures=with_heads(DecoderBody, stem, heads),
        name_map=name_map,
        presets=presets,
        kind="decoder",
        objective="gpt",
        pretrains={"causal": f"{stem}ForCausalLM"},
        tokenizer="bpe",
        activations=activations,
        megatron=megatron,
        tasks={
            "text-generation": f"{stem}ForCausalLM",
            "text2text-generation": f"{stem}ForCausalLM",
        },
    )


FAMILY = decoder_family(LlamaConfig, "Llama", NAME_MAP, PRESETS, megatron=megatron(LlamaConfig))

__all__ = ["FAMILY", "HEADS", "DecoderConfig", "LlamaConfig", "decoder_family"]
