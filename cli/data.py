"""Implements `shardzoo data`: prepares, merges, splits and inspects corpora, and trains tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..checkpoint.hub import TEXTS, find_model
from ..data.indexed.dataset import IndexedDataset
from ..data.indexed.merge import merge_datasets, split_dataset
from ..data.text.corpus import check_vocabulary
from ..data.text.documents import Documents, SourceReport, fail_on_bad, skip_bad
from ..data.text.encoding import find_end_token
from ..data.text.entropy import token_counts
from ..data.text.prepare import PrepareOptions, PrepareProgress, PrepareReport, prepare_dataset
from ..data.text.sources import Source
from ..data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from ..data.tokenizers.training import TokenizerKind, train_tokenizer
from ..files.object_store import find_url
from ..files.verbosity import is_quiet
from ..files.working_copies import name_urls
from ..trainer.logging.console import make_console
from .arguments import given_value, read_yaml
from .console import run_and_report
from .help import HelpPage, show_commands
from .parsing import list_fields, parse_words, refuse_unknown_command


@dataclass(frozen=True, kw_only=True)
class Configurable:
    """What all commands of this file take."""

    config: Path | None = None
    """YAML file with values for these arguments; the command line takes precedence."""


@dataclass(frozen=True)
class Prepare(Configurable):
    """Tokenize text into PREFIX.bin and PREFIX.idx.

    An interrupted run continues when it is started again.
    """

    output: Path
    """PREFIX of the files to write."""
    tokenizer: Path
    """tokenizer.json, SentencePiece .model, a folder with one of them, or a name on the Hub."""
    input: tuple[Path, ...] = ()
    """Text file, JSON lines, parquet, a folder of those, or a Hugging Face dataset folder; by
    default the Python standard library."""
    workers: int = 1
    """Number of processes."""
    text_key: str = "text"
    """Key or column of the text."""
    append_eos: bool = True
    """End every document with the end-of-text token."""
    eos_token: str | None = None
    """The end-of-text token; by default the tokenizer's."""
    split_sentences: bool = False
    """Write one sequence per sentence, for sentence pairs."""
    on_bad_record: Literal["skip", "fail"] = "skip"
    """What to do with records that hold no text."""
    resume: bool = True
    """Continue an interrupted run."""
    overwrite: bool = False
    """Replace finished files, which were made from other text or with other settings."""

    def run(self, console: Console) -> None:
        tokenizer = find_model(self.tokenizer, "--tokenizer", TEXTS)
        options = PrepareOptions(
            tokenizer, self.text_key, self.append_eos, self.eos_token, self.split_sentences
        )
        with show_progress(console) as progress:
            report = prepare_dataset(
                choose_source(self.input),
                self.output,
                options,
                workers=self.workers,
                on_bad=fail_on_bad if self.on_bad_record == "fail" else skip_bad,
                resume=self.resume,
                overwrite=self.overwrite,
                progress=progress,
            )
        _print_report(console, report)


@dataclass(frozen=True)
class Merge(Configurable):
    """Concatenate the documents of several datasets."""

    inputs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """PREFIX of each dataset."""
    output: Path
    """PREFIX of the files to write."""

    def run(self, console: Console) -> None:
        merge_datasets(self.inputs, self.output)
        console.print(name_urls(repr(IndexedDataset(self.output))))


@dataclass(frozen=True)
class Inspect(Configurable):
    """Check a dataset, and show what it holds."""

    prefix: Annotated[Path, tyro.conf.Positional]
    """PREFIX of the files."""
    tokenizer: Path | None = None
    """Tokenizer with which to show the beginning of the first documents; it must be the dataset's.
    """
    documents: int = 3
    """Number of documents to show."""

    def run(self, console: Console) -> None:
        dataset = IndexedDataset(self.prefix)
        if self.tokenizer is None:
            console.print(build_table(dataset, None))
            return
        tokenizer = load_tokenizer(find_model(self.tokenizer, "--tokenizer", TEXTS))
        check_vocabulary(dataset, tokenizer)
        console.print(build_table(dataset, tokenizer))
        for number in range(min(self.documents, dataset.num_documents)):
            text = tokenizer.decode(dataset.document(number)[:64].tolist())
            console.print(f"[bold]document {number}[/bold]", highlight=False)
            console.print(text, markup=False, highlight=False)


