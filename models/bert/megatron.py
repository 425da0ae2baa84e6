"""Maps BERT's parameters to those of Megatron-LM's BERT with the original order of norms and
residuals.

Only Megatron-LM before megatron-core has it, with `--apply-residual-connection-post-layernorm`. All
others are another model, transformers' `megatron-bert`, whose map shares the parts below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ..megatron import (
    EMBEDDING,
    POST_NORM,
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

TYPES = "embedding.tokentype_embeddings.weight"
_RATES = {
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "init_method_std",
}
_HEADS = ("ForPreTraining", "ForMaskedLM")
_Config = TypeVar("_Config", bound=BertConfig)


def is_bert(names: Iterable[str]) -> bool:
    """Returns whether tensors of these names, as entries spell them, are a BERT's."""
    found = list(names)
    has_head = any(name.startswith("lm_head.") for name in found)
    has_decoder = any(name.startswith("decoder.") for name in found)
    return has_head and not has_decoder and any(name.startswith("encoder.") for name in found)


def infer_bert(
    config_class: type[_Config],
    arguments: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    layers: int,
) -> _Config:
    """Returns the configuration, as `MegatronMap.infer` does.

    Raises ValueError if the arguments leave it open, or if the model has no twin in transformers.
    """
    if has_tanh_gelu(arguments) and not arguments.get("openai_gelu"):
        raise ValueError(
            "its blocks have the tanh approximation of GELU (bias_gelu_fusion) and its head the "
            "exact one, but a BERT "
            "has one activation; name a config.json with the hidden_act of your choice by --config"
        )
    if TYPES not in shapes:
        raise ValueError(
            f"it lacks {TYPES} (bert_binary_head=False makes a model without segments), which every "
            f"{config_class.model_type} of transformers has"
        )
    found = Sizes.find(arguments, shapes, "encoder")
    stem = config_class.architecture.removesuffix("ForMaskedLM")
    return config_class(
        vocab_size=found.vocabulary,
        hidden_size=found.hidden,
        num_hidden_layers=layers,
        num_attention_heads=found.heads,
        intermediate_size=found.inner,
        hidden_act="gelu_new" if arguments.get("openai_gelu") else "gelu",
        max_position_embeddings=found.positions,
        type_vocab_size=shapes[TYPES][0],
        layer_norm_eps=found.norm_epsilon,
        architecture=stem + _HEADS["binary_head.weight" not in shapes],
        **rates(arguments, _RATES),
    )


def check_bert(config: BertConfig, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for a configuration that Megatron-LM's BERT cannot have."""
    reason = ""
    if not config.architecture.endswith(_HEADS):
        reason = f"has a language-model head, not that of {config.architecture}"
    elif config.is_decoder:
        reason = "attends to all tokens, but this model's is_decoder is true"
    if reason:
        raise ValueError(f"Megatron-LM's BERT {reason}")


def list_bert_arguments(config: BertConfig) -> dict[str, Any]:
    """Returns those of Megatron-LM's arguments that only its BERT sets.

    Raises ValueError if it cannot be such a model.
    """
    check_bert(config, {})
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
        "bert_binary_head": config.architecture.endswith("ForPreTraining"),
        "num_tokentypes": config.type_vocab_size,
    }


def bert_entries(norms: tuple[tuple[str, str], ...]) -> tuple[NameEntry, ...]:
    """Returns the entries of all but the norms outside the blocks.

    Args:
        norms: Pairs of a block's norm and its name in Megatron-LM.
    """
    return (
        NameEntry("encoder.word_embeddings.weight", EMBEDDING),
        NameEntry("encoder.position_embeddings.weight", "embedding.position_embeddings.weight"),
        NameEntry("encoder.token_type_embeddings.weight", TYPES),
        *block_entries("encoder", "encoder.blocks", norms),
        *weight_and_bias("head.dense", "lm_head.dense"),
        *weight_and_bias("head.norm", "lm_head.layer_norm"),
        NameEntry("head.decoder.bias", "output_layer.bias"),
        *weight_and_bias("pooler", "pooler.dense"),
        *weight_and_bias("next_sentence", "binary_head"),
    )


def _owns(names: Iterable[str], arguments: Mapping[str, Any]) -> bool:
    return is_bert(names) and bool(arguments.get(POST_NORM, True))


def _infer(
    arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layers: int
) -> BertConfig:
    if POST_NORM not in arguments:
        raise ValueError(
            f"its arguments lack {POST_NORM}; name the config.json of a bert by --config if it was "
            "set, or else that of a megatron-bert"
        )
    return infer_bert(BertConfig, arguments, shapes, layers)


def _arguments(config: BertConfig) -> dict[str, Any]:
    if not config.tie_word_embeddings:
        raise ValueError(
            "the head of Megatron-LM's BERT is the word embedding, but this model's differs from it"
        )
    return list_bert_arguments(config)


MEGATRON = MegatronMap(
    name_map=NameMap(
        entries=(
            *weight_and_bias("encoder.embedding_norm", "encoder.layers.0.input_layernorm"),
            *bert_entries(
                (
                    ("attention_norm", "encoder.layers.{i}.pre_mlp_layernorm"),
                    ("mlp_norm", "encoder.layers.{i+1}.input_layernorm"),
                )
            ),
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
    check_config=check_bert,
)
