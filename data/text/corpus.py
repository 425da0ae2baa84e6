"""Prepares sources of text for pretraining: a tokenizer, and a training and a held-out corpus of each source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..indexed.dataset import IndexedDataset
from ..indexed.format import bin_path, dtype_for_vocabulary, idx_path
from ..indexed.merge import split_dataset
from ..indexed.meta import CorpusMeta
from ..indexed.writer import IndexedDatasetWriter
from ..tokenizers.files import has_tokenizer
from ..tokenizers.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from ..tokenizers.training import TOKENIZER_KINDS, TokenizerKind, train_tokenizer
from ..tokenizers.vocabulary import Vocabulary, tokenizer_digest
from .documents import SourceReport, iter_documents, skip_bad, source_name
from .encoding import encode_documents, end_token
from .entropy import token_counts
from .sources import Source, fingerprint

TOKENIZER_TEXT_BYTES = 200 << 20  # enough for stable merges; more only takes longer
BATCH_CHARACTERS = 4 << 20
MANIFEST = "corpus.json"

Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in total)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus. The prefixes name `.bin/.idx` pairs; documents end with `eos_token_id` unless it is None.

    `notes` say what a user may want to know of a pair that another tool wrote.
    """

    train_prefix: Path
    valid_prefix: Path
    tokenizer_dir: Path
    vocab_size: int
    eos_token_id: int | None
    bad_records: int = 0
    first_bad: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Settings:
    """The arguments of `prepare_corpus`; `tokenizer` is a kind to train, or a tokenizer."""

    tokenizer: TokenizerKind | Tokenizer
    vocab_size: int = 8192
    split_sentences: bool = False
    held_out_fraction: float = 0.05
    seed: int = 1234
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction is {self.held_out_fraction}; it must be between 0 and 1, such as 0.05"
            )

    def report(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)

    def identity(self, source: str) -> dict[str, object]:
        """Returns what determines the prepared files. Settings that older manifests lack are left out by default."""
        values: dict[str, object] = {"source": source}
        values |= {"vocab_size": self.vocab_size} if isinstance(self.tokenizer, str) else {}
        values |= {"held_out_fraction": self.held_out_fraction, "seed": self.seed}
        if self.tokenizer != TOKENIZER_KINDS[0]:
            given = self.tokenizer
            values["tokenizer"] = given if isinstance(given, str) else tokenizer_digest(given)
        return values | ({"split_sentences": True} if self.split_sentences else {})


def prepare_corpus(
    source: Source,
    output_dir: str | Path,
    *,
    vocab_size: int = 8192,
    tokenizer: str | Path | Tokenizer = "bpe",
    split_sentences: bool = False,
    held_out_fraction: float = 0.05,
    seed: int = 1234,
    progress: Progress | None = None,
) -> Corpus:
    """Tokenizes a source into `output_dir`, or returns the corpus there if it was prepared from the same source.

    A hash of its text and the seed decides whether a document is held out, so the split is deterministic and equal
    documents are on the same side. A tokenizer is trained on the training documents alone. Documents end with the
    tokenizer's end-of-sequence token (or [SEP], in vocabularies without one), except those that are split into
    sentences. Records that are not text are skipped; the result has their number and describes the first ones.

    Args:
        source: text file, folder, JSON lines, parquet, a list of those, None for the Python standard library, or the
            prefix of a `.bin/.idx` pair with its tokenizer beside it (`tokenizer/` or `tokenizer.json`).
        vocab_size: size of the trained tokenizer's vocabulary, without SentencePiece's sentinels; unused for a
            `.bin/.idx` pair and for a given tokenizer.
        tokenizer: a tokenizer, its file or folder; or the kind to train (see `train_tokenizer`), for which a
            `.bin/.idx` pair has its own.
        split_sentences: one sequence per sentence, which sentence pairs need.
        held_out_fraction: share of the documents that is held out, in (0, 1).
        progress: called with (stage, bytes done, bytes in total).

    Raises:
        ValueError: the source does not exist, has no text or fewer than two different documents, or is a pair
            without a tokenizer or of another vocabulary.
    """
    found = _find_tokenizer(tokenizer)
    settings = _Settings(found, vocab_size, split_sentences, held_out_fraction, seed, progress)
    return _prepare(source, Path(output_dir), settings)


