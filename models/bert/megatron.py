"""Maps BERT's parameters to those of Megatron-LM's BERT with the original order of norms and
residuals.

Only Megatron-LM before megatron-core has it, with `--apply-residual-connection-post-layernorm`. All
others are another model, transformers' `megatron-bert`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..megatron import (
    EMBEDDING,
    TIED_HEAD,
    MegatronMap,
    Sizes,
    block_entries,
    has_tanh_gelu,
    rates,
    weight_and_bias,
)
from ..name_map import NameEntry, NameMap
from .config import BertConfig

_TYPES = "embedding.tokentype_embeddings.weight"
_RATES = {
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "init_method_std",
}


def _owns(names: Iterable[str], arguments: Mapping[str, Any]) -> bool:
    found = list(names)
    has_head = any(name.startswith("lm_head.") for name in found)
    has_decoder = any(name.startswith("decoder.") for name in found)
    return has_head and not has_decoder and any(name.startswith("encoder.") for name in found)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if the arguments leave open which model it is, or if it has no twin in
    transformers.
    """
    if "apply_residual_connection_post_layernorm" not in arguments:
        raise ValueError(
            "its arguments lack apply_residual_connection_post_layernorm; if it was set, name a "
            "config.json by --config"
        )
    if has_tanh_gelu(arguments) and not arguments.get("openai_gelu"):
        raise ValueError(
            "its blocks have the tanh approximation of GELU (bias_gelu_fusion) and its head the "
            "exact one, but a BERT "
            "has one activation; name a config.json with the hidden_act of your choice by --config"
        )


def _infer(
    arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layers: int
) -> BertConfig:
    _check_arguments(arguments)
    if _TYPES not in shapes:
        raise ValueError(f"it lacks {_TYPES}, which every BERT of transformers has")
    found = Sizes.find(arguments, shapes, "encoder")
    return BertConfig(
        vocab_size=found.vocabulary,
        hidden_size=found.hidden,
        num_hidden_layers=layers,
        num_attention_heads=found.heads,
        intermediate_size=found.inner,
        hidden_act="gelu_new" if arguments.get("openai_gelu") else "gelu",
        max_position_embeddings=found.positions,
        type_vocab_size=shapes[_TYPES][0],
        layer_norm_eps=found.norm_epsilon,
        architecture="BertForPreTraining" if "binary_head.weight" in shapes else "BertForMaskedLM",
        **rates(arguments, _RATES),
    )


def _arguments(config: BertConfig) -> dict[str, Any]:
    if config.architecture == "BertForSequenceClassification":
        raise ValueError(
            "Megatron-LM's BERT has a language-model head, but this model has a classifier"
        )
    if not config.tie_word_embeddings:
        raise ValueError(
            "the head of Megatron-LM's BERT is the word embedding, but this model's differs from it"
        )
    if config.hidden_act != "gelu":
        raise ValueError(
            "the head of Megatron-LM's BERT has the exact GELU, but hidden_act is "
            f"{config.hidden_act}"
        )
    return {
        "ffn_hidden_size": config.intermediate_size,
        "norm_epsilon": config.layer_norm_eps,
        "layernorm_epsilon": config.layer_norm_eps,
        "hidden_dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "init_method_std": config.initializer_range,
        "bias_gelu_fusion": False,
        "openai_gelu": False,
        "apply_residual_connection_post_layernorm": True,
        "bert_binary_head": config.architecture == "BertForPreTraining",
        "num_tokentypes": config.type_vocab_size,
    }


MEGATRON = MegatronMap(
    name_map=NameMap(
        entries=(
            NameEntry("encoder.word_embeddings.weight", EMBEDDING),
            NameEntry("encoder.position_embeddings.weight", "embedding.position_embeddings.weight"),
            NameEntry("encoder.token_type_embeddings.weight", _TYPES),
            *weight_and_bias("encoder.embedding_norm", "encoder.layers.0.input_layernorm"),
            *block_entries(
                "encoder",
                "encoder.blocks",
                (
                    ("attention_norm", "encoder.layers.{i}.pre_mlp_layernorm"),
                    ("mlp_norm", "encoder.layers.{i+1}.input_layernorm"),
                ),
            ),
            *weight_and_bias("head.dense", "lm_head.dense"),
            *weight_and_bias("head.norm", "lm_head.layer_norm"),
            NameEntry("head.decoder.bias", "output_layer.bias"),
            *weight_and_bias("pooler", "pooler.dense"),
            *weight_and_bias("next_sentence", "binary_head"),
        ),
        aliases=((TIED_HEAD, EMBEDDING),),
    ),
    stacks=("encoder",),
    owns=_owns,
    infer=_infer,
    arguments=_arguments,
    # The layers of megatron-core 0.3 still read the argument; 0.5, and all that write torch_dist,
    # only declare it.
    writable=("legacy",),
    lacking="its layers do not read apply_residual_connection_post_layernorm",
    post_norm=True,
)
