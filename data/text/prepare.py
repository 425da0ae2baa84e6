"""Tokenizes a source of any size into one `.bin/.idx` pair: parallel, atomic, resumable, in
constant memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path

from ...files.working_copies import find_work
from ..indexed.format import dtype_for_vocabulary
from ..indexed.meta import CorpusMeta, read_meta
from ..indexed.writer import IndexedDatasetWriter, WriterState
from ..tokenizers.tokenizer import Tokenizer, load_tokenizer
from ..tokenizers.vocabulary import Vocabulary, tokenizer_digest
from .documents import LineNumbers, OnBad, SourceReport, name_source, skip_bad
from .encoding import Encoded, encode_documents
from .records import ChunkText, read_chunk
from .sources import Chunk, Source, fingerprint, plan_chunks

SECONDS_BETWEEN_COMMITS = 2.0


@dataclass(frozen=True)
class PrepareOptions:
    """The options that determine a prepared dataset, together with the source.

    Args:
        tokenizer: Path of the tokenizer (see `load_tokenizer`).
        text_key: Key or column that holds the text.
        append_eos: Put the end-of-text token after every document.
        eos_token: The end-of-text token, by name; None for the tokenizer's own.
        split_sentences: One sequence per sentence (for sentence pairs) instead of one per document.
    """

    tokenizer: Path
    text_key: str = "text"
    append_eos: bool = True
    eos_token: str | None = None
    split_sentences: bool = False


@dataclass
class PrepareReport(SourceReport):
    """Counts of a whole preparation, including resumed parts.

    `seconds` is the time of this run alone. `is_repeated` says that the finished pair existed
    already, made from the same text with the same settings.
    """

    tokens: int = 0
    seconds: float = 0.0
    resumed_chunks: int = 0
    resumed_documents: int = 0
    resumed_bytes: int = 0
    is_repeated: bool = False

    @property
    def documents_per_second(self) -> float:
        return (self.documents - self.resumed_documents) / max(self.seconds, 1e-9)

    @property
    def megabytes_per_second(self) -> float:
        return (self.bytes - self.resumed_bytes) / 1e6 / max(self.seconds, 1e-9)


# Called with (report so far, chunks done, chunks in total).
PrepareProgress = Callable[[PrepareReport, int, int], None]


@dataclass
class _EncodedChunk:
    """The tokens of one chunk, and the counts of its text without the text itself."""

    encoded: Encoded
    text: ChunkText
    documents: int


def prepare_dataset(
    source: Source,
    output: str | Path,
    options: PrepareOptions,
    *,
    workers: int = 1,
    on_bad: OnBad = skip_bad,
    resume: bool = True,
    overwrite: bool = False,
    progress: PrepareProgress | None = None,
) -> PrepareReport:
    """Writes `output.bin` and `output.idx`, the same for any number of workers.

    Megatron-LM and LiBai read them. `output.meta.json` records the vocabulary and the end-of-text
    token.

    A run that was stopped or killed leaves `output.*.partial` and `output.progress.json`; the same
    call resumes it. The token dtype is uint16 below a vocabulary of 65500 entries, otherwise int32.

    Args:
        source: See `iter_documents`.
        output: Prefix of the two files.
        workers: Processes that read and tokenize; 1 works in this process, with the threads of the
            tokenizer.
        on_bad: Called with every bad record; raises (see `fail_on_bad`), or returns to skip the
            record.
        resume: Whether to resume an interrupted run.
        overwrite: Whether to replace a finished pair that was made from other text or with other
            settings. The same pair may be made again in any case.
        progress: Called after every chunk.

    Raises:
        ValueError: The source or the tokenizer is missing, the source has no text, `output` is a
            finished pair of other text, or `on_bad` raises.
        RuntimeError: A worker process died.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    output = find_work(output)
    chunks = plan_chunks(source)
    tokenizer = load_tokenizer(options.tokenizer)
    end = _find_end_of_text(tokenizer, options)  # raises a clear error here rather than in a worker
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    settings = _describe_run(source, options, tokenizer)
    made_from = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    is_repeated = _was_made_from(output, made_from)
    if not overwrite and not is_repeated and Path(f"{output}.idx").exists():
        raise ValueError(
            f"{output}.bin and .idx exist already, and were made from other text or with other "
            "settings: name another output, or replace them with --overwrite (overwrite=True)"
        )
    meta = CorpusMeta(Vocabulary.from_tokenizer(tokenizer), end, options.split_sentences, made_from)
    progress_file = _ProgressFile(Path(f"{output}.progress.json"), settings)
    state = None
    report = PrepareReport()
    numbers = LineNumbers()
    saved = progress_file.read() if resume else None
    if saved is not None:
        state, report, numbers = saved
    report.is_repeated = is_repeated
    started = time.monotonic()
    with IndexedDatasetWriter(output, dtype, resume=state, keep_partial=True, meta=meta) as writer:
        if state is None:
            # A file of another run, whose unfinished tokens the writer has replaced, ends here.
            progress_file.write(0, writer.commit(), report, numbers)
        committed = time.monotonic()
        done = report.resumed_chunks
        encoded = _encode_all(chunks[done:], options, tokenizer, workers)
        for chunk, part in zip(chunks[done:], encoded, strict=True):
            bad = numbers.number(chunk, part.text)
            report.add(part.text, bad)
            report.documents += part.documents
            report.tokens += len(part.encoded.tokens)
            for record in bad:
                on_bad(record)
            writer.add_documents(*part.encoded)
            done += 1
            report.seconds = time.monotonic() - started
            if time.monotonic() - committed > SECONDS_BETWEEN_COMMITS:
                progress_file.write(done, writer.commit(), report, numbers)
                committed = time.monotonic()
            if progress is not None:
                progress(report, done, len(chunks))
        if report.documents == 0:
            # There is nothing to resume, whatever the reason was.
            writer.keep_partial = False
            progress_file.path.unlink(missing_ok=True)
            named = ""
            if report.first_bad:
                named = f"; the first bad record: {report.first_bad[0]}"
            raise ValueError(f"{name_source(source)} holds no document with text{named}")
    progress_file.path.unlink(missing_ok=True)
    return report


