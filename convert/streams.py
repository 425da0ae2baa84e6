"""Writes tensors that are computed or copied one after another, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.file_io import HashingWriter, OpenFiles, hash_stored
from ..checkpoint.planned_file import PlannedFile
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import CHUNK_BYTES, TensorReader
from .destination import Destination
from .journal import Journal, open_partial

Contents = Callable[[], dict[str, bytes | Path]]
"""Returns the small files of a folder, by name: their bytes, or the file to copy."""

ReadPieces = Callable[[str, TensorReader], Iterator[Tensor]]
"""(name of a tensor of the destination, reader) -> its values, in their order."""


def write_folder(
    source: Path,
    place: Destination,
    files: Sequence[PlannedFile],
    fingerprint: str,
    read_pieces: ReadPieces,
    contents: Contents,
    report: Callable[[int, int], None] | None,
    *,
    overwrite: bool,
) -> int:
    """Writes a folder of tensors and small files, and puts it in its place.

    Args:
        files: The files of the tensors.
        fingerprint: Of all that the bytes depend on; only a run with the same one is gone on with.

    Returns:
        The bytes of the tensors that an interrupted run had finished.

    Raises:
        ValueError: A file cannot be read or written.
    """
    targets = [tensor for file in files for tensor in file.tensors.values()]
    journal = place.begin(files, fingerprint, overwrite=overwrite)
    try:
        kept = _write_tensors(
            place, journal, targets, read_pieces, report or (lambda done, total: None)
        )
        place.finish(files, contents(), None)
    except (ValueError, MemoryError):
        place.abandon()
        raise
    except OSError as error:
        place.abandon()
        raise ValueError(f"cannot convert {source} to {place.folder}: {error}") from None
    finally:
        journal.close()
    return kept


def encode_texts(texts: Mapping[str, str | bytes]) -> dict[str, bytes]:
    """Returns the contents of small files, such as an index of weights, as bytes."""
    return {name: text.encode() if isinstance(text, str) else text for name, text in texts.items()}


def copy_pieces(tensor: StoredTensor, reader: TensorReader) -> Iterator[Tensor]:
    """Yields the values of a stored tensor."""
    step = max(1, CHUNK_BYTES * tensor.numel // max(tensor.nbytes, 1))
    for start in range(0, tensor.numel, step):
        yield reader.flat(tensor, start, min(start + step, tensor.numel))


def _write_tensors(
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
