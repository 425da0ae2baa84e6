"""Compares the logits of a split model with those of an independent implementation."""

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
from ..files.working_copies import is_copy
from ..models import family, from_pretrained
from ..models.auto import model_class
from ..models.language_model import Backbone
from ..models.mapping import MappedCheckpoint, map_checkpoint
from ..mpu import ParallelMesh
from .operations import Options, merge, split
from .verification import SMALLEST_SPLIT

TOLERANCE = 1e-5  # of the largest difference, relative to the largest logit
BATCH = 2
LENGTH = 24  # tokens
SEED = 0


@dataclass(frozen=True)
class LogitsDifference:
    """The result of `compare_logits`.

    Attributes:
        size: The number of tensor-parallel ranks.
        reference: What the split model was compared with.
        largest: The largest absolute difference of a logit.
        scale: The largest absolute logit of the reference.
    """

    size: int
    reference: str
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        if self.scale == 0:
            return self.largest
        return self.largest / self.scale

    @property
    def is_close(self) -> bool:
        return self.relative <= TOLERANCE


def compare_logits(
    folder: Path, size: int | None, config_file: Path | None = None
) -> LogitsDifference:
    """Compares fp32 logits of random tokens: those of a split model, and transformers'.

    The split model runs in `size` processes that load shards. If `folder` has another format,
    or is in a store, shards or a Hugging Face folder are written to a temporary folder. A family that transformers
    does not have is compared with the unsplit model.

    Args:
        folder: A folder of any format.
        size: The number of ranks; by default that of the rank files, or two for a Hugging Face
            folder.
        config_file: A `config.json`, or its folder, to use instead of the folder's own.
    """
    source = open_checkpoint(folder, config_file)
    mapped = map_checkpoint(source)
    if size is None:
        size = SMALLEST_SPLIT if source.kind == "huggingface" else len(source.ranks)
    mapped.model.check_size(size)
    inputs = make_example_inputs(mapped)
    options = Options(config_file=config_file)
    with tempfile.TemporaryDirectory(prefix="logits-") as name:
        temporary = Path(name)
        shards = folder
        # The processes, and transformers, need files with bytes of their own.
        in_store = is_copy(folder)
        if source.kind != "shards" or len(source.ranks) != size or in_store:
            shards = temporary / "shards"
            split(folder, shards, size, options)
        merged = folder
        if source.kind != "huggingface" or in_store:
            merged = temporary / "merged"
            merge(folder, merged, options)
        ours = _compute_split_logits(shards, size, inputs, temporary)
        kind = find_transformers_class(mapped)
        if kind is not None:
            reference = f"transformers' {kind.__name__}"
            theirs = _compute_reference_logits(kind, merged, inputs, mapped)
        else:
            reference = "the unsplit model (transformers does not have this family)"
            theirs = _compute_unsplit_logits(shards, inputs)
    largest = (ours - theirs).abs().max().item()
    return LogitsDifference(size, reference, largest, theirs.abs().max().item())


def make_example_inputs(mapped: MappedCheckpoint) -> dict[str, Tensor]:
    """Returns random tokens [B, S], the same at every call, as arguments of the model."""
    config = mapped.model.config
    generator = torch.Generator().manual_seed(SEED)
    length = min(LENGTH, config.max_sequence_length)
    ids = torch.randint(mapped.model.vocab_size, (BATCH, length), generator=generator)
    ids = cast(type[Backbone], model_class(config)).example_ids(config, ids)
    inputs = {"input_ids": ids}
    # In some families the attention mask has another meaning.
    if family(config.model_type).masks_padding:
        inputs["attention_mask"] = torch.ones_like(ids)
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(
            mapped.model.vocab_size, (BATCH, length), generator=generator
        )
    return inputs


def select_logits(output: Any) -> Tensor:
    """Returns the first kind of logits that an output has, or else its hidden states.

    The output is that of a model of the zoo or of transformers.
    """
    for name in ("logits", "prediction_logits", "start_logits"):
        if hasattr(output, name):
            return getattr(output, name)
    return output.last_hidden_state


@torch.no_grad()
def _compute_unsplit_logits(folder: Path, inputs: Mapping[str, Tensor]) -> Tensor:
    model: Any = from_pretrained(folder, dtype=torch.float32)
    return model.gather_logits(select_logits(model(**inputs)))


def _compute_split_logits(
    folder: Path, size: int, inputs: Mapping[str, Tensor], temporary: Path
) -> Tensor:
    result = temporary / "logits.pt"
    # The server of forks imports everything once, instead of each rank.
    multiprocessing.set_forkserver_preload([__name__])
    arguments = (folder, size, dict(inputs), temporary / "rendezvous", result)
    start_processes(_run_rank, arguments, nprocs=size, start_method="forkserver")
    return torch.load(result, weights_only=True)


@torch.no_grad()
def _run_rank(
    rank: int, folder: Path, size: int, inputs: dict[str, Tensor], rendezvous: Path, result: Path
) -> None:
    """Computes the logits on one rank; the first rank saves them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    try:
        mesh = ParallelMesh(size)
        model: Any = from_pretrained(folder, mesh, dtype=torch.float32)
        logits = model.gather_logits(select_logits(model(**inputs)))
        if rank == 0:
            torch.save(logits, result)
    finally:
        dist.destroy_process_group()


def find_transformers_class(mapped: MappedCheckpoint) -> Any:
    """Returns transformers' class of the configured architecture; None if it has no such family."""
    import transformers

    config = mapped.model.config
    if not family(config.model_type).in_transformers:
        return None
    return getattr(transformers, config.architecture, None)


@torch.no_grad()
def _compute_reference_logits(
    kind: Any, folder: Path, inputs: Mapping[str, Tensor], mapped: MappedCheckpoint
) -> Tensor:
    """Returns the logits of transformers' class `kind`, with a Hugging Face folder's weights."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {}
    for what, names in report.items():
        if names and what != "unexpected_keys":
            problems[what] = sorted(names)
    if problems:
        raise ValueError(f"transformers cannot load {folder} without problems: {problems}")
    if "head.weight" in mapped.model.parameters:
        # transformers 5 ties the head of every T5, even if the file has a separate one
        # (huggingface/transformers#48154).
        head = from_pretrained(folder, dtype=torch.float32).get_parameter("head.weight")
        own_rows = head[: mapped.model.vocab_size].clone()
        model.get_output_embeddings().weight = torch.nn.Parameter(own_rows)
        # By this it also decides whether to scale a UMT5's logits.
        model.config.tie_word_embeddings = False
    return select_logits(model.eval()(**inputs))
