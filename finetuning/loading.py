"""Finds a model's folder and kind, and loads the zoo's or transformers' model with the head that
the task needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.folder_files import CONFIG, refuse_run_folder
from ..checkpoint.hub import find_folder
from ..checkpoint.manifest import MANIFEST
from ..files.strict_json import read_folder_json
from ..files.working_copies import fetch_whole
from ..models import FAMILIES, ParallelConfig, config_from_dict, family, from_pretrained
from ..models.auto import build_on_meta
from ..models.config import ModelConfig
from ..models.loading import missing_modules
from ..mpu import ParallelMesh
from ..trainer.engines.precision import DTYPES
from ..trainer.environments import ENVIRONMENTS
from ..trainer.estimate import Job, choose_blocks
from ..trainer.launch.ranks import on_first_rank
from .arguments import FinetuningArguments
from .soft_prompt import load_prompt

ADAPTER = "adapter_config.json"
# Task -> transformers' class that finds the architecture. Those that generate depend on the kind of
# model too.
AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForCausalLM",
    "chat": "AutoModelForCausalLM",
}


@dataclass(frozen=True)
class ModelSource:
    """A model on disk.

    Attributes:
        values: The contents of its config.json.
        shape: "encoder-decoder", "encoder" or "decoder".
        native: Whether to train the zoo's model rather than transformers'.
        adapter: The folder of its LoRA weights, if it has any.
    """

    folder: Path
    values: dict[str, Any]
    shape: str
    native: bool
    adapter: Path | None = None

    @property
    def model_type(self) -> str:
        return self.values["model_type"]


def locate(name: str, cache: str | None = None) -> Path:
    """Returns the folder of a model, downloaded by the first rank if needed.

    Raises:
        ValueError: There is none.
    """
    if not name:
        raise ValueError(
            "model_name_or_path is missing: name the folder of a model, or one on the Hugging Face "
            "Hub"
        )
    return on_first_rank(lambda: find_folder(name, "model_name_or_path", cache=cache))


def find_source(arguments: FinetuningArguments) -> ModelSource:
    """Finds the model and decides between the zoo's and transformers'.

    Raises:
        ValueError: It does not fit the arguments.
    """
    folder = locate(arguments.model_name_or_path, arguments.cache_dir)
    adapter = None
    if (folder / ADAPTER).exists():
        base = (read_folder_json(folder, ADAPTER) or {}).get("base_model_name_or_path")
        adapter = folder
        folder = locate(base if isinstance(base, str) else "")
    stored = read_folder_json(adapter or folder, CONFIG) or read_folder_json(folder, CONFIG)
    values = with_dropout(stored, arguments.dropout_rate)
    if values is None:
        refuse_run_folder(folder)
        raise ValueError(f"{folder} holds no model: it has no {CONFIG}")
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{folder / CONFIG} has no model_type, so its kind of model is unknown")
    native = arguments.native
    if native is None:
        native = model_type in FAMILIES
        native = native and (arguments.task is None or arguments.task in family(model_type).tasks)
    elif native and model_type not in FAMILIES:
        raise ValueError(
            f"{folder} is a {model_type}, which is not in the zoo; use native=False, or a model of "
            f"{', '.join(FAMILIES)}"
        )
    elif not native and (folder / MANIFEST).exists():
        raise ValueError(
            f"{folder} holds shards, which only the zoo's models load; merge them with `shardzoo "
            "convert merge`"
        )
    if arguments.base_precision is not None and not native:
        raise ValueError(
            f"base_precision packs the layers of the zoo's models, and {folder} is trained as "
            f"transformers' {model_type}; leave it out, or use a model of {', '.join(FAMILIES)}"
        )
    for name in ("model_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        if getattr(arguments, name) > 1 and not native:
            raise ValueError(
                f"{name}={getattr(arguments, name)} splits the model, which transformers' "
                f"{model_type} does not support; use {name}=1, or a model of {', '.join(FAMILIES)}"
            )
    return ModelSource(folder, values, _find_shape(folder, values), native, adapter)


def _find_shape(folder: Path, values: dict[str, Any]) -> str:
    """Returns whether a model is an encoder-decoder, an encoder or a decoder."""
    if values["model_type"] in FAMILIES:
        return family(values["model_type"]).kind
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} holds no model that transformers knows: {error}") from None
    if config.is_encoder_decoder:
        return "encoder-decoder"
    return "encoder" if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "decoder"


def with_dropout(values: dict[str, Any] | None, rate: float | None) -> dict[str, Any] | None:
    """Returns the contents of a config.json with another rate of every dropout but a classifier's
    and of layers.
    """
    if values is None or rate is None:
        return values
    known = dict(values)
    if values.get("model_type") in FAMILIES:
        known |= vars(config_from_dict(values))
    rates: list[str] = []
    for name, value in known.items():
        is_dropout = re.search("dropout|pdrop", name) and "classifier" not in name
        if is_dropout and isinstance(value, float):
            rates.append(name)
    if not rates:
        raise ValueError(
            f"the {values.get('model_type')} has no dropout, so dropout_rate={rate} cannot be set"
        )
    return {**values, **dict.fromkeys(rates, rate)}


def load_model(
    source: ModelSource,
    task: str,
    arguments: FinetuningArguments,
    mesh: ParallelMesh | None,
    device: torch.device,
    head: dict[str, Any] | None,
) -> nn.Module:
    """Loads the model with the head of the task, in training mode.

    `head` are the settings of a new classifier in the configuration; None loads the stored one.
    """
    if source.native:
        return _load_native(source, task, arguments, mesh, device, head).train()
    return _load_transformers(source, task, arguments, head or {}).train()


def _load_native(
    source: ModelSource,
    task: str,
    arguments: FinetuningArguments,
    mesh: ParallelMesh | None,
    device: torch.device,
    head: dict[str, Any] | None,
) -> nn.Module:
    made: dict[str, Any] = {"device": device, "dtype": DTYPES[arguments.precision]}
    needs_values = (
        source.adapter is not None
        or arguments.adapter is not None
        or load_prompt(source.folder) is not None
    )
    if ENVIRONMENTS[arguments.env_type or "pytorch"].uses_fsdp and not needs_values:
        # The trainer reads the weights when it has split the model.
        made["device"] = "meta"
    config = task_config(source, task).with_changes(**(head or {}))
    if arguments.crf:
        config = config.with_changes(crf=True)
    blocks = _stage_blocks(config, arguments, mesh, device)
    architecture = config.architecture
    made["base_precision"] = arguments.base_precision
    made["parallel_config"] = ParallelConfig(
        arguments.sequence_parallel, arguments.recompute, blocks, arguments.context_exchange
    )
    # A head of the stored architecture that is damaged is not replaced by random values.
    is_stored = architecture in (source.values.get("architectures") or [architecture])
    new: list[str] = []
    if not is_stored:
        new += missing_modules(source.folder, config)
    if task == "embedding" and new:
        # A pooler that the folder does not have is left out: embeddings do not depend on it.
        config = config.with_changes(add_pooling_layer=False)
        new = []
    has_labels_of_adapter = source.adapter is not None and (source.adapter / CONFIG).exists()
    if head is not None or has_labels_of_adapter:
        new += [name for name in label_modules(config) if name not in new]
    if arguments.crf and not source.values.get("crf") and "crf_layer" not in new:
        new.append("crf_layer")
    # Without these changes, the weights must fit the folder's own configuration.
    if not is_stored or new or head is not None or arguments.dropout_rate is not None:
        made["config"] = config
    try:
        return from_pretrained(source.folder, mesh, new=sorted(new), seed=arguments.seed, **made)
    except ValueError as error:
        if task not in AUTO_CLASSES:
            raise
        raise ValueError(f"{error}; native=False loads it with transformers") from None


def task_config(source: ModelSource, task: str) -> ModelConfig:
    """Returns the configuration of the zoo's model with the head of the task."""
    return config_from_dict(
        {**source.values, "architectures": [family(source.model_type).tasks[task]]}
    )


