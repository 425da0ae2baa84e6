"""Measures data preparation, index building, loading and memory, as ratios within one run.

    python benchmarks/data.py --threads 1

Every part checks its result first and prints no speed for a wrong one. The compared sides run alternately.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    threads: int = 1
    """Threads of the tokenizer and processes of the preparation."""
    megabytes: int = 48
    """Size of the corpus for throughput."""
    repeats: int = 3
    """Measurements of each side; the median is reported."""
    index_tokens: int = 100_000_000
    """Number of tokens to build indices for."""
    skip: tuple[str, ...] = ()
    """Parts to leave out: throughput, index, loader, memory."""


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)  # read when the tokenizer first runs
    table = Table("measure", "this", "against", "ratio", "wanted")
    parts = {"throughput": throughput, "index": index_building, "loader": loader, "memory": memory}
    with tempfile.TemporaryDirectory() as folder:
        corpus, tokenizer = make_corpus(Path(folder), arguments.megabytes)
        for name, part in parts.items():
            if name not in arguments.skip:
                part(arguments, corpus, tokenizer, table)
    Console(width=140).print(table)
    return 0


def make_corpus(folder: Path, megabytes: int) -> tuple[Path, Path]:
    """Writes Python's standard library as JSON lines, repeated up to the size, and trains a tokenizer on it."""
    from shardzoo.data import iter_documents, train_byte_level_bpe

    documents = list(iter_documents(None))
    train_byte_level_bpe(documents, 8192, folder / "tokenizer")
    corpus = folder / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1_000_000:
            for document in documents:
                file.write(json.dumps({"text": document}) + "\n")
                if file.tell() >= megabytes * 1_000_000:
                    break
    return corpus, folder / "tokenizer"


def take_turns(repeats: int, *sides: Callable[[], object]) -> list[float]:
    """Runs the sides alternately and returns the median seconds of each."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for taken, side in zip(seconds, sides, strict=True):
            started = time.perf_counter()
            side()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in seconds]


def throughput(arguments: Arguments, corpus: Path, tokenizer: Path, table: Table) -> None:
    """Compares preparation from file to file with the tokenizer's batch call on texts in memory."""
    from tokenizers import Tokenizer

    from shardzoo.data import IndexedDataset, PrepareOptions, iter_documents, prepare_dataset

    texts = list(iter_documents(corpus))
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    output = corpus.with_name("prepared")

    def prepare() -> None:
        prepare_dataset(corpus, output, PrepareOptions(tokenizer), workers=arguments.threads)

    def encode() -> None:  # in batches of some MB, because one call on all texts is slower
        for start in range(0, len(texts), 200):
            backend.encode_batch(texts[start : start + 200])

    prepare()
    dataset = IndexedDataset(output)
    for number in range(0, len(texts), 97):
        if dataset.document(number)[:-1].tolist() != backend.encode(texts[number]).ids:
            raise SystemExit(f"document {number} was prepared wrongly")
    ours, theirs = take_turns(arguments.repeats, prepare, encode)
    megabytes = corpus.stat().st_size / 1e6
    row(
        table,
        f"preparation, {arguments.threads} thread(s), MB/s",
        megabytes / ours,
        megabytes / theirs,
        "0.9",
    )


