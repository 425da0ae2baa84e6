"""Maps each native parameter of GPT-2 to its tensor in Hugging Face's checkpoints."""

from __future__ import annotations

from ..name_map import NameEntry, NameMap

NAME_MAP = NameMap(
    prefix="transformer.",
    entries=(
        NameEntry("word_embeddings.weight", "transformer.wte.weight"),
        NameEntry("position_embeddings.weight", "transformer.wpe.weight"),
        NameEntry("blocks.{i}.ln_1.weight", "transformer.h.{i}.ln_1.weight"),
        NameEntry("blocks.{i}.ln_1.bias", "transformer.h.{i}.ln_1.bias"),
        NameEntry(
            "blocks.{i}.attention.qkv.weight",
            "transformer.h.{i}.attn.c_attn.weight",
            transpose=True,
        ),
        NameEntry("blocks.{i}.attention.qkv.bias", "transformer.h.{i}.attn.c_attn.bias"),
        NameEntry(
            "blocks.{i}.attention.output.weight",
            "transformer.h.{i}.attn.c_proj.weight",
            transpose=True,
        ),
        NameEntry("blocks.{i}.attention.output.bias", "transformer.h.{i}.attn.c_proj.bias"),
        NameEntry("blocks.{i}.ln_cross.weight", "transformer.h.{i}.ln_cross_attn.weight"),
        NameEntry("blocks.{i}.ln_cross.bias", "transformer.h.{i}.ln_cross_attn.bias"),
        NameEntry(
            "blocks.{i}.cross_attention.query.weight",
            "transformer.h.{i}.crossattention.q_attn.weight",
            transpose=True,
        ),
        NameEntry(
            "blocks.{i}.cross_attention.query.bias", "transformer.h.{i}.crossattention.q_attn.bias"
        ),
        NameEntry(
            "blocks.{i}.cross_attention.key_value.weight",
            "transformer.h.{i}.crossattention.c_attn.weight",
            transpose=True,
        ),
        NameEntry(
            "blocks.{i}.cross_attention.key_value.bias",
            "transformer.h.{i}.crossattention.c_attn.bias",
        ),
        NameEntry(
            "blocks.{i}.cross_attention.output.weight",
            "transformer.h.{i}.crossattention.c_proj.weight",
            transpose=True,
        ),
        NameEntry(
            "blocks.{i}.cross_attention.output.bias", "transformer.h.{i}.crossattention.c_proj.bias"
        ),
        NameEntry("blocks.{i}.ln_2.weight", "transformer.h.{i}.ln_2.weight"),
        NameEntry("blocks.{i}.ln_2.bias", "transformer.h.{i}.ln_2.bias"),
        NameEntry("blocks.{i}.mlp.up.weight", "transformer.h.{i}.mlp.c_fc.weight", transpose=True),
        NameEntry("blocks.{i}.mlp.up.bias", "transformer.h.{i}.mlp.c_fc.bias"),
        NameEntry(
            "blocks.{i}.mlp.down.weight", "transformer.h.{i}.mlp.c_proj.weight", transpose=True
        ),
        NameEntry("blocks.{i}.mlp.down.bias", "transformer.h.{i}.mlp.c_proj.bias"),
        NameEntry("final_norm.weight", "transformer.ln_f.weight"),
        NameEntry("final_norm.bias", "transformer.ln_f.bias"),
        NameEntry("head.weight", "lm_head.weight"),
        NameEntry("choice_head.weight", "multiple_choice_head.summary.weight"),
        NameEntry("choice_head.bias", "multiple_choice_head.summary.bias"),
        NameEntry("classifier.weight", "score.weight"),
        NameEntry("token_classifier.weight", "classifier.weight"),
        NameEntry("token_classifier.bias", "classifier.bias"),
        NameEntry("qa_outputs.weight", "qa_outputs.weight"),
        NameEntry("qa_outputs.bias", "qa_outputs.bias"),
    ),
    aliases=(("lm_head.weight", "transformer.wte.weight"),),
    # Causal-mask buffers in files written before transformers 4.27.
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)
