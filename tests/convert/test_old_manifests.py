"""Manifests that were written before `Shard` declared shared key-value heads still load.

`golden/llama_grouped_tp*.manifest.json` were written by `split(folder, target, tp)` of the commit 7dfb116, from the
folder that `write_llama` makes: 8 query heads on 2 key-value heads, which neither 3 nor 4 ranks
divide.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardzoo.convert.operations import Options, merge, split
from shardzoo.convert.verification import verify_equal, verify_folder

GOLDEN = Path(__file__).parent.parent / "golden"
HEADS, KEY_VALUE_HEADS, HEAD_SIZE, INNER, VOCABULARY = 8, 2, 4, 24, 11
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_SIZE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "num_hidden_layers": 1,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_llama(folder: Path) -> Path:
    """A Hugging Face folder whose values count from name to name, so that no generator of numbers matters."""
    hidden = HEADS * HEAD_SIZE
    narrow = KEY_VALUE_HEADS * HEAD_SIZE
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
        f"{layer}.self_attn.q_proj.bias": (hidden,),
        f"{layer}.self_attn.k_proj.weight": (narrow, hidden),
        f"{layer}.self_attn.k_proj.bias": (narrow,),
        f"{layer}.self_attn.v_proj.weight": (narrow, hidden),
        f"{layer}.self_attn.v_proj.bias": (narrow,),
        f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}.self_attn.o_proj.bias": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.mlp.gate_proj.weight": (INNER, hidden),
        f"{layer}.mlp.up_proj.weight": (INNER, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, INNER),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    tensors = {}
    first = 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count, dtype=torch.float32).view(shape)
        first += count
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_split_writes_the_manifest_it_wrote(size, tmp_path):
    split(write_llama(tmp_path / "hf"), tmp_path / "shards", size)
    golden = (GOLDEN / f"llama_grouped_tp{size}.manifest.json").read_bytes()
    assert (tmp_path / "shards" / "manifest.json").read_bytes() == golden


@pytest.mark.parametrize(("size", "other"), [(4, 2), (4, 3), (2, 4), (3, 4)])
def test_an_old_manifest_is_verified_and_resharded(size, other, tmp_path):
    source = write_llama(tmp_path / "hf")
    old = tmp_path / "old"
    split(source, old, size)
    shutil.copy(GOLDEN / f"llama_grouped_tp{size}.manifest.json", old / "manifest.json")
    assert not verify_folder(old, Options()).differences
    split(old, tmp_path / "resharded", other)
    golden = (GOLDEN / f"llama_grouped_tp{other}.manifest.json").read_bytes()
    assert (tmp_path / "resharded" / "manifest.json").read_bytes() == golden  # with every digest
    merge(old, tmp_path / "merged")
    assert not verify_equal(source, tmp_path / "merged", Options(), lambda *_: None).differences