def _was_made_from(output: str | Path, made_from: str) -> bool:
    """Returns whether `output` is a finished pair of this text and these settings."""
    if not Path(f"{output}.idx").exists():
        return False
    meta = read_meta(output)
    return meta is not None and meta.made_from == made_from


def _encode(chunk: Chunk, options: PrepareOptions, tokenizer: Tokenizer) -> _EncodedChunk:
    """Reads and tokenizes one chunk."""
    text = read_chunk(chunk, options.text_key)
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    end = _find_end_of_text(tokenizer, options)
    encoded = encode_documents(
        tokenizer, text.documents, dtype, end, split_sentences=options.split_sentences
    )
    count = len(text.documents)
    # A worker sends its result to the main process, which has no use for the texts.
    text.documents.clear()
    return _EncodedChunk(encoded, text, count)


def _find_end_of_text(tokenizer: Tokenizer, options: PrepareOptions) -> int | None:
    """Returns the id of the token after every document, or None if nothing is appended."""
    if not options.append_eos:
        return None
    if options.eos_token is None:
        if "eos_token" not in tokenizer.special:
            raise ValueError(
                "this tokenizer has no end-of-text token; "
                "name one (such as --eos-token '[SEP]') or use --no-append-eos"
            )
        return tokenizer.eos_token_id
    index = tokenizer.token_to_id(options.eos_token)
    if index is None:
        raise ValueError(f"the tokenizer has no token {options.eos_token!r} to end documents with")
    return index


def _encode_all(
    chunks: list[Chunk], options: PrepareOptions, tokenizer: Tokenizer, workers: int
) -> Iterator[_EncodedChunk]:
    """Yields encoded chunks in order.

    At most two per worker are in flight, so memory does not grow.
    """
    if workers == 1:
        for chunk in chunks:
            yield _encode(chunk, options, tokenizer)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (options,))
    waiting: deque[Future[_EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode_in_worker, chunk))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a worker process died (out of memory?); run the same command again to resume"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[PrepareOptions, Tokenizer] | None = None  # set in worker processes


def _start_worker(options: PrepareOptions) -> None:
    global _worker
    # The processes are the parallelism, so each of them tokenizes with one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The main process handles an interrupt, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker = (options, load_tokenizer(options.tokenizer))


def _exit_with_parent() -> None:
    """Exits with the parent; a pool's workers would wait forever for a parent that was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> _EncodedChunk:
    assert _worker is not None
    return _encode(chunk, *_worker)


def _describe_run(
    source: Source, options: PrepareOptions, tokenizer: Tokenizer
) -> dict[str, object]:
    """Returns the settings that must be unchanged for an interrupted run to be resumed."""
    return {
        **asdict(options),
        "tokenizer": tokenizer_digest(tokenizer),
        "source": fingerprint(source),
    }


class _ProgressFile:
    """Keeps the progress of a run in `PREFIX.progress.json`, replaced atomically after the data is
    on disk.
    """

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self.path = path
        self.settings = settings

    def read(self) -> tuple[WriterState, PrepareReport, LineNumbers] | None:
        """Returns the state of an interrupted run with the same settings, or None."""
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if values["settings"] != self.settings:
                return None
            state = WriterState(**values["writer"])
            report = PrepareReport(**values["report"])
            report.resumed_chunks = values["chunks"]
            report.resumed_documents = report.documents
            report.resumed_bytes = report.bytes
            return state, report, LineNumbers(**values["lines"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write(
        self, chunks: int, state: WriterState, report: PrepareReport, numbers: LineNumbers
    ) -> None:
        """Records that the data of `chunks` chunks is on the disk."""
        values = {
            "settings": self.settings,
            "chunks": chunks,
            "writer": asdict(state),
            "report": asdict(report),
            "lines": {"path": numbers.path, "lines": numbers.lines},
        }
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.replace(self.path)
