"""Prepares sources of text for pretraining: a tokenizer, and a training and a held-out corpus of
each source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...files.working_copies import find_source, writing
from ..indexed.dataset import IndexedDataset
from ..indexed.format import bin_path, dtype_for_vocabulary, find_pair, idx_path
from ..indexed.merge import split_dataset
from ..indexed.meta import CorpusMeta
from ..indexed.writer import IndexedDatasetWriter
from ..tokenizers.files import has_tokenizer
from ..tokenizers.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from ..tokenizers.training import TOKENIZER_KINDS, TokenizerKind, train_tokenizer
from ..tokenizers.vocabulary import Vocabulary, tokenizer_digest
from .documents import SourceReport, iter_documents, name_source, skip_bad
from .encoding import encode_documents, find_end_token
from .entropy import token_counts
from .sources import Source, fingerprint

TOKENIZER_TEXT_BYTES = 200 << 20  # enough for stable merges; more only takes longer
BATCH_CHARACTERS = 4 << 20
MANIFEST = "corpus.json"

Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in total)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus.

    Attributes:
        train_prefix: Prefix of the `.bin/.idx` pair to train on.
        valid_prefix: Prefix of the pair that is held out.
        tokenizer_dir: Folder of the tokenizer.
        vocab_size: Number of the tokenizer's ids.
        eos_token_id: The token that ends the documents; None if there is none.
        bad_records: Number of records that were skipped.
        first_bad: Descriptions of the first of them.
        notes: What a user may want to know of a pair that another tool wrote.
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
class _CorpusSettings:
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
                f"held_out_fraction is {self.held_out_fraction}; "
                "it must be between 0 and 1, such as 0.05"
            )

    def report(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)

    def describe(self, source: str) -> dict[str, object]:
        """Returns what determines the prepared files, which the manifest records.

        Settings that older manifests lack are left out at their defaults, so that a corpus that
        was prepared by an older version is found again.
        """
        values: dict[str, object] = {"source": source}
        if isinstance(self.tokenizer, str):
            values["vocab_size"] = self.vocab_size
        values["held_out_fraction"] = self.held_out_fraction
        values["seed"] = self.seed
        if isinstance(self.tokenizer, Tokenizer):
            values["tokenizer"] = tokenizer_digest(self.tokenizer)
        elif self.tokenizer != TOKENIZER_KINDS[0]:
            values["tokenizer"] = self.tokenizer
        if self.split_sentences:
            values["split_sentences"] = True
        return values


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
    """Tokenizes a source into `output_dir`, or returns the corpus there if it was prepared from the
    same source.

    A hash of its text and the seed decides whether a document is held out, so the split is
    deterministic and equal documents are on the same side. A tokenizer is trained on the training
    documents alone. Documents end with the tokenizer's end-of-sequence token (or [SEP], in
    vocabularies without one), except those that are split into sentences. Records that are not text
    are skipped; the result has their number and describes the first ones.

    Args:
        output_dir: A folder, or the URL of one in an object store, of which the result names the
            local copy.
        source: Text file, folder, JSON lines, parquet, a list of those, None for the Python
            standard library, or the prefix of a `.bin/.idx` pair with its tokenizer beside it
            (`tokenizer/` or `tokenizer.json`).
        vocab_size: Size of the trained tokenizer's vocabulary, without SentencePiece's sentinels;
            unused for a `.bin/.idx` pair and for a given tokenizer.
        tokenizer: A tokenizer, its file or folder; or the kind to train (see `train_tokenizer`),
            for which a `.bin/.idx` pair has its own.
        split_sentences: One sequence per sentence, which sentence pairs need.
        held_out_fraction: Share of the documents that is held out, in (0, 1).
        progress: Called with (stage, bytes done, bytes in total).

    Raises:
        ValueError: The source does not exist, has no text or fewer than two different documents, or
            is a pair without a tokenizer or of another vocabulary.
    """
    settings = _CorpusSettings(
        _resolve_tokenizer(tokenizer),
        vocab_size,
        split_sentences,
        held_out_fraction,
        seed,
        progress,
    )
    with writing(output_dir) as output:
        return _prepare(source, output, settings)


def prepare_corpora(
    mixture: Sequence[tuple[Source, object]], output_dir: str | Path, **options: Any
) -> list[Corpus]:
    """Prepares each source of a mixture (see `parse_mixture`) by `prepare_corpus(source, …,
    **options)`.

    All have one tokenizer. It is trained on the training documents of all sources, an equal amount
    of each if there is much text; if one source is a `.bin/.idx` pair, it is that one's. The shares
    change nothing here. The files of source n are in `output_dir/part_n`; those of a single source
    are in `output_dir`.
    """
    sources = [source for source, _ in mixture]
    if len(sources) == 1:
        return [prepare_corpus(sources[0], output_dir, **options)]
    tokenizer = _resolve_tokenizer(options.get("tokenizer", TOKENIZER_KINDS[0]))
    settings = _CorpusSettings(**{**options, "tokenizer": tokenizer})
    with writing(output_dir) as output:
        if isinstance(tokenizer, str):
            shared = _find_shared_tokenizer(sources, output, settings)
            settings = replace(settings, tokenizer=shared)
        return [
            _prepare(source, output / f"part_{number}", settings)
            for number, source in enumerate(sources)
        ]


def _find_shared_tokenizer(
    sources: Sequence[Source], output: Path, settings: _CorpusSettings
) -> Tokenizer:
    """Returns the tokenizer of the first pair among the sources, or trains one on all.

    A tokenizer that was trained on the same sources before is read back.
    """
    for prefix in filter(None, map(as_prefix, sources)):
        return load_tokenizer(find_tokenizer(prefix))
    folder = output / "tokenizer"
    manifest = output / MANIFEST
    wanted = settings.describe(" ".join(map(fingerprint, sources)))
    with suppress(OSError, ValueError):
        if json.loads(manifest.read_text(encoding="utf-8")) == {"prepared_from": wanted}:
            return load_tokenizer(folder)
    text_bytes = TOKENIZER_TEXT_BYTES // len(sources)
    splits = [_choose_held_out(source, settings, text_bytes) for source in sources]
    output.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    tokenizer = _make_tokenizer(splits, folder, settings)
    _write_json(manifest, {"prepared_from": wanted})
    return tokenizer


def _resolve_tokenizer(tokenizer: str | Path | Tokenizer) -> TokenizerKind | Tokenizer:
    """Returns the kind of tokenizer to train, or the one that is given or read from a path."""
    for kind in TOKENIZER_KINDS:
        if tokenizer == kind:
            return kind
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if find_source(tokenizer) is not None or Path(tokenizer).exists():
        return load_tokenizer(tokenizer)
    raise ValueError(
        f"tokenizer {tokenizer} is neither a file or folder nor one of the kinds that can be "
        f"trained: {', '.join(TOKENIZER_KINDS)}"
    )


def _prepare(source: Source, output: Path, settings: _CorpusSettings) -> Corpus:
    """Prepares one source, or returns the corpus in the folder if it was prepared from the same
    one.
    """
    prefix = as_prefix(source)
    if prefix is not None:
        return _prepare_pair(prefix, output, settings)
    wanted = settings.describe(fingerprint(source))
    known = _read_manifest(output, wanted)
    if known is not None:
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


def _make_tokenizer(
    splits: Sequence[_HeldOutSplit], folder: Path, settings: _CorpusSettings
) -> Tokenizer:
    """Trains a tokenizer on the training documents, or saves the given one."""
    if isinstance(settings.tokenizer, Tokenizer):
        save_tokenizer(settings.tokenizer, folder)
        return settings.tokenizer
    texts = _TokenizerTexts(splits, settings)
    return train_tokenizer(settings.tokenizer, texts, settings.vocab_size, folder)


@dataclass(frozen=True)
class _TokenizerTexts:
    """The documents to train a tokenizer on, read again each time they are iterated over."""

    splits: Sequence[_HeldOutSplit]
    settings: _CorpusSettings

    def __iter__(self) -> Iterator[str]:
        for split in self.splits:
            yield from split.tokenizer_texts(self.settings.report)


def as_prefix(source: Source) -> Path | None:
    """Returns the prefix if `source` names a `.bin/.idx` pair (with or without the suffix),
    otherwise None.
    """
    if not isinstance(source, (str, Path)):
        for path in filter(as_prefix, source or ()):
            raise ValueError(
                f"{path} is one of {len(source or ())} sources and a .bin/.idx pair; give each "
                "source its share of a mixture (a:0.5 b:0.5), or merge the pairs with "
                "`shardzoo data merge`"
            )
        return None
    pair = find_pair(source)
    if pair is not None:
        return pair
    path = Path(source)
    candidates = [path]
    if path.suffix in (".bin", ".idx"):
        candidates.append(path.with_suffix(""))
    for candidate in candidates:
        if idx_path(candidate).is_file() and bin_path(candidate).is_file():
            return candidate
    return None


@dataclass
class _HeldOutSplit:
    """Decides which documents of a source are held out, and which a tokenizer is trained on.

    Attributes:
        source: Where the documents are read.
        seed: Key of the documents' hashes.
        threshold: The largest hash of a document that is held out.
        tokenizer_threshold: The largest hash of a document that a tokenizer is trained on.
        characters: Size of all documents, for the progress.
        report: Counts of the documents and bad records.
    """

    source: Source
    seed: int
    threshold: bytes
    tokenizer_threshold: bytes
    characters: int
    report: SourceReport

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """Yields (text, hash) of each document."""
        for text in iter_documents(self.source, on_bad=skip_bad):
            yield text, hash_document(text, self.seed)

    def tokenizer_texts(self, progress: Progress) -> Iterator[str]:
        """Yields the documents to train a tokenizer on."""
        done = 0
        for text, key in self.documents():
            done += len(text)
            if self.threshold < key <= self.tokenizer_threshold:
                yield text
            progress("training the tokenizer", done, self.characters)


def hash_document(text: str, seed: int) -> bytes:
    """Returns the eight bytes that decide on which side of the split a document is."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=str(seed).encode()).digest()


