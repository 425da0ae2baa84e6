"""Maps each native parameter of GPT-2 to its tensor in Hugging Face's checkpoints."""

from __future__ import annotations

from ..name_map import Entry, NameMap

NAME_MAP = NameMap(
    prefix="transformer.",
    entries=(
        Entry("word_embeddings.weight", "transformer.wte.weight"),
        Entry("position_embeddings.weight", "transformer.wpe.weight"),
        Entry("blocks.{i}.ln_1.weight", "transformer.h.{i}.ln_1.weight"),
        Entry("blocks.{i}.ln_1.bias", "transformer.h.{i}.ln_1.bias"),
        Entry(
            "blocks.{i}.attention.qkv.weight",
            "transformer.h.{i}.attn.c_attn.weight",
            transpose=True,
        ),
        Entry("blocks.{i}.attention.qkv.bias", "transformer.h.{i}.attn.c_attn.bias"),
        Entry(
            "blocks.{i}.attention.output.weight",
            "transformer.h.{i}.attn.c_proj.weight",
            transpose=True,
        ),
        Entry("blocks.{i}.attention.output.bias", "transformer.h.{i}.attn.c_proj.bias"),
        Entry("blocks.{i}.ln_2.weight", "transformer.h.{i}.ln_2.weight"),
        Entry("blocks.{i}.ln_2.bias", "transformer.h.{i}.ln_2.bias"),
        Entry("blocks.{i}.mlp.up.weight", "transformer.h.{i}.mlp.c_fc.weight", transpose=True),
        Entry("blocks.{i}.mlp.up.bias", "transformer.h.{i}.mlp.c_fc.bias"),
        Entry("blocks.{i}.mlp.down.weight", "transformer.h.{i}.mlp.c_proj.weight", transpose=True),
        Entry("blocks.{i}.mlp.down.bias", "transformer.h.{i}.mlp.c_proj.bias"),
        Entry("final_norm.weight", "transformer.ln_f.weight"),
        Entry("final_norm.bias", "transformer.ln_f.bias"),
        Entry("head.weight", "lm_head.weight"),
        Entry("classifier.weight", "score.weight"),
        Entry("token_classifier.weight", "classifier.weight"),
        Entry("token_classifier.bias", "classifier.bias"),
        Entry("qa_outputs.weight", "qa_outputs.weight"),
        Entry("qa_outputs.bias", "qa_outputs.bias"),
    ),
    aliases=(("lm_head.weight", "transformer.wte.weight"),),
    # Causal-mask buffers in files written before transformers 4.27.
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)
