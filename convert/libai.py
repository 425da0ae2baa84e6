"""Converts LiBai's own checkpoints of mT5, such as `model_final`, to Hugging Face folders.

LiBai stacks the queries, keys and values of each head: [q of head 0, k of head 0, v of head 0, q of
head 1, …]. Its files hold whole tensors, however the model was split in training.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.folder_files import CONFIG
from ..checkpoint.formats.oneflow import is_oneflow, read_oneflow
from ..files.strict_json import read_folder_json, read_json_object
from ..files.working_copies import find_work, pull, push
from ..models import MT5Config, config_from_dict
from ..models.loading import check_pretrained

MODEL = "model"  # the model in a checkpoint of LiBai, beside the optimizer and the schedule
# Of the projects MT5 and T5, whose mT5 is the same.
_PREFIX = re.compile(r"^(mt5|t5)_model\.")
_BLOCK = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)\.weight")
# LiBai's name of a part of a block -> transformers' names of what is stacked in it.
_ATTENTION = {
    "input_layernorm": ("layer.0.layer_norm",),
    "self_attention.query_key_value": tuple(f"layer.0.SelfAttention.{part}" for part in "qkv"),
    "self_attention.dense": ("layer.0.SelfAttention.o",),
    "self_attention.relative_attention_bias": ("layer.0.SelfAttention.relative_attention_bias",),
    "post_attention_layernorm": ("layer.1.layer_norm",),
}
_PARTS = {
    "encoder": {
        **_ATTENTION,
        **{f"mlp.{part}": (f"layer.1.DenseReluDense.{part}",) for part in ("wi_0", "wi_1", "wo")},
    },
    "decoder": {
        **_ATTENTION,
        "cross_attention.query": ("layer.1.EncDecAttention.q",),
        "cross_attention.key_value": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
        "cross_attention.dense": ("layer.1.EncDecAttention.o",),
        "post_cross_attention_layernorm": ("layer.2.layer_norm",),
        **{f"mlp.{part}": (f"layer.2.DenseReluDense.{part}",) for part in ("wi_0", "wi_1", "wo")},
    },
}
_OTHERS = {
    "embedding.word_embeddings.weight": "shared.weight",
    "encoder.final_layernorm.weight": "encoder.final_layer_norm.weight",
    "decoder.final_layernorm.weight": "decoder.final_layer_norm.weight",
    "lm_head.weight": "lm_head.weight",
}


def is_libai(folder: Path) -> bool:
    """Returns whether a folder is a checkpoint that LiBai wrote."""
    return is_oneflow(folder / MODEL)


def convert_libai(source: Path, destination: Path, config_file: Path | None) -> tuple[int, int]:
    """Writes the mT5 of a checkpoint of LiBai as a Hugging Face folder.

    The model is in memory as a whole.

    Args:
        source: LiBai's folder, with the file or folder `model`.
        destination: The new folder.
        config_file: Hugging Face's config.json of the model, or its folder; None for that in
            `source`. LiBai's checkpoints have none.

    Returns:
        The number of tensors and of their bytes.

    Raises:
        ValueError: The file is damaged or of another model, the configuration does not fit, or the
            destination holds files.
    """
    destination = find_work(destination)
    pull(destination)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists already; choose another folder")
    values = _read_config(source, config_file)
    if values is None:
        raise ValueError(
            f"{source} is LiBai's, which has no {CONFIG}: name Hugging Face's for this mT5 by "
            "--config"
        )
    config: Any = config_from_dict(values)
    if config.model_type != MT5Config.model_type or config.tie_word_embeddings:
        raise ValueError(
            f"of LiBai's models those of mT5 with a head of its own are read: {CONFIG} must have "
            "model_type 'mt5' and tie_word_embeddings false"
        )
    found = read_oneflow(source / MODEL)
    try:
        tensors = _rename(found, config.num_heads, config.d_kv)
    except ValueError as error:
        raise ValueError(f"{source / MODEL}: {error}") from None
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        config.save(partial)
        check_pretrained(partial)
        if destination.exists():
            destination.rmdir()
        os.replace(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    push(destination)
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values())


def _read_config(source: Path, config_file: Path | None) -> dict[str, Any] | None:
    if config_file is None:
        return read_folder_json(source, CONFIG)
    return read_json_object(config_file / CONFIG if config_file.is_dir() else config_file)


def _rename(found: Mapping[str, Tensor], heads: int, head_size: int) -> dict[str, Tensor]:
    """Returns LiBai's tensors with transformers' names, and the stacked ones apart.

    Raises ValueError for a tensor that LiBai's mT5 does not have, and for one of another shape.
    """
    tensors: dict[str, Tensor] = {}
    for full_name, tensor in found.items():
        name = _PREFIX.sub("", full_name, count=1)
        if name in _OTHERS:
            tensors[_OTHERS[name]] = tensor
            continue
        block = _BLOCK.fullmatch(name)
        stored = None if block is None else _PARTS[block[1]].get(block[3])
        if block is None or stored is None:
            raise ValueError(f"LiBai's mT5 has no tensor {full_name[:80]!r}")
        parts = [tensor]
        if len(stored) > 1:
            rows = len(stored) * heads * head_size
            if tensor.dim() != 2 or len(tensor) != rows:
                raise ValueError(
                    f"{full_name} has the shape {tuple(tensor.shape)}, but {heads} heads of "
                    f"{head_size} have {rows} rows"
                )
            by_head = tensor.view(heads, len(stored), head_size, -1)
            parts = [part.flatten(0, 1).contiguous() for part in by_head.unbind(1)]
        for part_name, part in zip(stored, parts, strict=True):
            tensors[f"{block[1]}.block.{block[2]}.{part_name}.weight"] = part
    return tensors
