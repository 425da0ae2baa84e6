"""Compares the tokens per second of native decoding with those of transformers' `generate`, in one run.

    python benchmarks/generate.py --models gpt2 t5-small --batches 1 8

All sides decode greedily with the same weights, prompts and threads. transformers decodes with its dynamic and with its
static cache, and with the compiled static cache if `--compiled` is given. If a side decodes other tokens, no side is
timed and the program fails; they are compared in fp32, also if another type is timed. In each round every side runs
once; ratios are those of the medians over all rounds.

A step must read the weights and the cache at least once. The table shows which share of that bound each side reaches,
with the memory bandwidth as the fastest of several reads. The size of the native cache is compared with its formula.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for all sides

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import shardzoo
import shardzoo.ops
from shardzoo.cli.bench import find_processor
from shardzoo.models.generation.decoders import Decoder

SIZES = {  # as published
    "gpt2": transformers.GPT2Config(),
    "t5-small": transformers.T5Config(decoder_start_token_id=0),
    "t5-base": transformers.T5Config(
        num_layers=12, d_model=768, num_heads=12, d_ff=3072, decoder_start_token_id=0
    ),
}

TINY = {  # which show that everything runs
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64},
    "t5-small": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "vocab_size": 99,
    },
    "t5-base": {
        "d_model": 48,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 3,
        "num_decoder_layers": 3,
        "vocab_size": 99,
    },
}

Side = Callable[[int], Tensor]  # from the number of new tokens to the sequences


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    models: tuple[str, ...] = ("gpt2", "t5-small")
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 32
    """Tokens of each prompt."""
    new_tokens: int = 64
    rounds: int = 5
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type that is timed."""
    tiny: bool = False
    """Models of a few thousand parameters."""
    threads: int = 0
    """Threads of torch; 0 for torch's default."""
    compiled: bool = False
    """Whether to measure transformers' compiled static cache too."""
    required: float = 0.0
    """Fail if native is not this many times as fast as the best of transformers."""
    json: Path | None = None
    """File to add the figures to; they replace those of the same models, types and batch sizes."""


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sizes = [(name, batch) for name in arguments.models for batch in arguments.batches]
    results = []
    for name, batch in sizes:
        results.append(measure(name, batch, arguments))
        show(results[-1])
        if arguments.json:
            record(arguments.json, results, arguments.device)
    return int(any("error" in result or result["ratio"] < arguments.required for result in results))


def measure(name: str, batch: int, arguments: Arguments) -> dict:
    torch.manual_seed(0)
    config = (
        type(SIZES[name])(**SIZES[name].to_diff_dict() | TINY[name])
        if arguments.tiny
        else SIZES[name]
    )
    reference = (
        transformers.GPT2LMHeadModel if name == "gpt2" else transformers.T5ForConditionalGeneration
    )(config)
    reference.eval()
    reference.generation_config.eos_token_id = None  # all sides decode the same number of tokens
    reference.generation_config.pad_token_id = 0
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        native = shardzoo.from_pretrained(folder).to(arguments.device)
    reference.to(arguments.device)
    ids = torch.randint(3, config.vocab_size, (batch, arguments.prompt)).to(arguments.device)
    mask = torch.ones_like(ids)

    def by_transformers(**options) -> Side:
        def decode(count: int) -> Tensor:
            length = {"max_new_tokens": count, "min_new_tokens": count}
            return reference.generate(
                ids, attention_mask=mask, do_sample=False, **length, **options
            )

        return decode

    sides: dict[str, Side] = {
        "native": lambda count: native.generate(ids, mask, max_new_tokens=count, eos_token_id=[]),
        "hf dynamic": by_transformers(),
        "hf static": by_transformers(cache_implementation="static", disable_compile=True),
    }
    result = {
        "model": name,
        "dtype": arguments.dtype,
        "batch": batch,
        "prompt": arguments.prompt,
        "new_tokens": arguments.new_tokens,
    }
    if arguments.compiled:
        sides["hf static compiled"] = by_transformers(
            cache_implementation="static", compile_config=compilation()
        )
    tokens, first_call = {}, {}
    for side, decode in sides.items():  # also warms up, and compiles
        started = time.perf_counter()
        tokens[side] = decode(arguments.new_tokens)
        first_call[side] = time.perf_counter() - started
        decode(1)
    wrong = [side for side, found in tokens.items() if not torch.equal(found, tokens["hf dynamic"])]
    if wrong:
        return result | {
            "error": f"{', '.join(wrong)} and transformers with its dynamic cache decoded other tokens"
        }
    for model in (reference, native):
        model.to(dtype=getattr(torch, arguments.dtype))
    for decode in sides.values():
        decode(2)
    counts = (arguments.new_tokens, 1)
    whole, prompt = (
        take_turns(sides, count, arguments.rounds, arguments.device) for count in counts
    )
    best = min(seconds for side, seconds in whole.items() if side != "native")
    cache = cache_sizes(
        config, sides["native"], arguments.new_tokens, getattr(torch, arguments.dtype).itemsize
    )
    least = bytes_of_a_step(native, cache["formula"], arguments) / read_bandwidth(arguments.device)
    return result | {
        "tokens_per_second": {
            side: batch * arguments.new_tokens / seconds for side, seconds in whole.items()
        },
        "first_token_ms": {side: 1000 * seconds for side, seconds in prompt.items()},
        "step_ms": {
            side: 1000 * (whole[side] - prompt[side]) / (arguments.new_tokens - 1) for side in sides
        },
        "least_step_ms": 1000 * least,
        "first_call_s": first_call,
        "ratio": best / whole["native"],
        "cache": cache,
    }