@dataclass(frozen=True)
class Split(Configurable):
    """Split a dataset by document into PREFIX_train, PREFIX_valid and PREFIX_test."""

    prefix: Annotated[Path, tyro.conf.Positional]
    """PREFIX of the files."""
    output: Path
    """PREFIX of the files to write."""
    shares: tuple[float, float, float] = (0.9, 0.05, 0.05)
    """Shares of train, valid and test. They must add up to 1; 0 leaves a part out."""
    seed: int = 1234
    """Seed of the random choice of documents."""

    def run(self, console: Console) -> None:
        names = (Path(f"{self.output}_{part}") for part in ("train", "valid", "test"))
        shares = {name: share for name, share in zip(names, self.shares, strict=True) if share != 0}
        counts = split_dataset(IndexedDataset(self.prefix), shares, seed=self.seed)
        for name, count in counts.items():
            console.print(f"{find_url(name) or name}: {count} documents")


@dataclass(frozen=True)
class TrainTokenizer(Configurable):
    """Train a tokenizer: byte-level BPE, SentencePiece unigram (T5's) or WordPiece (BERT's)."""

    output: Path
    """Folder to write; transformers' AutoTokenizer can load it."""
    input: tuple[Path, ...] = field(default=())
    """Texts, as for `prepare`."""
    kind: TokenizerKind = "bpe"
    """Kind of tokenizer; roberta and glm are byte-level BPEs with the special tokens of those
    models.
    """
    vocab_size: int = 32000
    """Number of entries."""
    text_key: str = "text"
    """Key or column of the text."""

    def run(self, console: Console) -> None:
        documents = Documents(choose_source(self.input), self.text_key)
        tokenizer = train_tokenizer(self.kind, documents, self.vocab_size, self.output)
        count = documents.report.documents
        entries = f"{tokenizer.vocab_size} entries"
        if tokenizer.vocab_size < self.vocab_size:
            entries += f" (not {self.vocab_size}: the texts have no more)"
        console.print(
            f"{find_url(self.output) or self.output}: {entries} from {count} documents",
            soft_wrap=True,
        )
        _print_bad(console, documents.report)


Command = (
    Annotated[Prepare, tyro.conf.subcommand("prepare")]
    | Annotated[Merge, tyro.conf.subcommand("merge")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Split, tyro.conf.subcommand("split")]
    | Annotated[TrainTokenizer, tyro.conf.subcommand("train-tokenizer")]
)

PREPARE = {"input": "text", "workers": "run", "text_key": "text", "resume": "run"}
HELP = {
    "prepare": HelpPage("shardzoo data prepare", Prepare, sections=PREPARE),
    "merge": HelpPage("shardzoo data merge", Merge),
    "inspect": HelpPage("shardzoo data inspect", Inspect),
    "split": HelpPage("shardzoo data split", Split),
    "train-tokenizer": HelpPage("shardzoo data train-tokenizer", TrainTokenizer),
}


def main(argv: list[str]) -> int:
    """Runs `shardzoo data …`. Returns 0, or 2 after a user's error and one line on stderr."""
    show_commands("shardzoo data", "Prepares corpora and tokenizers.", HELP, argv)
    refuse_unknown_command("shardzoo data", HELP, argv)

    def work() -> int:
        command_type: Any = Command  # Any for type checkers; tyro itself accepts a Union
        command = parse_words(command_type, add_config(argv), "shardzoo data")
        is_answer = isinstance(command, Inspect)
        try:
            command.run(make_console(quiet=is_quiet() and not is_answer))
        except RuntimeError as error:  # of a library that reads or trains
            raise ValueError(str(error)) from error
        return 0

    return run_and_report(work, options=list_fields(HELP[argv[0]].arguments))