def prepare_corpora(
    mixture: Sequence[tuple[Source, object]], output_dir: str | Path, **options: Any
) -> list[Corpus]:
    """Prepares each source of a mixture (see `parse_mixture`) by `prepare_corpus(source, …, **options)`.

    All have one tokenizer. It is trained on the training documents of all sources, an equal amount of each if there is
    much text; if one source is a `.bin/.idx` pair, it is that one's. The shares change nothing here. The files of
    source n are in `output_dir/part_n`; those of a single source are in `output_dir`.
    """
    sources, output = [source for source, _ in mixture], Path(output_dir)
    if len(sources) == 1:
        return [prepare_corpus(sources[0], output, **options)]
    settings = _Settings(
        **{**options, "tokenizer": _find_tokenizer(options.get("tokenizer", TOKENIZER_KINDS[0]))}
    )
    if isinstance(settings.tokenizer, str):
        settings = replace(settings, tokenizer=_shared_tokenizer(sources, output, settings))
    return [
        _prepare(source, output / f"part_{number}", settings)
        for number, source in enumerate(sources)
    ]


def _shared_tokenizer(sources: Sequence[Source], output: Path, settings: _Settings) -> Tokenizer:
    """Returns the tokenizer of the first pair among the sources, or trains one on all, unless that was done before."""
    for prefix in filter(None, map(as_prefix, sources)):
        return load_tokenizer(find_tokenizer(prefix))
    folder, manifest = output / "tokenizer", output / MANIFEST
    wanted = settings.identity(" ".join(map(fingerprint, sources)))
    with suppress(OSError, ValueError):
        if json.loads(manifest.read_text(encoding="utf-8")) == {"prepared_from": wanted}:
            return load_tokenizer(folder)
    splits = [
        _choose_held_out(source, settings, TOKENIZER_TEXT_BYTES // len(sources))
        for source in sources
    ]
    output.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    tokenizer = _make_tokenizer(splits, folder, settings)
    _write_json(manifest, {"prepared_from": wanted})
    return tokenizer


def _find_tokenizer(tokenizer: str | Path | Tokenizer) -> TokenizerKind | Tokenizer:
    for kind in TOKENIZER_KINDS:
        if tokenizer == kind:
            return kind
    if isinstance(tokenizer, Tokenizer) or Path(tokenizer).exists():
        return tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    raise ValueError(
        f"tokenizer {tokenizer} is neither a file or folder nor one of the kinds that can be trained: "
        f"{', '.join(TOKENIZER_KINDS)}"
    )


def _prepare(source: Source, output: Path, settings: _Settings) -> Corpus:
    prefix = as_prefix(source)
    if prefix is not None:
        return _from_prefix(prefix, output, settings)
    wanted = settings.identity(fingerprint(source))
    if (known := _read_manifest(output, wanted)) is not None:
        return known
    split = _choose_held_out(source, settings)
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    tokenizer = _make_tokenizer([split], output / "tokenizer", settings)
    end = _tokenize(split, tokenizer, output, settings)
    corpus = Corpus(
        output / "train",
        output / "valid",
        output / "tokenizer",
        tokenizer.vocab_size,
        end,
        split.report.bad,
        tuple(split.report.first_bad),
    )
    _write_manifest(output, wanted, corpus)
    return corpus


def _make_tokenizer(splits: Sequence[_Split], folder: Path, settings: _Settings) -> Tokenizer:
    """Trains a tokenizer on the training documents, or saves the given one."""
    if isinstance(settings.tokenizer, Tokenizer):
        save_tokenizer(settings.tokenizer, folder)
        return settings.tokenizer
    texts = _TokenizerTexts(splits, settings)
    return train_tokenizer(settings.tokenizer, texts, settings.vocab_size, folder)


@dataclass(frozen=True)
class _TokenizerTexts:
    """The documents to train a tokenizer on, which are read again each time they are iterated over."""

    splits: Sequence[_Split]
    settings: _Settings

    def __iter__(self) -> Iterator[str]:
        for split in self.splits:
            yield from split.tokenizer_texts(self.settings.report)


def as_prefix(source: Source) -> Path | None:
    """Returns the prefix if `source` names a `.bin/.idx` pair (with or without the suffix), otherwise None."""
    if not isinstance(source, (str, Path)):
        for path in filter(as_prefix, source or ()):
            raise ValueError(
                f"{path} is one of {len(source or ())} sources and a .bin/.idx pair; give each source its share of a "
                "mixture (a:0.5 b:0.5), or merge the pairs with `shardzoo data merge`"
            )
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


def _choose_held_out(
    source: Source, settings: _Settings, text_bytes: int = TOKENIZER_TEXT_BYTES
) -> _Split:
    """Chooses the documents that are held out, and at most `text_bytes` of the others to train a tokenizer on."""
    seed = settings.seed
    report = SourceReport()
    keys: list[bytes] = []
    done = 0
    for text in iter_documents(source, on_bad=skip_bad, report=report):
        keys.append(document_key(text, seed))
        done += len(text)
        settings.report("reading", report.bytes, report.bytes)
    ordered = sorted(set(keys))
    if not keys:
        named = (
            f"; the first of {report.bad} bad records: {report.first_bad[0]}" if report.bad else ""
        )
        raise ValueError(f"{source_name(source)} holds no document with text{named}")
    if len(ordered) < 2:
        raise ValueError(
            f"{source_name(source)} holds {len(ordered)} distinct document(s); at least 2 are needed, one to train "
            "on and one to hold out"
        )
    held_out = min(max(1, round(settings.held_out_fraction * len(ordered))), len(ordered) - 1)
    share = min(1.0, text_bytes / max(1, done))
    last = min(len(ordered) - 1, held_out + int(share * (len(ordered) - held_out)))
    return _Split(source, seed, ordered[held_out - 1], ordered[last], done, report)


def _tokenize(split: _Split, tokenizer: Tokenizer, output: Path, settings: _Settings) -> int | None:
    """Writes the training and the held-out pair, and returns the token that ends their documents."""
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    end = end_token(tokenizer, split_sentences=settings.split_sentences)
    meta = CorpusMeta(Vocabulary.from_tokenizer(tokenizer), end, settings.split_sentences)
    with (
        IndexedDatasetWriter(output / "train", dtype, meta=meta) as train,
        IndexedDatasetWriter(output / "valid", dtype, meta=meta) as valid,
    ):
        batches: dict[bool, list[str]] = {False: [], True: []}
        waiting, done = 0, 0
        for text, key in split.documents():
            batches[key <= split.threshold].append(text)
            waiting += len(text)
            if waiting >= BATCH_CHARACTERS:
                done, waiting = done + waiting, 0
                _write_batches(batches, tokenizer, meta, train, valid)
                settings.report("tokenizing", done, split.total_bytes)
        _write_batches(batches, tokenizer, meta, train, valid)
        settings.report("tokenizing", split.total_bytes, split.total_bytes)
    return end


def _write_batches(
    batches: dict[bool, list[str]],
    tokenizer: Tokenizer,
    meta: CorpusMeta,
    train: IndexedDatasetWriter,
    valid: IndexedDatasetWriter,
) -> None:
    for held_out, writer in ((False, train), (True, valid)):
        texts = batches[held_out]
        how = {"split_sentences": meta.split_sentences}
        writer.add_documents(
            *encode_documents(tokenizer, texts, writer.dtype, meta.end_token, **how)
        )
        texts.clear()


def _from_prefix(prefix: Path, output: Path, settings: _Settings) -> Corpus:
    given = settings.tokenizer if isinstance(settings.tokenizer, Tokenizer) else None
    tokenizer = given or load_tokenizer(find_tokenizer(prefix))
    corpus = _describe_pair(prefix, tokenizer, settings)
    if given:
        save_tokenizer(given, output / "tokenizer")
        corpus = replace(corpus, tokenizer_dir=output / "tokenizer")
    sibling = prefix.with_name("valid")
    if prefix.name == "train" and idx_path(sibling).is_file():
        check_vocabulary(IndexedDataset(sibling), tokenizer)
        return replace(corpus, train_prefix=prefix, valid_prefix=sibling)
    index = idx_path(prefix).stat()
    values = settings.identity(f"{prefix.resolve()} {index.st_size} {index.st_mtime_ns}")
    unused = {"vocab_size", "split_sentences", *(() if given else ("tokenizer",))}
    wanted = {name: value for name, value in values.items() if name not in unused}
    if (known := _read_manifest(output, wanted)) is not None:
        return replace(known, notes=corpus.notes)
    dataset = IndexedDataset(prefix)
    if dataset.num_documents < 2:
        raise ValueError(
            f"{prefix} holds {dataset.num_documents} document(s); splitting needs at least 2"
        )
    (output / MANIFEST).unlink(missing_ok=True)
    fraction = settings.held_out_fraction
    split_dataset(
        dataset, {output / "train": 1 - fraction, output / "valid": fraction}, seed=settings.seed
    )
    corpus = replace(corpus, train_prefix=output / "train", valid_prefix=output / "valid")
    _write_manifest(output, wanted, corpus)
    return corpus


def _describe_pair(prefix: Path, tokenizer: Tokenizer, settings: _Settings) -> Corpus:
    """Returns a pair as both sides of a corpus. ValueError if the tokenizer or the objective does not fit it."""
    dataset = IndexedDataset(prefix)
    check_vocabulary(dataset, tokenizer)
    if settings.split_sentences and len(dataset) == dataset.num_documents:
        raise ValueError(
            f"{prefix} holds one sequence per document, and sentence pairs need one per sentence; prepare it again "
            "with --split-sentences"
        )
    end, notes = end_token(tokenizer, split_sentences=False), ()
    if dataset.meta is not None:
        end = dataset.meta.end_token
    elif end is not None:
        last = dataset.last_tokens()
        others = int((last != end).sum())
        token = f"token {end}, {tokenizer.id_to_token(end)!r}"
        notes = (
            (f"{others} of the {len(last)} documents of {prefix} do not end with {token}",)
            if others
            else ()
        )
        end = end if others < len(last) else None
    folder = tokenizer.path if tokenizer.path.is_dir() else tokenizer.path.parent
    return Corpus(prefix, prefix, folder, tokenizer.vocab_size, end, notes=notes)


def check_vocabulary(dataset: IndexedDataset, tokenizer: Tokenizer) -> None:
    """Raises ValueError, naming both, unless a corpus can have been prepared with a tokenizer.

    The vocabulary that is recorded beside the pair must be the tokenizer's, which may have more tokens behind it.
    Without a record, all ids must be in the vocabulary.
    """
    prefix, path, size = dataset.prefix, tokenizer.path, tokenizer.vocab_size
    if dataset.meta is not None:
        vocabulary = dataset.meta.vocabulary
        if not vocabulary.begins(tokenizer):
            raise ValueError(
                f"{prefix} was prepared with another vocabulary ({vocabulary.size} tokens) than that of the tokenizer "
                f"{path} ({size} tokens); use the tokenizer that the corpus was prepared with"
            )
        return
    ids = token_counts(dataset)[0]
    if len(ids) and ids[-1] >= size:
        raise ValueError(
            f"{prefix} holds token id {ids[-1]}, but the tokenizer {path} has only {size} entries; use the tokenizer "
            "that the corpus was prepared with"
        )


def find_tokenizer(prefix: Path) -> Path:
    """Returns the folder of the tokenizer beside a `.bin/.idx` pair. ValueError if there is no tokenizer."""
    folder = prefix.parent
    for candidate in (Path(f"{prefix}_tokenizer"), folder / "tokenizer", folder):
        if has_tokenizer(candidate):
            return candidate
    raise ValueError(
        f"no tokenizer beside {prefix}: looked for {prefix.name}_tokenizer/, tokenizer/ and tokenizer.json in {folder}"
    )


def _write_manifest(output: Path, wanted: dict[str, object], corpus: Corpus) -> None:
    """Writes the manifest last and atomically, so that its presence means the corpus is complete."""
    values = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(corpus).items()
    }
    values = {key: value for key, value in values.items() if key != "notes"}
    _write_json(output / MANIFEST, {"prepared_from": wanted, **values})


def _write_json(path: Path, values: dict[str, object]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


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
