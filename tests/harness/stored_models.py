"""Small checkpoints whose headers transformers wrote and whose bytes are random, NaNs and infinities included."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import ClassVar

from tiny_models import hf_model

DTYPES = ("float32", "float16", "bfloat16")


class Zoo:
    """Makes Hugging Face folders of every family and variant.

    Each variant's sizes: heads H, head size D, hidden size H * D, feed-forward F, layers, vocabulary.
    """

    variants: ClassVar[dict[str, tuple[str, dict]]] = {
        "gpt2": ("GPT2LMHeadModel", {}),
        "gpt2-untied": ("GPT2LMHeadModel", {"tie_word_embeddings": False}),
        "bert": ("BertForMaskedLM", {}),
        "bert-pretraining": ("BertForPreTraining", {}),
        "megatron-bert": ("MegatronBertForPreTraining", {}),
        "bert-classification": ("BertForSequenceClassification", {"num_labels": 3}),
        "bert-choices": ("BertForMultipleChoice", {}),
        "bert-body": ("BertModel", {}),
        "gpt2-classification": ("GPT2ForSequenceClassification", {"num_labels": 3}),
        "roberta-answers": ("RobertaForQuestionAnswering", {}),
        "roberta": ("RobertaForMaskedLM", {"type_vocab_size": 1}),
        "t5": ("T5ForConditionalGeneration", {}),
        "t5-v1.1": (
            "T5ForConditionalGeneration",
            {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ),
        "mt5": ("MT5ForConditionalGeneration", {}),
        "mt5-tied": ("MT5ForConditionalGeneration", {}),
        "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        "glm": ("", {}),
    }

    def make(
        self,
        folder: Path,
        variant: str,
        *,
        heads: int = 4,
        head_size: int = 4,
        feed_forward: int = 24,
        layers: int = 2,
        vocabulary: int = 101,
        dtype: str = "float32",
        seed: int = 0,
        sharded: bool = False,
    ) -> Path:
        sizes = {
            "heads": heads,
            "head_size": head_size,
            "feed_forward": feed_forward,
            "layers": layers,
        }
        if variant == "glm":
            self._write_glm(folder, **sizes, vocabulary=vocabulary, dtype=dtype)
        else:
            model = self._transformers_model(variant, **sizes, vocabulary=vocabulary, dtype=dtype)
            model.save_pretrained(folder, max_shard_size="20KB" if sharded else "5GB")
            if variant in ("t5-v1.1", "mt5"):
                self._add_head(folder, "shared.weight", "lm_head.weight")
        (folder / "tokenizer.json").write_text('{"made": "up"}')
        for path in folder.glob("*.safetensors"):
            randomize(path, seed)
        return folder

    def _transformers_model(
        self, variant, *, heads, head_size, feed_forward, layers, vocabulary, dtype
    ):
        import torch

        architecture, changes = self.variants[variant]
        tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
        hidden = heads * head_size
        if "5" in architecture:  # d_model is not heads * d_kv, as in the small mT5
            sizes = {"d_model": 20, "d_kv": head_size, "d_ff": feed_forward, "num_heads": heads}
            sizes |= {"num_layers": layers, "num_decoder_layers": layers + 1}
        elif architecture.startswith("GPT2"):
            sizes = {
                **tokens,
                "n_embd": hidden,
                "n_head": heads,
                "n_inner": feed_forward,
                "n_positions": 40,
            }
            sizes["n_layer"] = layers
        else:
            sizes = {
                **tokens,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "intermediate_size": feed_forward,
            }
            sizes |= {"max_position_embeddings": 40, "num_hidden_layers": layers}
        return hf_model(architecture, vocab_size=vocabulary, **sizes, **changes).to(
            getattr(torch, dtype)
        )

    def _add_head(self, folder: Path, like: str, name: str) -> None:
        """Version 1.1's head, which transformers 5 ties when it makes a model."""
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors[name] = tensors[like].clone() + 1
        save_file(tensors, path, metadata={"format": "pt"})

    def _write_glm(
        self, folder, *, heads, head_size, feed_forward, layers, vocabulary, dtype
    ) -> None:
        """By the table of the original GLM's tensors; its feed-forward width is always four times the hidden size."""
        import torch
        from safetensors.torch import save_file

        hidden, positions = heads * head_size, 33
        shapes = {"word_embeddings.weight": (vocabulary, hidden)}
        for name in ("position_embeddings", "block_position_embeddings", "final_layernorm"):
            rows = (positions, hidden) if "position" in name else (hidden,)
            shapes[f"transformer.{name}.weight"] = rows
        shapes["transformer.final_layernorm.bias"] = (hidden,)
        for i in range(layers):
            linears = {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "attention.query_key_value": (3 * hidden, hidden),
                "attention.dense": (hidden, hidden),
                "mlp.dense_h_to_4h": (4 * hidden, hidden),
                "mlp.dense_4h_to_h": (hidden, 4 * hidden),
            }
            for name, shape in linears.items():
                shapes |= {
                    f"transformer.layers.{i}.{name}.weight": shape,
                    f"transformer.layers.{i}.{name}.bias": shape[:1],
                }
        folder.mkdir(parents=True)
        tensors = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape in shapes.items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            "model_type": "glm",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "num_layers": layers,
            "num_attention_heads": heads,
            "max_sequence_length": positions - 1,
            "block_position_encoding": True,
        }
        (folder / "config.json").write_text(json.dumps(config))


def header_of(path: Path) -> tuple[int, dict]:
    """Where the data of a safetensors file start, and the parsed header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return 8 + length, json.loads(file.read(length))


def randomize(path: Path, seed: int = 0) -> None:
    """Overwrites all tensors of a safetensors file with random bytes."""
    start, _ = header_of(path)
    size = path.stat().st_size - start
    with path.open("r+b") as file:
        file.seek(start)
        file.write(random.Random(f"{seed}{path.name}").randbytes(size))


def tensor_hashes(folder: Path) -> dict[str, tuple]:
    """(type, shape, sha256) of every tensor of a folder's safetensors files, read here, byte by byte."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        start, header = header_of(path)
        content = path.read_bytes()
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                digest = hashlib.sha256(content[start + first : start + last]).hexdigest()
                found[name] = (entry["dtype"], tuple(entry["shape"]), digest)
    return found


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, and its sha256."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rewrite_header(path: Path, change) -> None:
    """Replaces a safetensors header by what `change(header)` makes of it: an object, bytes; None if it was edited."""
    start, header = header_of(path)
    data = path.read_bytes()[start:]
    changed = change(header)
    text = (
        changed
        if isinstance(changed, bytes)
        else json.dumps(header if changed is None else changed).encode()
    )
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