def label_modules(config: ModelConfig) -> list[str]:
    """Returns the names of the modules whose outputs are a classifier's labels."""
    model: Any = build_on_meta(config, None)
    names: list[str] = []
    if hasattr(model, "linear_name"):
        names.append(model.linear_name)
    if hasattr(model, "crf_layer"):
        names.append("crf_layer")
    return names


def _stage_blocks(
    config: ModelConfig,
    arguments: FinetuningArguments,
    mesh: ParallelMesh | None,
    device: torch.device,
) -> tuple[int, ...] | None:
    """Returns the number of blocks of each pipeline stage, if there are several.

    The first rank may measure them.
    """
    if mesh is None or mesh.pp_size == 1:
        return None
    job = Job(
        micro_batch_size=arguments.micro_batch_size,
        length=arguments.max_source_length,
        target_length=arguments.max_target_length,
        tensor_parallel_size=mesh.tp_size,
        precision=arguments.precision,
        device="cuda" if device.type == "cuda" else "cpu",
    )
    return on_first_rank(
        lambda: choose_blocks(config, mesh.pp_size, arguments.pipeline_partition, job)
    )


def _load_transformers(
    source: ModelSource, task: str, arguments: FinetuningArguments, head: dict[str, Any]
) -> nn.Module:
    import transformers

    # What differs from the folder's configuration are the rates of dropout_rate.
    stored = read_folder_json(source.folder, CONFIG) or {}
    rates = {key: value for key, value in source.values.items() if stored.get(key) != value}
    name = AUTO_CLASSES[task]
    if task == "text2text-generation" and source.shape == "encoder-decoder":
        name = "AutoModelForSeq2SeqLM"
    elif task == "text2text-generation" and source.shape == "encoder":
        name = "AutoModelForMaskedLM"
    with torch.random.fork_rng():
        # A new head has the same weights on every rank.
        torch.manual_seed(arguments.seed)
        try:
            model: Any = getattr(transformers, name).from_pretrained(
                fetch_whole(source.folder),
                local_files_only=True,
                ignore_mismatched_sizes=bool(head),
                **{**rates, **head},
            )
        except (OSError, KeyError) as error:
            raise ValueError(
                f"{source.folder} holds no model that transformers loads: {error}"
            ) from None
    return model


def find_positions(model: nn.Module, source: ModelSource) -> int | None:
    """Returns the maximum number of tokens that the model reads; None if positions are relative."""
    config: Any = model.config
    if source.shape == "encoder-decoder":
        return None
    if source.native:
        return config.max_sequence_length
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return None
    return longest - _count_padding_positions(model)


def _count_padding_positions(model: nn.Module) -> int:
    """Returns the rows of a transformers model's position table that no token uses, such as
    RoBERTa's padding rows.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings"):
            padding = getattr(module, "padding_idx", None)
            return 0 if padding is None else padding + 1
    return 0