def add_config(argv: list[str]) -> list[str]:
    """Returns a command line in which the values of the YAML file that `--config` names come before
    those that are given, which therefore count.

    Raises:
        ValueError: The file cannot be used.
    """
    config = given_value(argv, "config")
    if config is None or not argv or argv[0] not in HELP:
        return argv
    kind = HELP[argv[0]].arguments
    positional: list[str] = []
    options: list[str] = []
    for name, value in read_yaml(kind, Path(config)).items():
        words = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        option = f"--{name.replace('_', '-')}"
        if name in ("inputs", "prefix"):
            positional = words
        elif isinstance(value, bool):
            options.append(option if value else option.replace("--", "--no-", 1))
        elif value is not None:
            options += [option, *words]
    given = argv[1:]
    if given and not given[0].startswith("--"):
        positional = []
    return [argv[0], *positional, *options, *given]


def choose_source(inputs: tuple[Path, ...]) -> Source:
    """Returns the source of texts that a command line names: none, one or several paths."""
    if not inputs:
        return None
    if len(inputs) == 1:
        return inputs[0]
    return list(inputs)


def _print_report(console: Console, report: PrepareReport) -> None:
    line = (
        f"{report.documents} documents, {report.tokens} tokens, {report.bytes / 1e6:.1f} MB in "
        f"{report.seconds:.1f} s "
        f"({report.documents_per_second:.0f} documents/s, {report.megabytes_per_second:.1f} MB/s)"
    )
    if report.resumed_chunks:
        line += f"; {report.resumed_chunks} chunks already existed"
    console.print(line, soft_wrap=True)
    if report.is_repeated:
        console.print(
            "the same files existed already, from the same text with the same settings, and were "
            "made again",
            soft_wrap=True,
        )
    _print_bad(console, report)


def _print_bad(console: Console, report: SourceReport) -> None:
    if report.empty:
        console.print(f"empty documents left out: {report.empty}")
    if report.bad:
        console.print(f"bad records skipped: {report.bad}; the first:")
        for line in report.first_bad:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def build_table(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Table:
    """Returns a table of what a dataset holds."""
    lengths = dataset.document_lengths()
    meta = dataset.meta
    ids, _ = token_counts(dataset)
    vocabulary = "not recorded"
    if meta is not None:
        vocabulary = f"{meta.vocabulary.size} tokens, sha256 {meta.vocabulary.sha256}"
    rows = {
        "documents": str(dataset.num_documents),
        "sequences": str(len(dataset)),
        "tokens": str(dataset.num_tokens),
        "token type": str(dataset.dtype),
        "largest token id": str(ids[-1] if len(ids) else "-"),
        "distinct tokens": str(len(ids)),
        "vocabulary": vocabulary,
    }
    if len(lengths):
        rows["tokens per document"] = (
            f"{lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}"
        )
    end = None
    if meta is not None:
        end = meta.end_token
    elif tokenizer is not None:
        end = find_end_token(tokenizer, split_sentences=False)
    if end is not None:
        last = dataset.last_tokens()
        rows["documents that end with"] = f"token {end}: {(last == end).sum()} of {len(last)}"
    table = Table(title=str(dataset.prefix), show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


@contextmanager
def show_progress(console: Console) -> Iterator[PrepareProgress]:
    """Shows a progress bar on the console; yields the callback for `prepare_dataset`."""
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, rates="")

        def show(report: PrepareReport, done: int, total: int) -> None:
            rates = (
                f"{report.documents_per_second:.0f} documents/s "
                f"{report.megabytes_per_second:.1f} MB/s"
            )
            bar.update(task, completed=done, total=total, rates=rates)

        yield show
