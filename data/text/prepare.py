"""Tokenise a source of any size into one `.bin/.idx` pair: parallel, atomic, resumable, in flat memory."""

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
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np

from ..indexed.format import dtype_for_vocabulary
from ..indexed.writer import IndexedDatasetWriter, WriterState
from ..tokenizers.tokenizer import Tokenizer, load_tokenizer
from .documents import LineNumbers, OnBad, SourceReport, skip_bad, source_name
from .encoding import encode_documents, encode_sentences
from .records import ChunkText, read_chunk
from .sources import Chunk, Source, fingerprint, plan_chunks

SECONDS_BETWEEN_COMMITS = 2.0


@dataclass(frozen=True)
class PrepareOptions:
    """What a prepared dataset depends on, beside the source.

    Args:
        tokenizer: path of the tokenizer (see `load_tokenizer`).
        text_key: key or column that holds the text.
        append_eos: put the end-of-text token behind every document.
        eos_token: which token that is, by name; None: the tokenizer's own.
        split_sentences: one sequence per sentence (for sentence pairs) instead of one per document.
    """

    tokenizer: Path
    text_key: str = "text"
    append_eos: bool = True
    eos_token: str | None = None
    split_sentences: bool = False


@dataclass
class PrepareReport(SourceReport):
    """Counts of a whole preparation, resumed parts included; `seconds` counts this run alone."""

    tokens: int = 0
    seconds: float = 0.0
    resumed_chunks: int = 0
    resumed_documents: int = 0
    resumed_bytes: int = 0

    @property
    def documents_per_second(self) -> float:
        return (self.documents - self.resumed_documents) / max(self.seconds, 1e-9)

    @property
    def megabytes_per_second(self) -> float:
        return (self.bytes - self.resumed_bytes) / 1e6 / max(self.seconds, 1e-9)


PrepareProgress = Callable[[PrepareReport, int, int], None]  # (so far, chunks done, chunks in all)


@dataclass
class _Encoded:
    """One chunk's tokens, and its text's counts without the text."""

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray | None  # per document; None: each is one
    text: ChunkText
    documents: int = field(default=0)