def _choose_held_out(
    source: Source, settings: _CorpusSettings, text_bytes: int = TOKENIZER_TEXT_BYTES
) -> _HeldOutSplit:
    """Chooses the documents that are held out, and at most `text_bytes` of the others for a
    tokenizer.
    """
    report = SourceReport()
    keys: list[bytes] = []
    characters = 0
    for text in iter_documents(source, on_bad=skip_bad, report=report):
        keys.append(hash_document(text, settings.seed))
        characters += len(text)
        settings.report("reading", report.bytes, report.bytes)
    if not keys:
        named = ""
        if report.bad:
            named = f"; the first of {report.bad} bad records: {report.first_bad[0]}"
        raise ValueError(f"{name_source(source)} holds no document with text{named}")
    ordered = sorted(set(keys))
    if len(ordered) < 2:
        raise ValueError(
            f"{name_source(source)} holds {len(ordered)} distinct document(s); at least 2 are "
            "needed, one to train on and one to hold out"
        )
    held_out = round(settings.held_out_fraction * len(ordered))
    held_out = min(max(1, held_out), len(ordered) - 1)
    tokenizer_share = min(1.0, text_bytes / max(1, characters))
    last = held_out + int(tokenizer_share * (len(ordered) - held_out))
    last = min(len(ordered) - 1, last)
    return _HeldOutSplit(
        source, settings.seed, ordered[held_out - 1], ordered[last], characters, report
    )