def take_turns(sides: dict[str, Side], count: int, rounds: int, device: str) -> dict[str, float]:
    """Runs the sides alternately and returns the median seconds of each for `count` new tokens."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, decode in sides.items():
            wait_for(device)
            started = time.perf_counter()
            decode(count)
            wait_for(device)
            seconds[side].append(time.perf_counter() - started)
    return {side: statistics.median(values) for side, values in seconds.items()}


def wait_for(device: str) -> None:
    """Waits until the device has done all that is queued."""
    if device == "cuda":
        torch.cuda.synchronize()


def compilation() -> transformers.CompileConfig:
    options = transformers.CompileConfig(fullgraph=False, mode="default", dynamic=False)
    options._compile_all_devices = True  # by default transformers compiles only on a GPU
    return options


def bytes_of_a_step(native, cache: int, arguments: Arguments) -> float:
    """Returns the bytes that a step must read: the weights of the blocks and the head, and the filled cache.

    Half of the new tokens are in the cache on average.
    """
    blocks = native.decoder.blocks if hasattr(native, "decoder") else native.blocks
    kept = {
        id(block.cross_attention.key_value.weight)
        for block in blocks
        if hasattr(block, "cross_attention")
    }
    weights = {id(weight): weight for weight in [*blocks.parameters(), *native.head.parameters()]}
    read = sum(weight.nbytes for key, weight in weights.items() if key not in kept)
    length = arguments.prompt + arguments.new_tokens
    return read + cache * (arguments.prompt + arguments.new_tokens / 2) / length


def read_bandwidth(device: str) -> float:
    """Returns the bytes per second of the fastest of several ways to read 512 MiB (2 GiB of a GPU) in fp32."""
    data, vector = (
        torch.ones(2**14 if device == "cuda" else 2**12, 2**15, device=device),
        torch.ones(2**15),
    )
    vector = vector.to(device)
    with torch.inference_mode():
        reads = {
            "sum": data.sum,
            "max": data.max,
            "product": lambda: shardzoo.ops.linear(vector, data),
        }
        sides: dict[str, Side] = {name: lambda _, f=f: f() for name, f in reads.items()}
        return data.nbytes / min(take_turns(sides, 0, 7, device).values())


def cache_sizes(config, decode: Side, count: int, itemsize: int) -> dict[str, int]:
    """Returns the bytes of the cache that a call allocates, and those of the formula in docs/generation.md."""
    kept = []
    original = Decoder.__init__

    def remember(self, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        kept.append(self.cache)

    Decoder.__init__ = remember
    try:
        found = decode(count)
    finally:
        Decoder.__init__ = original
    (rows, length), source = found.shape, 0
    if isinstance(config, transformers.T5Config):
        layers, inner, source = (
            config.num_layers,
            config.num_heads * config.d_kv,
            kept[0].sources[0].length,
        )
    else:
        layers, inner = config.n_layer, config.n_embd
    return {
        "bytes": kept[0].nbytes,
        "formula": 2 * layers * rows * inner * (length - 1 + source) * itemsize,
    }


def record(path: Path, results: list[dict], device: str) -> None:
    environment = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "processor": torch.cuda.get_device_name() if device == "cuda" else find_processor(),
        "load": f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores",
    }
    known = json.loads(path.read_text())["results"] if path.exists() else []
    done = {(result["model"], result["dtype"], result["batch"]) for result in results}
    known = [
        one
        for one in known
        if (one["model"], one.get("dtype", "float32"), one["batch"]) not in done
    ]
    path.write_text(
        json.dumps({"environment": environment, "results": [*known, *results]}, indent=1) + "\n"
    )


def show(result: dict) -> None:
    console = Console()
    title = f"{result['model']}, batch {result['batch']}, {result['prompt']} + {result['new_tokens']} tokens"
    if "error" in result:
        console.print(f"[red]{title}: {result['error']}[/red]")
        return
    table = Table(
        title=title,
        caption=f"native / best of transformers: {result['ratio']:.2f}; cache {result['cache']}",
    )
    table.add_column("side")
    for heading in ("tokens/s", "first token ms", "step ms", "of reading once", "first call s"):
        table.add_column(heading, justify="right")
    for side, rate in result["tokens_per_second"].items():
        first, step = result["first_token_ms"][side], result["step_ms"][side]
        share, call = result["least_step_ms"] / step, result["first_call_s"][side]
        table.add_row(
            side, f"{rate:,.1f}", f"{first:.1f}", f"{step:.2f}", f"{share:.0%}", f"{call:.1f}"
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
