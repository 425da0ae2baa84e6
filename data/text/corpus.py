"""Prepares a source of text for pretraining: a tokenizer, a training corpus and a held-out corpus."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ..indexed.dataset import IndexedDataset
from ..indexed.format import bin_path, dtype_for_vocabulary, idx_path
from ..indexed.merge import split_dataset
from ..indexed.writer import IndexedDatasetWriter
from ..tokenizers.tokenizer import Tokenizer, load_tokenizer
from ..tokenizers.training import train_byte_level_bpe, train_sentencepiece
from .documents import SourceReport, iter_documents, skip_bad, source_name
from .encoding import encode_documents
from .entropy import token_counts
from .sources import Source, fingerprint

TOKENIZER_TEXT_BYTES = 200 << 20  # enough for stable merges; more only takes longer
BATCH_CHARACTERS = 4 << 20
MANIFEST = "corpus.json"

Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in total)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus. The prefixes name `.bin/.idx` pairs; every document ends with `eos_token_id`."""

    train_prefix: Path
    valid_prefix: Path
    tokenizer_dir: Path
    vocab_size: int
    eos_token_id: int
    bad_records: int = 0
    first_bad: tuple[str, ...] = ()


def prepare_corpus(
    source: Source,
    output_dir: str | Path,
    *,
    vocab_size: int = 8192,
    tokenizer: Literal["bpe", "sentencepiece"] = "bpe",
    held_out_fraction: float = 0.05,
    seed: int = 1234,
    progress: Progress | None = None,
) -> Corpus:
    """Tokenizes a source into `output_dir`, or returns the corpus there if it was prepared from the same source.

    A hash of its text and the seed decides whether a document is held out, so the split is deterministic and equal
    documents are on the same side. The tokenizer is trained on the training documents alone. Records that are
    not text are skipped; the result has their number and describes the first ones.

    Args:
        source: text file, folder, JSON lines, parquet, None for the Python standard library, or the prefix of
            a `.bin/.idx` pair with its tokenizer beside it (`tokenizer/` or `tokenizer.json`).
        vocab_size: size of the trained tokenizer's vocabulary, without SentencePiece's sentinels; unused for a
            `.bin/.idx` pair.
        tokenizer: the kind to train: byte-level BPE (as GPT-2's) or SentencePiece unigram (as T5's).
        held_out_fraction: share of the documents that is held out, in (0, 1).
        progress: called with (stage, bytes done, bytes in total).

    Raises:
        ValueError: the source does not exist, has no text or fewer than two different documents, or is a pair
            without a tokenizer beside it.
    """
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"held_out_fraction is {held_out_fraction}; it must be between 0 and 1, such as 0.05")
    output = Path(output_dir)
    prefix = as_prefix(source)
    if prefix is not None:
        return _from_prefix(prefix, output, held_out_fraction, seed)
    wanted = {
        "source": fingerprint(source),
        "vocab_size": vocab_size,
        "held_out_fraction": held_out_fraction,
        "seed": seed,
    }
    if tokenizer != "bpe":  # older manifests have no entry for BPE
        wanted["tokenizer"] = tokenizer
    if (known := _read_manifest(output, wanted)) is not None:
        return known
    report = progress or (lambda stage, done, total: None)
    split = _choose_held_out(source, held_out_fraction, seed, report)
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    train = train_byte_level_bpe if tokenizer == "bpe" else train_sentencepiece
    trained = train(split.tokenizer_texts(report), vocab_size, output / "tokenizer")
    _tokenize(split, trained, output, report)
    corpus = _corpus(output, trained, split.report)
    _write_manifest(output, wanted, corpus)
    return corpus


def as_prefix(source: Source) -> Path | None:
    """Returns the prefix if `source` names a `.bin/.idx` pair (with or without the suffix), otherwise None."""
    if not isinstance(source, (str, Path)):
        return None
    path = Path(source)
    for candidate in (path, path.with_suffix("") if path.suffix in (".bin", ".idx") else path):
        if idx_path(candidate).is_file() and bin_path(candidate).is_file():
            return candidate
    return None


@dataclass
class _Split:
    """Decides which documents of a source are held out: those whose key is at most `threshold`."""

    source: Source
    seed: int
    threshold: bytes
    tokenizer_threshold: bytes
    total_bytes: int
    report: SourceReport

    def documents(self) -> Iterator[tuple[str, bytes]]:
        for text in iter_documents(self.source, on_bad=skip_bad):
            yield text, document_key(text, self.seed)

    def tokenizer_texts(self, progress: Progress) -> Iterator[str]:
        done = 0
        for text, key in self.documents():
            done += len(text)
            if self.threshold < key <= self.tokenizer_threshold:
                yield text
            progress("training the tokenizer", done, self.total_bytes)