def _tokenize(
    split: _HeldOutSplit, tokenizer: Tokenizer, output: Path, settings: _CorpusSettings
) -> int | None:
    """Writes the training and the held-out pair, and returns the token that ends a document."""
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    end = find_end_token(tokenizer, split_sentences=settings.split_sentences)
    meta = CorpusMeta(Vocabulary.from_tokenizer(tokenizer), end, settings.split_sentences)

    def write(texts: list[str], writer: IndexedDatasetWriter) -> None:
        encoded = encode_documents(
            tokenizer, texts, dtype, end, split_sentences=settings.split_sentences
        )
        writer.add_documents(*encoded)
        texts.clear()

    with (
        IndexedDatasetWriter(output / "train", dtype, meta=meta) as train,
        IndexedDatasetWriter(output / "valid", dtype, meta=meta) as valid,
    ):
        train_texts: list[str] = []
        valid_texts: list[str] = []
        done = 0
        waiting = 0  # characters that are read and not tokenized
        for text, key in split.documents():
            is_held_out = key <= split.threshold
            (valid_texts if is_held_out else train_texts).append(text)
            waiting += len(text)
            if waiting >= BATCH_CHARACTERS:
                done += waiting
                waiting = 0
                write(train_texts, train)
                write(valid_texts, valid)
                settings.report("tokenizing", done, split.characters)
        write(train_texts, train)
        write(valid_texts, valid)
        settings.report("tokenizing", split.characters, split.characters)
    return end


def _prepare_pair(prefix: Path, output: Path, settings: _CorpusSettings) -> Corpus:
    """Returns a `.bin/.idx` pair as a corpus, split into two pairs unless it is `train` beside a
    `valid`.
    """
    given = settings.tokenizer if isinstance(settings.tokenizer, Tokenizer) else None
    tokenizer = given or load_tokenizer(find_tokenizer(prefix))
    corpus = _describe_pair(prefix, tokenizer, settings)
    if given:
        save_tokenizer(given, output / "tokenizer")
        corpus = replace(corpus, tokenizer_dir=output / "tokenizer")

    valid = prefix.with_name("valid")
    if prefix.name == "train" and idx_path(valid).is_file():
        check_vocabulary(IndexedDataset(valid), tokenizer)
        return replace(corpus, train_prefix=prefix, valid_prefix=valid)

    index = idx_path(prefix).stat()
    wanted = settings.describe(f"{prefix.resolve()} {index.st_size} {index.st_mtime_ns}")
    wanted.pop("vocab_size", None)
    wanted.pop("split_sentences", None)
    if given is None:
        wanted.pop("tokenizer", None)
    known = _read_manifest(output, wanted)
    if known is not None:
        return replace(known, notes=corpus.notes)

    dataset = IndexedDataset(prefix)
    if dataset.num_documents < 2:
        raise ValueError(
            f"{prefix} holds {dataset.num_documents} document(s); splitting needs at least 2"
        )
    (output / MANIFEST).unlink(missing_ok=True)
    train = output / "train"
    valid = output / "valid"
    fraction = settings.held_out_fraction
    split_dataset(dataset, {train: 1 - fraction, valid: fraction}, seed=settings.seed)
    corpus = replace(corpus, train_prefix=train, valid_prefix=valid)
    _write_manifest(output, wanted, corpus)
    return corpus