def index_building(arguments: Arguments, corpus: Path, tokenizer: Path, table: Table) -> None:
    """Compares the C++ index builders with those in NumPy, on documents of about 600 tokens, 24 per sentence."""
    from shardzoo.data.indexed import index_building as builders

    if not builders.is_compiled:
        raise SystemExit("the compiled index builders are not installed")
    generator = np.random.default_rng(0)
    sizes = generator.poisson(24, arguments.index_tokens // 24).astype(np.int32)
    marks = np.arange(0, len(sizes) + 1, 25, dtype=np.int64)
    sentence = (sizes, marks, 509, 0.1, 2, 7)
    small = (sizes[:50_000], marks[:2001], 509, 0.1, 2, 7)
    lengths = np.add.reduceat(sizes, marks[:-1], dtype=np.int64)
    count = int(lengths.sum()) // 1024
    sample = (lengths, 0, 1024, count)
    if not np.array_equal(
        builders.compiled_sentence_index(*small), builders.reference_sentence_index(*small)
    ):
        raise SystemExit("the sentence indices differ")
    if not np.array_equal(
        builders.compiled_sample_index(*sample), builders.reference_sample_index(*sample)
    ):
        raise SystemExit("the sample indices differ")
    tokens, total, total_reference = arguments.index_tokens / 1e6, 0.0, 0.0
    for name, builder, inputs in (
        ("sentence", "sentence_index", sentence),
        ("packing", "sample_index", sample),
    ):
        ours, theirs = take_turns(
            1 if builder == "sentence_index" else 9,
            lambda name=builder, inputs=inputs: getattr(builders, f"compiled_{name}")(*inputs),
            lambda name=builder, inputs=inputs: getattr(builders, f"reference_{name}")(*inputs),
        )
        row(table, f"{name} index, million tokens/s", tokens / ours, tokens / theirs, "")
        total, total_reference = total + ours, total_reference + theirs
    row(table, "both indices, million tokens/s", tokens / total, tokens / total_reference, "20")


def loader(arguments: Arguments, corpus: Path, tokenizer: Path, table: Table) -> None:
    """Compares the speed of the loader without workers with that of the quickstart model's training steps."""
    import torch

    from shardzoo.data import (
        GPTDataset,
        IndexedDataset,
        PrepareOptions,
        ResumableLoader,
        Share,
        prepare_dataset,
    )
    from shardzoo.models import from_config

    prefix = corpus.with_name("prepared")
    if not prefix.with_suffix(".idx").exists():
        prepare_dataset(corpus, prefix, PrepareOptions(tokenizer))
    config, batch_size = quickstart(), 4
    dataset = GPTDataset(IndexedDataset(prefix), config.n_positions)
    batches = iter(ResumableLoader(dataset, Share(batch_size)))
    torch.set_num_threads(arguments.threads)
    model = from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = next(batches)
    if not torch.equal(batch["input_ids"][1], dataset[1]["input_ids"]):
        raise SystemExit("the loader and the dataset return different samples")

    def load() -> None:
        for _ in range(20):
            next(batches)

    def train() -> None:
        for _ in range(5):
            model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    ours, theirs = take_turns(arguments.repeats, load, train)
    tokens = batch_size * config.n_positions
    row(
        table,
        "loader, thousand tokens/s",
        20 * tokens / ours / 1e3,
        5 * tokens / theirs / 1e3,
        "20",
    )


def quickstart():
    """Returns the configuration of the quickstart model, with the vocabulary of this benchmark's tokenizer."""
    from shardzoo.models.gpt2.presets import PRESETS

    return PRESETS["gpt2-quickstart"].with_changes(vocab_size=8192, bos_token_id=0, eos_token_id=0)


# VmHWM is the peak of the new program; ru_maxrss would include the size of this process, which started it.
PEAK = """
import sys
from pathlib import Path
from shardzoo.data import PrepareOptions, prepare_dataset
prepare_dataset(sys.argv[1], sys.argv[2], PrepareOptions(sys.argv[3]))
status = Path("/proc/self/status").read_text()
print(status.split("VmHWM:")[1].split()[0])
"""


def memory(arguments: Arguments, corpus: Path, tokenizer: Path, table: Table) -> None:
    """Compares the peak memory of preparing a corpus with that of preparing a quarter of it."""
    quarter = corpus.with_name("quarter.jsonl")
    with corpus.open("rb") as whole, quarter.open("wb") as part:
        while part.tell() < corpus.stat().st_size / 4:
            part.write(whole.readline())
    peaks = []
    for path in (corpus, quarter):
        command = [sys.executable, "-c", PEAK, str(path), str(path.with_suffix("")), str(tokenizer)]
        peaks.append(
            int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024
        )

    row(table, f"peak MiB for {corpus.stat().st_size / 1e6:.0f} MB of text", *peaks, "at most 1.5")


def row(table: Table, name: str, ours: float, theirs: float, wanted: str) -> None:
    table.add_row(name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}", wanted)


if __name__ == "__main__":
    raise SystemExit(main())
