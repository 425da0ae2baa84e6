"""Tokens per second of decoding, native against transformers' `generate`, in one interleaved run.

    python benchmarks/generate.py --families gpt2 t5 --batches 1 8

All sides decode greedily with the same weights, prompts and threads; transformers with its dynamic and its static
cache. A side with other tokens is not timed: the program says so and fails. Ratios are of medians over rounds in
which all sides take turns. The size of the native cache is compared with its formula.
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

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages, for every side alike

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import shardzoo
from shardzoo.generation.decoders import Decoder

SIZES = {
    "gpt2": transformers.GPT2Config(n_layer=6, n_embd=384, n_head=6, vocab_size=8192, bos_token_id=0, eos_token_id=0),
    "t5": transformers.T5Config(
        num_layers=4, d_model=384, d_kv=64, num_heads=6, d_ff=1024, vocab_size=8192, decoder_start_token_id=0
    ),
}
CLASSES = {"gpt2": transformers.GPT2LMHeadModel, "t5": transformers.T5ForConditionalGeneration}


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    families: tuple[str, ...] = ("gpt2", "t5")
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 32
    """Tokens of each prompt."""
    new_tokens: int = 64
    rounds: int = 5
    threads: int = 0
    """0: what torch takes."""
    compiled: bool = False
    """Whether transformers' static cache is also measured compiled."""
    required: float = 0.0
    """Fail if native is not this many times as fast as the best of transformers."""
    json: Path | None = None
    """Where to write the figures."""


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = [measure(family, batch, arguments) for family in arguments.families for batch in arguments.batches]
    for result in results:
        show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": torch.get_num_threads(), "results": results}, indent=1))
    return int(any("error" in result or result["ratio"] < arguments.required for result in results))


def measure(family: str, batch: int, arguments: Arguments) -> dict:
    torch.manual_seed(0)
    reference = CLASSES[family](SIZES[family]).eval()
    reference.generation_config.eos_token_id = None  # all sides decode the same number of tokens
    reference.generation_config.pad_token_id = 0
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        native = shardzoo.from_pretrained(folder)
    ids = torch.randint(3, SIZES[family].vocab_size, (batch, arguments.prompt))
    length = {"max_new_tokens": arguments.new_tokens, "min_new_tokens": arguments.new_tokens}
    mask = torch.ones_like(ids)

    def by_transformers(**options) -> Callable[[], Tensor]:
        return lambda: reference.generate(ids, attention_mask=mask, do_sample=False, **length, **options)

    sides: dict[str, Callable[[], Tensor]] = {
        "native": lambda: native.generate(ids, mask, max_new_tokens=arguments.new_tokens, eos_token_id=[]),
        "hf dynamic": by_transformers(),
        "hf static": by_transformers(cache_implementation="static", disable_compile=True),
    }
    if arguments.compiled:
        sides["hf static compiled"] = compiled(reference, ids, mask, length)
    result = {"family": family, "batch": batch, "new_tokens": arguments.new_tokens}
    tokens = {name: side() for name, side in sides.items()}  # also warms up, and compiles
    wrong = [name for name, found in tokens.items() if not torch.equal(found, tokens["hf dynamic"])]
    if wrong:
        return result | {"error": f"{', '.join(wrong)} decoded other tokens than transformers with its dynamic cache"}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(value for name, value in medians.items() if name != "native")
    return result | {
        "tokens_per_second": {name: batch * arguments.new_tokens / value for name, value in medians.items()},
        "ratio": best / medians["native"],
        "cache": cache_sizes(family, native, sides["native"]),
    }


def compiled(reference, ids: Tensor, mask: Tensor, length: dict) -> Callable[[], Tensor]:
    options = transformers.generation.CompileConfig(fullgraph=False, mode="default", dynamic=False)
    options._compile_all_devices = True  # transformers compiles on a GPU only, unless told
    return lambda: reference.generate(
        ids, attention_mask=mask, do_sample=False, cache_implementation="static", compile_config=options, **length
    )


def cache_sizes(family: str, native, decode: Callable[[], Tensor]) -> dict[str, int]:
    """Bytes of the buffers that a call makes, and of the formula in docs/generation.md."""
    kept = []
    original = Decoder.__init__

    def remember(self, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        kept.append(self.cache)

    Decoder.__init__ = remember
    try:
        found = decode()
    finally:
        Decoder.__init__ = original
    rows, config = len(found), SIZES[family]
    positions = found.shape[1] - 1
    if family == "gpt2":
        formula = 2 * config.n_layer * rows * config.n_embd * positions * 4
    else:
        source = kept[0].sources[0].length
        formula = 2 * config.num_layers * rows * config.num_heads * config.d_kv * (positions + source) * 4
    return {"bytes": kept[0].nbytes, "formula": formula}


def show(result: dict) -> None:
    console = Console()
    title = f"{result['family']}, batch {result['batch']}"
    if "error" in result:
        console.print(f"[red]{title}: {result['error']}[/red]")
        return
    table = Table(title=title, caption=f"native / best of transformers: {result['ratio']:.2f}; cache {result['cache']}")
    table.add_column("side")
    table.add_column("tokens/s", justify="right")
    for name, rate in result["tokens_per_second"].items():
        table.add_row(name, f"{rate:,.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