def _describe_pair(prefix: Path, tokenizer: Tokenizer, settings: _CorpusSettings) -> Corpus:
    """Returns a pair as both sides of a corpus.

    Raises:
        ValueError: The tokenizer or the objective does not fit it.
    """
    dataset = IndexedDataset(prefix)
    check_vocabulary(dataset, tokenizer)
    if settings.split_sentences and len(dataset) == dataset.num_documents:
        raise ValueError(
            f"{prefix} holds one sequence per document, and sentence pairs need one per sentence; "
            "prepare it again with --split-sentences"
        )
    notes: tuple[str, ...] = ()
    end = find_end_token(tokenizer, split_sentences=False)
    if dataset.meta is not None:
        end = dataset.meta.end_token
    elif end is not None:
        # Another tool wrote the pair, so its documents say whether they end with the token.
        last = dataset.last_tokens()
        others = int((last != end).sum())
        if others:
            notes = (
                f"{others} of the {len(last)} documents of {prefix} do not end with "
                f"token {end}, {tokenizer.id_to_token(end)!r}",
            )
        if others == len(last):
            end = None
    folder = tokenizer.path if tokenizer.path.is_dir() else tokenizer.path.parent
    return Corpus(prefix, prefix, folder, tokenizer.vocab_size, end, notes=notes)


def check_vocabulary(dataset: IndexedDataset, tokenizer: Tokenizer) -> None:
    """Raises ValueError, naming both, unless a corpus can have been prepared with a tokenizer.

    The vocabulary that is recorded beside the pair must be the tokenizer's, which may have more
    tokens behind it. Without a record, all ids must be in the vocabulary.
    """
    size = tokenizer.vocab_size
    if dataset.meta is not None:
        vocabulary = dataset.meta.vocabulary
        if not vocabulary.begins(tokenizer):
            raise ValueError(
                f"{dataset.prefix} was prepared with another vocabulary ({vocabulary.size} tokens) "
                f"than that of the tokenizer {tokenizer.path} ({size} tokens); "
                "use the tokenizer that the corpus was prepared with"
            )
        return
    ids, _ = token_counts(dataset)
    if len(ids) and ids[-1] >= size:
        raise ValueError(
            f"{dataset.prefix} holds token id {ids[-1]}, but the tokenizer {tokenizer.path} has "
            f"only {size} entries; use the tokenizer that the corpus was prepared with"
        )


def find_tokenizer(prefix: Path) -> Path:
    """Returns the folder of the tokenizer beside a `.bin/.idx` pair.

    Raises:
        ValueError: There is no tokenizer.
    """
    folder = prefix.parent
    for candidate in (Path(f"{prefix}_tokenizer"), folder / "tokenizer", folder):
        if has_tokenizer(candidate):
            return candidate
    raise ValueError(
        f"no tokenizer beside {prefix}: looked for {prefix.name}_tokenizer/, tokenizer/ and "
        f"tokenizer.json in {folder}; put it there, or name one by --tokenizer"
    )


def _write_manifest(output: Path, wanted: dict[str, object], corpus: Corpus) -> None:
    """Writes the manifest, last and atomically, so that it means that the corpus is complete."""
    values: dict[str, object] = {"prepared_from": wanted}
    for key, value in asdict(corpus).items():
        if key != "notes":
            values[key] = str(value) if isinstance(value, Path) else value
    _write_json(output / MANIFEST, values)


def _write_json(path: Path, values: dict[str, object]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _read_manifest(output: Path, wanted: dict[str, object]) -> Corpus | None:
    """Returns the corpus in a folder; None unless it is complete and was prepared as wanted."""
    try:
        values = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
        if values.pop("prepared_from") != wanted:
            return None
        for part in ("train", "valid"):
            # Opening raises for a damaged pair, which is then prepared again.
            IndexedDataset(output / part)
    except (OSError, ValueError, KeyError):
        return None
    # The recorded path of the tokenizer is wrong if the folder was moved.
    tokenizer_dir = output / "tokenizer"
    if not tokenizer_dir.is_dir():
        tokenizer_dir = Path(values["tokenizer_dir"])
    return Corpus(
        output / "train",
        output / "valid",
        tokenizer_dir,
        values["vocab_size"],
        values["eos_token_id"],
        values["bad_records"],
        tuple(values["first_bad"]),
    )
