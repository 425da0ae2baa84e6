"""Maps each native parameter of the original GLM to its tensor in checkpoints.

The authors' checkpoints and those on the hub use the same names. The authors' checkpoints are
`mp_rank_XX_model_states.pt` files of tensor-parallel ranks, without a `config.json`. FlagAI's
checkpoints have a `config.json` without a `model_type`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...checkpoint.stored_tensor import StoredTensor
from ..name_map import NameEntry, NameMap
from .config import GLMConfig

_HEAD_SIZE = 64  # the same in every release; checkpoints do not store it

NAME_MAP = NameMap(
    entries=(
        NameEntry("word_embeddings.weight", "word_embeddings.weight"),
        NameEntry("position_embeddings.weight", "transformer.position_embeddings.weight"),
        NameEntry(
            "block_position_embeddings.weight", "transformer.block_position_embeddings.weight"
        ),
        NameEntry("blocks.{i}.ln_1.weight", "transformer.layers.{i}.input_layernorm.weight"),
        NameEntry("blocks.{i}.ln_1.bias", "transformer.layers.{i}.input_layernorm.bias"),
        NameEntry(
            "blocks.{i}.attention.qkv.weight",
            "transformer.layers.{i}.attention.query_key_value.weight",
        ),
        NameEntry(
            "blocks.{i}.attention.qkv.bias", "transformer.layers.{i}.attention.query_key_value.bias"
        ),
        NameEntry(
            "blocks.{i}.attention.output.weight", "transformer.layers.{i}.attention.dense.weight"
        ),
        NameEntry(
            "blocks.{i}.attention.output.bias", "transformer.layers.{i}.attention.dense.bias"
        ),
        NameEntry(
            "blocks.{i}.ln_2.weight", "transformer.layers.{i}.post_attention_layernorm.weight"
        ),
        NameEntry("blocks.{i}.ln_2.bias", "transformer.layers.{i}.post_attention_layernorm.bias"),
        NameEntry("blocks.{i}.mlp.up.weight", "transformer.layers.{i}.mlp.dense_h_to_4h.weight"),
        NameEntry("blocks.{i}.mlp.up.bias", "transformer.layers.{i}.mlp.dense_h_to_4h.bias"),
        NameEntry("blocks.{i}.mlp.down.weight", "transformer.layers.{i}.mlp.dense_4h_to_h.weight"),
        NameEntry("blocks.{i}.mlp.down.bias", "transformer.layers.{i}.mlp.dense_4h_to_h.bias"),
        NameEntry("final_norm.weight", "transformer.final_layernorm.weight"),
        NameEntry("final_norm.bias", "transformer.final_layernorm.bias"),
    ),
    # Prefixes of wrappers: the hub's GLMForConditionalGeneration, FlagAI, distributed data
    # parallel.
    renamed=((r"(?:glm|model|module)\.((?:word_embeddings|transformer)\..*)", r"\1"),),
)


def has_config(values: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` without a `model_type` is FlagAI's of the original GLM."""
    return "block_position_encoding" in values


def infer_config(ranks: Sequence[Mapping[str, StoredTensor]]) -> GLMConfig:
    """Infers the configuration from the shapes of the tensors.

    As in every release, each head has 64 hidden units.
    """
    ranks = [
        {NAME_MAP.to_current_name(name, ()): tensor for name, tensor in tensors.items()}
        for tensors in ranks
    ]
    try:
        embeddings = [tensors["word_embeddings.weight"] for tensors in ranks]
        positions = ranks[0]["transformer.position_embeddings.weight"]
    except KeyError as error:
        raise ValueError(
            f"the checkpoint lacks {error.args[0]}, so it is not of the original GLM"
        ) from None
    for tensor in (*embeddings, positions):
        if len(tensor.shape) != 2:
            raise ValueError(
                f"{tensor} has shape {list(tensor.shape)}, but an embedding must have two "
                "dimensions"
            )
    hidden_size = embeddings[0].shape[1]
    last = -1
    for name in ranks[0]:
        match = re.match(r"transformer\.layers\.(\d+)\.", name)
        if match:
            last = max(last, int(match[1]))
    if hidden_size % _HEAD_SIZE:
        raise ValueError(
            f"the hidden size {hidden_size} must be a multiple of {_HEAD_SIZE}, the head size of "
            "GLM"
        )
    return GLMConfig(
        vocab_size=sum(tensor.shape[0] for tensor in embeddings),
        num_layers=last + 1,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // _HEAD_SIZE,
        max_sequence_length=positions.shape[0] - 1,
    )
