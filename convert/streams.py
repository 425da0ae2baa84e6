"""Writes tensors that are computed or copied one after another, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..checkpoint.file_io import HashingWriter, OpenFiles, hash_stored
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import CHUNK_BYTES, TensorReader
from .destination import Destination
from .journal import Journal, open_partial

ReadPieces = Callable[[str, TensorReader], Iterator[Tensor]]
"""(name of a tensor of the destination, reader) -> its values, in their order."""


def write_tensors(
    place: Destination,
    journal: Journal,
    targets: Sequence[StoredTensor],
    read_pieces: ReadPieces,
    report: Callable[[int, int], None],
) -> int:
    """Writes the tensors that an interrupted run has not finished.

    Args:
        targets: Where the tensors of the destination belong.
        report: Called with the bytes done and the bytes in all.

    Returns:
        The bytes of the tensors that the interrupted run had finished.
    """
    total = sum(tensor.nbytes for tensor in targets)
    kept = 0
    done = 0
    with TensorReader() as reader, OpenFiles(partial(open_partial, place.work)) as outputs:
        outputs.open(list(dict.fromkeys(target.file for target in targets)))
        for index, target in enumerate(targets):
            key = (target.file, target.name)
            recorded = journal.finished.get(index, {}).get(key)
            descriptor = outputs[target.file]
            if recorded is not None and recorded == hash_stored(target, descriptor, 1 << 20):
                kept += target.nbytes
            else:
                writer = HashingWriter([target], outputs)
                position = 0
                for piece in read_pieces(target.name, reader):
                    data = piece.reshape(-1).view(torch.uint8).numpy()
                    writer.write(position, data)
                    position += data.nbytes
                journal.record(index, {key: writer.finish()})
            done += target.nbytes
            report(done, total)
    return kept


def copy_pieces(tensor: StoredTensor, reader: TensorReader) -> Iterator[Tensor]:
    """Yields the values of a stored tensor."""
    step = max(1, CHUNK_BYTES * tensor.numel // max(tensor.nbytes, 1))
    for start in range(0, tensor.numel, step):
        yield reader.flat(tensor, start, min(start + step, tensor.numel))
