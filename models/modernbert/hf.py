"""Maps each native parameter of ModernBERT to its tensors in Hugging Face's checkpoints, for all
heads.
"""

from __future__ import annotations

from ..bert.hf import both
from ..name_map import NameMap

LAYER = "model.layers.{i}"
CLASSIFIERS = ("classifier", "token_classifier", "choice_classifier", "qa_outputs")

NAME_MAP = NameMap(
    prefix="model.",
    entries=(
        *both("word_embeddings", "model.embeddings.tok_embeddings"),
        *both("embedding_norm", "model.embeddings.norm"),
        *both("blocks.{i}.attention_norm", f"{LAYER}.attn_norm"),
        *both("blocks.{i}.attention.qkv", f"{LAYER}.attn.Wqkv"),
        *both("blocks.{i}.attention.output", f"{LAYER}.attn.Wo"),
        *both("blocks.{i}.mlp_norm", f"{LAYER}.mlp_norm"),
        *both("blocks.{i}.mlp.gate_up", f"{LAYER}.mlp.Wi"),
        *both("blocks.{i}.mlp.down", f"{LAYER}.mlp.Wo"),
        *both("final_norm", "model.final_norm"),
        *both("head.dense", "head.dense"),
        *both("head.norm", "head.norm"),
        *both("head.decoder", "decoder"),
        *(entry for native in CLASSIFIERS for entry in both(native, "classifier")),
    ),
    aliases=(("decoder.weight", "model.embeddings.tok_embeddings.weight"),),
    # A buffer in old files.
    ignored=(r"(model\.)?(layers\.\d+\.attn\.)?rotary_emb\.(\w+_)?inv_freq",),
)