def prepare_dataset(
    source: Source,
    output: str | Path,
    options: PrepareOptions,
    *,
    workers: int = 1,
    on_bad: OnBad = skip_bad,
    resume: bool = True,
    progress: PrepareProgress | None = None,
) -> PrepareReport:
    """Write `output.bin` and `output.idx`, readable by Megatron-LM and LiBai. The result depends on no worker
    count.

    A run that was stopped, even killed, leaves `output.*.partial` and `output.progress.json`; the same call
    goes on from there. Token dtype is uint16 below a vocabulary of 65500, else int32.

    Args:
        workers: processes that read and tokenise; 1 works in this process, with the threads of the tokenizer.
        on_bad: called with every defective record; raises (see `fail_on_bad`) or returns to skip it.
        progress: called after every chunk.

    Raises:
        ValueError: no source, no text, no tokenizer, or what `on_bad` raises.
        RuntimeError: a worker process died.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least 1 process has to do the work")
    chunks = plan_chunks(source)
    tokenizer = load_tokenizer(options.tokenizer)
    _end_of_text(tokenizer, options)  # a clear error now rather than in a worker
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    journal = _Journal(Path(f"{output}.progress.json"), _settings(source, options))
    state, report, numbers = journal.read() if resume else journal.fresh()
    started = time.monotonic()
    with IndexedDatasetWriter(output, dtype, resume=state, keep_partial=True) as writer:
        committed = time.monotonic()
        done = report.resumed_chunks
        encoded = _encode_all(chunks[done:], options, tokenizer, workers)
        for chunk, part in zip(chunks[done:], encoded, strict=True):
            bad = numbers.number(chunk, part.text)
            report.add(part.text, bad)
            report.documents += part.documents
            report.tokens += len(part.tokens)
            for record in bad:
                on_bad(record)
            _write(writer, part)
            done += 1
            report.seconds = time.monotonic() - started
            if time.monotonic() - committed > SECONDS_BETWEEN_COMMITS:
                journal.write(done, writer.commit(), report, numbers)
                committed = time.monotonic()
            if progress is not None:
                progress(report, done, len(chunks))
        if report.documents == 0:
            named = f"; the first bad record: {report.first_bad[0]}" if report.first_bad else ""
            raise ValueError(f"{source_name(source)} holds no document with text{named}")
    journal.path.unlink(missing_ok=True)
    return report


def _write(writer: IndexedDatasetWriter, part: _Encoded) -> None:
    if part.sequences is None:
        writer.add_documents(part.tokens, part.lengths)
    else:
        writer.add_sequences(part.tokens, part.lengths)
        writer.end_documents(part.sequences)


def _encode(chunk: Chunk, options: PrepareOptions, tokenizer: Tokenizer) -> _Encoded:
    text = read_chunk(chunk, options.text_key)
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    sequences, end = None, _end_of_text(tokenizer, options)
    if options.split_sentences:
        tokens, lengths, sequences = encode_sentences(tokenizer, text.documents, dtype, end)
    else:
        tokens, lengths = encode_documents(tokenizer, text.documents, dtype, end)
    count = len(text.documents)
    text.documents.clear()  # need not travel back
    return _Encoded(tokens, lengths, sequences, text, count)


def _end_of_text(tokenizer: Tokenizer, options: PrepareOptions) -> int | None:
    """Id of the token behind every document, None for none."""
    if not options.append_eos:
        return None
    if options.eos_token is None:
        if "eos_token" not in tokenizer.special:
            raise ValueError(
                "this tokenizer has no end-of-text token; name one (--eos-token '[SEP]', say) or ask for "
                "none "
                "(--no-append-eos)"
            )
        return tokenizer.eos_token_id
    index = tokenizer.token_to_id(options.eos_token)
    if index is None:
        raise ValueError(f"the tokenizer has no token {options.eos_token!r} to end documents with")
    return index


def _encode_all(chunks: list[Chunk], options: PrepareOptions, tokenizer: Tokenizer, workers: int) -> Iterator[_Encoded]:
    """Encoded chunks in order; at most two per worker are under way, so memory does not grow."""
    if workers == 1:
        yield from (_encode(chunk, options, tokenizer) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (options,))
    waiting: deque[Future[_Encoded]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError("a worker process died (out of memory?); the same command resumes the work") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[PrepareOptions, Tokenizer] | None = None  # what this worker process works with


def _start_worker(options: PrepareOptions) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process; the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what an interruption means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = options, load_tokenizer(options.tokenizer)


def _end_with_parent() -> None:
    """A pool's workers would wait for ever for a parent that was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(chunk: Chunk) -> _Encoded:
    assert _worker is not None
    return _encode(chunk, *_worker)


def _settings(source: Source, options: PrepareOptions) -> dict[str, object]:
    """What must be unchanged for a half-finished run to be continued."""
    path = Path(options.tokenizer)
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(file.read_bytes())
    return {**asdict(options), "tokenizer": digest.hexdigest(), "source": fingerprint(source)}


class _Journal:
    """`PREFIX.progress.json`: how far a run has come, replaced in one step after the data it speaks of is on
    disk.
    """

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self.path = path
        self.settings = settings

    def fresh(self) -> tuple[WriterState, PrepareReport, LineNumbers]:
        return WriterState(), PrepareReport(), LineNumbers()

    def read(self) -> tuple[WriterState, PrepareReport, LineNumbers]:
        """The state of an interrupted run with the same settings, or a fresh one."""
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if values["settings"] != self.settings:
                return self.fresh()
            report = PrepareReport(**values["report"])
            report.resumed_chunks = values["chunks"]
            report.resumed_documents, report.resumed_bytes = report.documents, report.bytes
            return WriterState(**values["writer"]), report, LineNumbers(**values["lines"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return self.fresh()

    def write(self, chunks: int, state: WriterState, report: PrepareReport, numbers: LineNumbers) -> None:
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
