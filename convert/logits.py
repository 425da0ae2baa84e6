"""Compares the logits of a split model with those of an independent implementation on the same tokens."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from ..checkpoint.checkpoint import open_checkpoint
from ..models import family, from_pretrained
from ..models.auto import model_class
from ..models.language_model import Backbone
from ..models.mapping import MappedCheckpoint, map_checkpoint
from ..mpu import ParallelMesh
from .operations import Options, merge, split
from .verification import SMALLEST_SPLIT

TOLERANCE = 1e-5
BATCH, LENGTH, SEED = 2, 24, 0


@dataclass(frozen=True)
class LogitsDifference:
    """The result of `compare_logits`."""

    size: int  # tensor-parallel ranks
    reference: str  # what the split model was compared with
    largest: float  # absolute difference of a logit
    scale: float  # largest absolute logit of the reference

    @property
    def relative(self) -> float:
        return self.largest / self.scale if self.scale else self.largest

    @property
    def is_close(self) -> bool:
        return self.relative <= TOLERANCE


def compare_logits(
    folder: Path, size: int | None, config_file: Path | None = None
) -> LogitsDifference:
    """Compares the fp32 logits of random tokens: those of `size` processes that load shards, and transformers'.

    If `folder` has another format, shards or a Hugging Face folder are written to a temporary folder. A family that
    transformers does not have is compared with the unsplit model. By default `size` is the number of rank files, or two
    for a Hugging Face folder.
    """
    source = open_checkpoint(folder, config_file)
    mapped = map_checkpoint(source)
    if size is None:
        size = len(source.ranks) if source.kind != "huggingface" else SMALLEST_SPLIT
    mapped.model.check_size(size)
    inputs = example_inputs(mapped)
    options = Options(config_file=config_file)
    with tempfile.TemporaryDirectory(prefix="logits-") as temporary:
        shards, plain = folder, folder
        if source.kind != "shards" or len(source.ranks) != size:
            shards = Path(temporary) / "shards"
            split(folder, shards, size, options)
        if source.kind != "huggingface":
            plain = Path(temporary) / "merged"
            merge(folder, plain, options)
        ours = _split_logits(shards, size, inputs, Path(temporary))
        known = transformers_class(mapped)
        theirs = (
            _reference_logits(known, plain, inputs, mapped)
            if known
            else _unsplit_logits(shards, inputs)
        )
    reference = (
        f"transformers' {known.__name__}"
        if known
        else "the unsplit model (transformers does not have this family)"
    )
    largest = (ours - theirs).abs().max().item()
    return LogitsDifference(size, reference, largest, theirs.abs().max().item())


def example_inputs(mapped: MappedCheckpoint) -> dict[str, Tensor]:
    """Returns random tokens [B, S], the same at every call, as arguments of the model."""
    config = mapped.model.config
    generator = torch.Generator().manual_seed(SEED)
    length = min(LENGTH, config.max_sequence_length)
    ids = torch.randint(mapped.model.vocab_size, (BATCH, length), generator=generator)
    ids = cast(type[Backbone], model_class(config)).example_ids(config, ids)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(
            mapped.model.vocab_size, (BATCH, length), generator=generator
        )
    if not family(config.model_type).masks_padding:
        del inputs["attention_mask"]  # it has another meaning in this family
    return inputs


def logits_of(output: Any) -> Tensor:
    """Returns the first kind of logits that a model of the zoo or of transformers has, or else its hidden states."""
    kinds = ("logits", "prediction_logits", "start_logits", "last_hidden_state")
    return next(getattr(output, name) for name in kinds if hasattr(output, name))


@torch.no_grad()
def _unsplit_logits(folder: Path, inputs: Mapping[str, Tensor]) -> Tensor:
    model: Any = from_pretrained(folder, dtype=torch.float32)
    return model.gather_logits(logits_of(model(**inputs)))


def _split_logits(folder: Path, size: int, inputs: Mapping[str, Tensor], temporary: Path) -> Tensor:
    result = temporary / "logits.pt"
    multiprocessing.set_forkserver_preload(
        [__name__]
    )  # imports everything once instead of once per rank
    arguments = (folder, size, dict(inputs), temporary / "rendezvous", result)
    start_processes(_rank_logits, arguments, nprocs=size, start_method="forkserver")
    return torch.load(result, weights_only=True)


@torch.no_grad()
def _rank_logits(
    rank: int, folder: Path, size: int, inputs: dict[str, Tensor], rendezvous: Path, result: Path
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    try:
        mesh = ParallelMesh(size)
        model: Any = from_pretrained(folder, mesh, dtype=torch.float32)
        logits = model.gather_logits(logits_of(model(**inputs)))
        if rank == 0:
            torch.save(logits, result)
    finally:
        dist.destroy_process_group()


def transformers_class(mapped: MappedCheckpoint) -> Any:
    """Returns transformers' class of the configured architecture; None if transformers does not have the family."""
    import transformers

    config = mapped.model.config
    return (
        getattr(transformers, config.architecture, None)
        if family(config.model_type).in_transformers
        else None
    )


@torch.no_grad()
def _reference_logits(
    kind: Any, folder: Path, inputs: Mapping[str, Tensor], mapped: MappedCheckpoint
) -> Tensor:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if problems := {
        what: sorted(names) for what, names in report.items() if names and what != "unexpected_keys"
    }:
        raise ValueError(f"transformers cannot load {folder} without problems: {problems}")
    if "head.weight" in mapped.model.parameters:
        # transformers 5 ties the head of every T5, even if the file has a separate one
        # (huggingface/transformers#48154).
        head = from_pretrained(folder, dtype=torch.float32).get_parameter("head.weight")
        model.get_output_embeddings().weight = torch.nn.Parameter(
            head[: mapped.model.vocab_size].clone()
        )
        model.config.tie_word_embeddings = (
            False  # by which transformers 5 decides whether to scale a UMT5's logits
        )
    return logits_of(model.eval()(**inputs))
