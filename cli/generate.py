"""`shardzoo generate`: reads prompts from the command line, a file or standard input; prints JSON
lines or a stream.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..checkpoint.hub import TEXTS, find_model
from ..data.text.lines import begins_json_array, iter_json_records, iter_text_lines
from ..data.text.records import check_text
from ..data.text.sources import JSON_SUFFIXES
from ..data.tokenizers.glm_tokens import GLMVocabulary
from ..files.verbosity import is_quiet, take_verbosity
from ..files.working_copies import find_source
from ..models.generation.settings import GenerationSettings
from ..trainer.precisions import PrecisionName
from .arguments import parse, read_yaml
from .console import USAGE_ERROR, prints_utf8, run_and_report
from .help import HelpPage
from .parsing import list_fields
from .spellings import SHORT_NAMES

if TYPE_CHECKING:
    from ..generation.pipeline import TextGenerationPipeline
    from ..trainer.launch.rank_info import RankInfo

# A precision -> torch's name of the data type.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Settings that are probabilities, or parts of one.
SHARES = ("top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
SAMPLING = ("temperature", "top_k", *SHARES, "seed")


@dataclass(frozen=True)
class GenerateArguments(GenerationSettings):
    """The model, the prompts, and the settings of generation."""

    model: str = ""
    """A Hugging Face folder or a shardzoo folder, with its tokenizer, or org/name[@revision] on the
    Hub.
    """
    adapter: Path | None = None
    """A folder of peft with LoRA weights for the model, or its name on the Hub.

    They are merged into the model.
    """
    tokenizer: Path | None = None
    """A folder with the tokenizer that the model was trained with, or a name on the Hub; by default
    the model's.
    """
    prompt: tuple[str, ...] = ()
    """Prompts."""
    file: Path | None = None
    """A file with a prompt on each line, or JSON lines or a JSON array (.jsonl, .json) with a
    `prompt` or `text`. Without --file and --prompt, prompts are read from standard input."""
    model_parallel_size: int = 1
    """Tensor-parallel size; this command starts the processes."""
    pipeline_parallel_size: int = 1
    """Number of pipeline stages, each with equally many blocks; this command starts tp x pp x ep
    processes.
    """
    expert_parallel_size: int = 1
    """Number of processes that the experts of a mixture are dealt over."""
    stream: bool = False
    """Show text as it is generated, one prompt at a time, instead of JSON lines."""
    full_text: bool = True
    """Show the prompt before its continuation."""
    batch_size: int = 8
    """Prompts that are decoded together."""
    precision: PrecisionName | None = None
    """Precision of the weights; by default as stored."""
    glm_vocabulary: GLMVocabulary | None = None
    """Which vocabulary a GLM extends, if its size does not determine it."""
    config: Path | None = None
    """YAML file with values for these arguments; the command line takes precedence."""

    # Lists of lists cannot be written on a command line, but a YAML file can contain them.
    bad_words_ids: Annotated[Any, tyro.conf.Suppress] = None
    sequence_bias: Annotated[Any, tyro.conf.Suppress] = None
    watermarking_config: Annotated[Any, tyro.conf.Suppress] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in SHARES:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {value:g}")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be above 0, not {self.temperature:g}; without do_sample the "
                "most likely token is taken"
            )


HELP = HelpPage(
    "shardzoo generate",
    GenerateArguments,
    usage="--model FOLDER [--prompt TEXT ...] [options]",
    description="Continues prompts, or fills in their spans, masks and blanks. Prints JSON lines, or text as it comes.",
    required=("model",),
    sections={
        "prompt": "prompts and output",
        "model": "model",
        "adapter": "model",
        "model_parallel_size": "processes",
        "stream": "prompts and output",
        "batch_size": "processes",
        "precision": "model",
        "max_new_tokens": "length",
        "do_sample": "sampling and beams",
        "temperature": "sampling and beams",
        "repetition_penalty": "scores",
        "pad_token_id": "tokens",
        "config": "other",
    },
    common=(
        *(
            "prompt",
            "file",
            "stream",
            "full_text",
            "model_parallel_size",
            "pipeline_parallel_size",
            "expert_parallel_size",
            "batch_size",
            "precision",
            "adapter",
            "tokenizer",
        ),
        *("max_new_tokens", "min_new_tokens", "stop_strings", "do_sample", "seed", "num_beams"),
        *(
            "num_return_sequences",
            "temperature",
            "top_k",
            "top_p",
            "repetition_penalty",
            "no_repeat_ngram_size",
        ),
        "config",
    ),
    names=SHORT_NAMES,
)


def given_settings(arguments: GenerateArguments, argv: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that the command line or its YAML file names.

    The model's own file decides the others.
    """
    named = {
        word.partition("=")[0].lstrip("-").replace("-", "_")
        for word in argv
        if word.startswith("--")
    }
    if arguments.config is not None:
        named |= read_yaml(GenerateArguments, arguments.config).keys()
    settings = {field.name for field in fields(GenerationSettings)}
    return {
        name: getattr(arguments, name)
        for name in settings
        if name in named or f"no_{name}" in named
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 2 after a user's error, or the exit code of the process that
    failed first.
    """
    from .rank_errors import read_rank

    launch = read_rank()
    if launch is None:
        return USAGE_ERROR
    quiet = not launch.is_first
    return run_and_report(
        lambda: start(argv, launch, quiet), quiet=quiet, options=list_fields(GenerateArguments)
    )


def start(argv: Sequence[str] | None, launch: RankInfo, quiet: bool) -> int:
    from ..models import find_config, from_pretrained
    from ..models.auto import build_on_meta
    from ..models.blocks.attention import check_heads
    from ..models.blocks.moe import check_experts
    from ..models.pipeline import split_blocks_evenly
    from ..trainer.launch.launch import start_processes

    given = take_verbosity(sys.argv[1:] if argv is None else argv)
    arguments = parse(GenerateArguments, HELP, given, quiet=quiet)
    if not arguments.model:
        raise ValueError("--model is missing: name the folder of a model")
    if (
        min(
            arguments.model_parallel_size,
            arguments.pipeline_parallel_size,
            arguments.expert_parallel_size,
            arguments.batch_size,
        )
        < 1
    ):
        sizes = (
            f"--tp {arguments.model_parallel_size}, --pp {arguments.pipeline_parallel_size}, "
            f"--ep {arguments.expert_parallel_size} and --batch-size {arguments.batch_size}"
        )
        raise ValueError(f"{sizes} must be at least 1")
    arguments = replace(arguments, model=str(find_model(arguments.model, "--model")))
    if not Path(arguments.model).is_dir():
        raise ValueError(
            f"--model: {arguments.model} is not a folder, nor a name on the Hub: org/name[@revision]"
        )
    if arguments.adapter is not None:
        arguments = replace(arguments, adapter=find_model(arguments.adapter, "--adapter"))
    if arguments.tokenizer is not None:
        arguments = replace(
            arguments, tokenizer=find_model(arguments.tokenizer, "--tokenizer", TEXTS)
        )
    if arguments.adapter is not None and not (arguments.adapter / "adapter_config.json").is_file():
        raise ValueError(
            f"--adapter: {arguments.adapter} holds no adapter: it has no adapter_config.json"
        )
    if not all(arguments.prompt):
        raise ValueError("--prompt is empty: write a text, or lines on standard input")
    if arguments.prompt and arguments.file:
        raise ValueError("--prompt and --file are both given: use one of them")
    if not arguments.prompt and arguments.file is None and sys.stdin is None:
        raise ValueError("standard input is closed, and there is neither --prompt nor --file")
    if (Path(arguments.model) / "config.json").exists():
        config = find_config(arguments.model)
        check_heads(config.attention_heads, arguments.model_parallel_size)
        check_experts(config, arguments.expert_parallel_size)
        if arguments.pipeline_parallel_size > 1:
            split_blocks_evenly(
                build_on_meta(find_config(arguments.model), None), arguments.pipeline_parallel_size
            )
    processes = (
        arguments.model_parallel_size
        * arguments.pipeline_parallel_size
        * arguments.expert_parallel_size
    )
    if launch.world_size < processes:
        # Damaged files are refused before anything starts; on this device only headers are read.
        from_pretrained(arguments.model, device="meta")
        return start_processes(processes)
    if launch.world_size != processes:
        asked = f"--tp {arguments.model_parallel_size}"
        if arguments.pipeline_parallel_size > 1:
            asked += f" --pp {arguments.pipeline_parallel_size}"
        if arguments.expert_parallel_size > 1:
            asked += f" --ep {arguments.expert_parallel_size}"
        raise ValueError(f"{launch.world_size} processes were started for {asked}: make them equal")
    return run(arguments, given_settings(arguments, given), launch)


def run(arguments: GenerateArguments, settings: dict[str, Any], launch: RankInfo) -> int:
    """Generates texts for all prompts, batch after batch. Raises ValueError if there is none."""
    import torch

    from ..generation.pipeline import TextGenerationPipeline
    from ..mpu import ParallelMesh
    from ..trainer.launch.environment import initialize_distributed
    from ..trainer.launch.ranks import on_first_rank

    mesh = None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if launch.world_size > 1:
        device = initialize_distributed(launch)
        mesh = ParallelMesh(
            arguments.model_parallel_size,
            arguments.pipeline_parallel_size,
            expert_parallel_size=arguments.expert_parallel_size,
        )
    dtype = None
    if arguments.precision:
        dtype = getattr(torch, DTYPES[arguments.precision])
    pipeline = TextGenerationPipeline(
        arguments.model,
        mesh,
        dtype=dtype,
        device=device,
        batch_size=arguments.batch_size,
        glm_vocabulary=arguments.glm_vocabulary,
        tokenizer=arguments.tokenizer,
        adapter=arguments.adapter,
    )
    if launch.is_first and not is_quiet():
        tell_unused(pipeline, settings)
    # The first rank reads the prompts, and the others get each batch from it.
    prompts: Iterator[str] = iter(())
    if launch.is_first:
        prompts = read_prompts(arguments)
    batch_size = arguments.batch_size
    if arguments.stream or is_interactive(arguments):
        batch_size = 1
    count = 0
    try:
        while True:
            batch = on_first_rank(lambda: list(islice(prompts, batch_size)))
            if not batch:
                break
            count += len(batch)
            print_texts(pipeline, batch, arguments, settings, launch.is_first)
    finally:
        if mesh is not None:
            torch.distributed.destroy_process_group()
    if not count:
        raise ValueError("there is no prompt: pass --prompt, --file, or lines on standard input")
    return 0


def tell_unused(pipeline: TextGenerationPipeline, settings: dict[str, Any]) -> None:
    """Says which of the given settings change nothing, because tokens are not sampled."""
    from ..models.generation.generation_config import resolve_settings

    if resolve_settings(pipeline.model, None, dict(settings)).do_sample:
        return
    unused = [f"--{name.replace('_', '-')}" for name in SAMPLING if name in settings]
    if unused:
        verb = "changes" if len(unused) == 1 else "change"
        print(
            f"notice: {', '.join(unused)} {verb} nothing without --do-sample: the most likely "
            "tokens are taken",
            file=sys.stderr,
        )


def print_texts(
    pipeline: TextGenerationPipeline,
    batch: list[str],
    arguments: GenerateArguments,
    settings: dict[str, Any],
    is_first: bool,
) -> None:
    """Generates a text for each prompt of a batch, and prints it as a line of JSON, or as it is
    made.
    """
    if arguments.stream:
        from transformers import TextStreamer

        tokenizer: Any = pipeline.tokenizer
        if not pipeline.streams:
            raise ValueError(
                "--stream works only for continuations and answers, but this model fills blanks"
            )
        streamer = TextStreamer(
            tokenizer, skip_prompt=not arguments.full_text, skip_special_tokens=True
        )
        pipeline(batch, streamer=streamer, **settings)
        return
    for entry in pipeline(batch, return_full_text=arguments.full_text, **settings):
        if is_first:
            print(json.dumps(entry, ensure_ascii=not prints_utf8()), flush=True)


def is_interactive(arguments: GenerateArguments) -> bool:
    """Returns whether the prompts are typed on a terminal."""
    if arguments.prompt or arguments.file is not None:
        return False
    return sys.stdin is not None and sys.stdin.isatty()


def read_prompts(arguments: GenerateArguments) -> Iterator[str]:
    """Yields the prompts.

    Raises:
        ValueError: A prompt is not UTF-8, or the file is missing or has another format.
    """
    if arguments.prompt:
        for prompt in arguments.prompt:
            yield check_text(prompt, "--prompt (it must be UTF-8)")
    elif arguments.file is None:
        yield from read_standard_input()
    else:
        try:
            yield from read_file(find_source(arguments.file) or arguments.file)
        except (OSError, ValueError) as error:
            raise ValueError(f"--file: {arguments.file} is not readable: {error}") from None


def read_standard_input() -> Iterator[str]:
    """Yields the lines of standard input, as UTF-8 whatever the locale is."""
    lines: Any = getattr(sys.stdin, "buffer", None)
    if lines is None:  # Another program has put a text stream in its place.
        lines = (line.encode("utf-8", "surrogateescape") for line in sys.stdin)
    for _, prompt in iter_text_lines(lines, "standard input"):
        yield prompt


def read_file(path: Path) -> Iterator[str]:
    """Yields the prompts of a file: its lines, or the `prompt` or `text` of JSON records."""
    if path.suffix not in JSON_SUFFIXES:
        with path.open("rb") as lines:
            for _, prompt in iter_text_lines(lines, path):
                yield prompt
        return
    kind = "record" if begins_json_array(path) else "line"
    for number, record in iter_json_records(path):
        prompt = None
        if isinstance(record, dict):
            prompt = record.get("prompt", record.get("text"))
        if not isinstance(prompt, str):
            raise ValueError(f'{kind} {number} of {path} has no "prompt" and no "text"')
        yield check_text(prompt, f"the prompt in {kind} {number}")