def document_key(text: str, seed: int) -> bytes:
    """Returns the eight bytes that decide on which side of the split a document is."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=str(seed).encode()).digest()


def _choose_held_out(source: Source, fraction: float, seed: int, progress: Progress) -> _Split:
    report = SourceReport()
    keys: list[bytes] = []
    done = 0
    for text in iter_documents(source, on_bad=skip_bad, report=report):
        keys.append(document_key(text, seed))
        done += len(text)
        progress("reading", report.bytes, report.bytes)
    ordered = sorted(set(keys))
    if not keys:
        named = f"; the first of {report.bad} bad records: {report.first_bad[0]}" if report.bad else ""
        raise ValueError(f"{source_name(source)} holds no document with text{named}")
    if len(ordered) < 2:
        raise ValueError(
            f"{source_name(source)} holds {len(ordered)} distinct document(s); at least 2 are needed, one to train "
            "on and one to hold out"
        )
    held_out = min(max(1, round(fraction * len(ordered))), len(ordered) - 1)
    share = min(1.0, TOKENIZER_TEXT_BYTES / max(1, done))
    last = min(len(ordered) - 1, held_out + int(share * (len(ordered) - held_out)))
    return _Split(source, seed, ordered[held_out - 1], ordered[last], done, report)


def _tokenize(split: _Split, tokenizer: Tokenizer, output: Path, progress: Progress) -> None:
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    with IndexedDatasetWriter(output / "train", dtype) as train, IndexedDatasetWriter(output / "valid", dtype) as valid:
        batches: dict[bool, list[str]] = {False: [], True: []}
        waiting, done = 0, 0
        for text, key in split.documents():
            batches[key <= split.threshold].append(text)
            waiting += len(text)
            if waiting >= BATCH_CHARACTERS:
                done, waiting = done + waiting, 0
                _write_batches(batches, tokenizer, train, valid)
                progress("tokenizing", done, split.total_bytes)
        _write_batches(batches, tokenizer, train, valid)
        progress("tokenizing", split.total_bytes, split.total_bytes)


def _write_batches(
    batches: dict[bool, list[str]], tokenizer: Tokenizer, train: IndexedDatasetWriter, valid: IndexedDatasetWriter
) -> None:
    for held_out, writer in ((False, train), (True, valid)):
        if batches[held_out]:
            writer.add_documents(*encode_documents(tokenizer, batches[held_out], writer.dtype, tokenizer.eos_token_id))
            batches[held_out].clear()


def _from_prefix(prefix: Path, output: Path, fraction: float, seed: int) -> Corpus:
    tokenizer_dir = find_tokenizer(prefix)
    tokenizer = load_tokenizer(tokenizer_dir)
    dataset = IndexedDataset(prefix)
    largest = len(token_counts(dataset)) - 1
    if largest >= tokenizer.vocab_size:
        raise ValueError(
            f"{prefix} holds token id {largest}, but the tokenizer in {tokenizer_dir} has only "
            f"{tokenizer.vocab_size} entries; use the tokenizer that the corpus was prepared with"
        )
    sibling = prefix.with_name("valid")
    if prefix.name == "train" and idx_path(sibling).is_file():
        train, valid = prefix, sibling
    else:
        train, valid = output / "train", output / "valid"
        index = idx_path(prefix).stat()
        wanted = {
            "source": f"{prefix.resolve()} {index.st_size} {index.st_mtime_ns}",
            "held_out_fraction": fraction,
            "seed": seed,
        }
        if (known := _read_manifest(output, wanted)) is not None:
            return known
        if dataset.num_documents < 2:
            raise ValueError(f"{prefix} holds {dataset.num_documents} document(s); splitting needs at least 2")
        (output / MANIFEST).unlink(missing_ok=True)
        split_dataset(dataset, {train: 1 - fraction, valid: fraction}, seed=seed)
        corpus = Corpus(train, valid, tokenizer_dir, tokenizer.vocab_size, tokenizer.eos_token_id)
        _write_manifest(output, wanted, corpus)
        return corpus
    return Corpus(train, valid, tokenizer_dir, tokenizer.vocab_size, tokenizer.eos_token_id)


def find_tokenizer(prefix: Path) -> Path:
    """Returns the folder of the tokenizer beside a `.bin/.idx` pair. ValueError if there is no tokenizer."""
    folder = prefix.parent
    for candidate in (Path(f"{prefix}_tokenizer"), folder / "tokenizer", folder):
        if (candidate / "tokenizer.json").is_file() or list(candidate.glob("*.model")):
            return candidate
    raise ValueError(
        f"no tokenizer beside {prefix}: looked for {prefix.name}_tokenizer/, tokenizer/ and tokenizer.json in {folder}"
    )


def _corpus(output: Path, tokenizer: Tokenizer, report: SourceReport) -> Corpus:
    return Corpus(
        output / "train",
        output / "valid",
        output / "tokenizer",
        tokenizer.vocab_size,
        tokenizer.eos_token_id,
        report.bad,
        tuple(report.first_bad),
    )


def _write_manifest(output: Path, wanted: dict[str, object], corpus: Corpus) -> None:
    """Writes the manifest last and atomically, so that its presence means the corpus is complete."""
    values = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(corpus).items()}
    partial = output / f"{MANIFEST}.partial"
    partial.write_text(json.dumps({"prepared_from": wanted, **values}, indent=2) + "\n", encoding="utf-8")
    partial.replace(output / MANIFEST)


def _read_manifest(output: Path, wanted: dict[str, object]) -> Corpus | None:
    try:
        values = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
        if values.pop("prepared_from") != wanted:
            return None
        for part in ("train", "valid"):
            IndexedDataset(output / part)  # raises for a damaged pair, which is then prepared again
    except (OSError, ValueError, KeyError):
        return None
    own = output / "tokenizer"  # the recorded path is wrong if the folder was moved
    return Corpus(
        output / "train",
        output / "valid",
        own if own.is_dir() else Path(values["tokenizer_dir"]),
        values["vocab_size"],
        values["eos_token_id"],
        values["bad_records"],
        tuple(values["first_bad"]),
    )
