"""Where checkpoints of the original GLM keep each native parameter: the authors' and those on the hub agree."""

from __future__ import annotations

from ..common.name_map import Entry, NameMap

NAME_MAP = NameMap(
    entries=(
        Entry("word_embeddings.weight", "word_embeddings.weight"),
        Entry("position_embeddings.weight", "transformer.position_embeddings.weight"),
        Entry("block_position_embeddings.weight", "transformer.block_position_embeddings.weight"),
        Entry("blocks.{i}.ln_1.weight", "transformer.layers.{i}.input_layernorm.weight"),
        Entry("blocks.{i}.ln_1.bias", "transformer.layers.{i}.input_layernorm.bias"),
        Entry("blocks.{i}.attention.qkv.weight", "transformer.layers.{i}.attention.query_key_value.weight"),
        Entry("blocks.{i}.attention.qkv.bias", "transformer.layers.{i}.attention.query_key_value.bias"),
        Entry("blocks.{i}.attention.output.weight", "transformer.layers.{i}.attention.dense.weight"),
        Entry("blocks.{i}.attention.output.bias", "transformer.layers.{i}.attention.dense.bias"),
        Entry("blocks.{i}.ln_2.weight", "transformer.layers.{i}.post_attention_layernorm.weight"),
        Entry("blocks.{i}.ln_2.bias", "transformer.layers.{i}.post_attention_layernorm.bias"),
        Entry("blocks.{i}.mlp.up.weight", "transformer.layers.{i}.mlp.dense_h_to_4h.weight"),
        Entry("blocks.{i}.mlp.up.bias", "transformer.layers.{i}.mlp.dense_h_to_4h.bias"),
        Entry("blocks.{i}.mlp.down.weight", "transformer.layers.{i}.mlp.dense_4h_to_h.weight"),
        Entry("blocks.{i}.mlp.down.bias", "transformer.layers.{i}.mlp.dense_4h_to_h.bias"),
        Entry("final_norm.weight", "transformer.final_layernorm.weight"),
        Entry("final_norm.bias", "transformer.final_layernorm.bias"),
    ),
    # Prefixes of wrappers: the hub's GLMForConditionalGeneration, FlagAI, distributed data parallel.
    renamed=((r"(?:glm|model|module)\.((?:word_embeddings|transformer)\..*)", r"\1"),),
)
