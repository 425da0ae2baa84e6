"""Builds a loader of an objective's samples for a training loop of one's own.

`pretrain.py` uses `build_pad_batch` alone: the trainer makes its loader itself
(`trainer/batches/training_data.py`).
"""

from __future__ import annotations

from ..indexed.dataset import IndexedDataset
from ..objectives.objective import PretrainingData
from ..objectives.registry import build_dataset, resolve_objective
from ..tokenizers.tokenizer import Tokenizer
from .collate import PadBatch
from .loader import ResumableLoader, Share


def build_loader(
    config: PretrainingData,
    indexed: IndexedDataset,
    tokenizer: Tokenizer,
    *,
    rank: int = 0,
    world_size: int = 1,
    consumed: int = 0,
    num_workers: int = 0,
) -> ResumableLoader:
    """Builds a loader of batches for one data-parallel rank.

    Args:
        config: Objective, lengths, micro-batch size and seed.
        indexed: The tokenized corpus.
        tokenizer: Gets the objective's special tokens if it lacks them.
        rank: Data-parallel rank of this process.
        world_size: Number of data-parallel ranks.
        consumed: Samples that all ranks together have consumed before.
        num_workers: Processes that read ahead.
    """
    loader = ResumableLoader(
        build_dataset(config, indexed, tokenizer),
        Share(config.micro_batch_size, rank, world_size),
        consumed=consumed,
        num_workers=num_workers,
        collate=build_pad_batch(config, tokenizer),
    )
    loader.tokenizer = tokenizer
    return loader


def build_pad_batch(config: PretrainingData, tokenizer: Tokenizer) -> PadBatch:
    """Returns what turns a configuration's samples into a batch: padded to fixed lengths if it says
    so.
    """
    special = tokenizer.special
    pad_token_id = special.get("pad_token", special.get("eos_token", 0))
    if not config.padded:
        return PadBatch(pad_token_id)
    objective = resolve_objective(config.objective)
    input_length, label_length = objective.lengths(config.sequence_length, config.target_length)
    lengths = {
        "input_ids": input_length,
        "position_ids": input_length,
        "seq_idx": input_length,
        "token_type_ids": input_length,
        "labels": label_length,
    }
    return PadBatch(pad_token_id, lengths)
