"""Compares the tokens per second of native training steps with those of transformers, in one run.

    python benchmarks/train_step.py --families gpt2 t5 --dtypes float32 bfloat16

All variants have the same weights, batch, type and threads. transformers runs with eager attention, with SDPA
attention, and compiled, and steps with PyTorch's fused AdamW and clipping; native runs uncompiled, and with each block
compiled, and steps with its trainer's AdamW, which clips. If the loss or the gradient norm of a variant is wrong, the
program prints no times and fails. The variants run alternately, and ratios are those of their medians.

    python benchmarks/train_step.py --model-parallel-size 2

splits the models over ranks of one thread each instead. In fp32 it compares native's steps with those of DeepSpeed's
AutoTP over transformers' models, eager and with SDPA, as benchmarks/communication.py does for two models.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Huge pages speed up memory-bound work on a CPU, for all variants. torch reads this when it creates the first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

import shardzoo
from shardzoo.cli.bench import describe_environment
from shardzoo.models import find_config
from shardzoo.models.config import ModelConfig
from shardzoo.mpu import ParallelMesh, dropout_state
from shardzoo.trainer.optimizers.adamw import AdamW, clip_gradients

SIZES = {
    "llama": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "gpt2": {"n_layer": 4},
    "bert": {"num_hidden_layers": 4},
    "modernbert": {"num_hidden_layers": 4, "layer_types": None},
    "t5": {"d_model": 768, "d_ff": 3072, "num_layers": 3, "num_heads": 12},
    "mt5": {"num_layers": 3, "vocab_size": 32128},
}
PRESETS = {
    "llama": "llama-3.2-1b",
    "gpt2": "gpt2",
    "bert": "bert-base-uncased",
    "modernbert": "modernbert-base",
    "t5": "t5-small",
    "mt5": "mt5-small",
}
DROPOUTS = {
    "llama": ("attention_dropout",),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "modernbert": ("attention_dropout", "mlp_dropout", "embedding_dropout"),
    "t5": ("dropout_rate",),
    "mt5": ("dropout_rate",),
}
WITHOUT_AUTOTP = (
    "gpt2",
    "modernbert",
)  # DeepSpeed 0.19 refuses the first, and splits the other's gates wrongly
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
PARTS = {  # part of a step -> what the names of its torch operators contain
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "matrix_product", "grouped_"),
    "attention": ("attention", "scaled_dot_product", "masked_softmax"),
    "norms": ("layer_norm", "rms_norm"),
    "activations": ("gelu", "glu", "aten::clamp_min", "threshold"),
    "loss": ("cross_entropy",),
    "optimizer and clipping": ("adamw", "square_sum", "linalg_vector_norm", "aten::mul_"),
}
NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    families: tuple[str, ...] = ("gpt2", "bert", "modernbert", "t5", "mt5")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batch_size: int = 4
    length: int = 256
    """Tokens of an input; an encoder-decoder's targets have a quarter as many."""
    padding: bool = True
    """Whether the last quarter of the tokens is padding in half of the samples."""
    dropout: float = 0.0
    rounds: int = 7
    threads: int = 0
    """Threads of torch; 0 for torch's default."""
    model_parallel_size: int = 1
    """More than 1: compare one process with so many ranks on this machine's CPU, and with AutoTP."""
    device: Literal["cpu", "cuda"] = "cpu"
    clock: Literal["wall", "cpu"] = "wall"
    """"cpu" measures this process's CPU time; with `--threads 1` it is the only stable figure on a busy machine."""
    compiled: bool = True
    """Whether to measure the compiled variants too."""
    required: float = 0.0
    """Fail if native is not this many times as fast as the best of transformers."""
    json: Path | None = None
    """Where to write the figures."""
    overrides: dict[str, int] = field(default_factory=dict)
    """Changed configuration values of the measured models, e.g. `--overrides num_layers 6`."""


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.model_parallel_size > 1:
        ignored = {"device": "cpu", "clock": "wall", "threads": 0, "required": 0.0, "json": None}
        given = [
            f"--{name}" for name, default in ignored.items() if getattr(arguments, name) != default
        ]
        if given:
            raise SystemExit(
                f"--model-parallel-size times ranks of one thread each on this CPU: leave {given[0]} out"
            )
        from communication import run  # which makes DeepSpeed use the CPU

        for family, dtype in itertools.product(arguments.families, arguments.dtypes):
            run(arguments.model_parallel_size, measure_ranks, family, dtype, arguments)
        return 0
    facts = describe_environment(arguments.device) | {"transformers": transformers.__version__}
    results, wrong = [], False
    for family in arguments.families:
        for dtype in arguments.dtypes:
            result = measure(family, dtype, arguments)
            wrong |= "error" in result or result["ratio"] < arguments.required
            results.append(result)
            show(result)
            if (
                arguments.json
            ):  # after each measurement, so that an interrupted run keeps the earlier ones
                report = {"environment": facts, "results": results}
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(wrong)


def measure(family: str, dtype: str, arguments: Arguments) -> dict:
    """Checks all variants of one family in one type, then times them alternately."""
    reference = make_reference(family, arguments)
    cpu_batch = make_batch(family, reference.config, arguments)
    batch = {name: value.to(arguments.device) for name, value in cpu_batch.items()}
    tokens = sum(
        int(batch[name].numel())
        for name in ("input_ids", *(["labels"] if family in ("t5", "mt5") else []))
    )
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        variants = make_variants(folder, type(reference), getattr(torch, dtype), arguments)
    result = {"family": family, "dtype": dtype, "tokens": tokens, "parameters": count(reference)}
    steps, facts = {}, {}
    for name, model in variants.items():
        facts[name] = loss_and_norm(model, batch)  # also compiles
        steps[name] = make_step(model, batch)
        steps[name]()
    problems = [
        f"{name}: loss {loss:.6f}, gradient norm {norm:.5f}; transformers {facts['hf eager'][0]:.6f}, "
        f"{facts['hf eager'][1]:.5f}"
        for name, (loss, norm) in facts.items()
        if abs(loss / facts["hf eager"][0] - 1) > LOSS_TOLERANCE[dtype]
        or abs(norm / facts["hf eager"][1] - 1) > NORM_TOLERANCE[dtype]
    ]
    if problems and not arguments.dropout:
        return result | {"error": "; ".join(problems)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    rates = []
    now = time.perf_counter if arguments.clock == "wall" else time.process_time
    for _ in range(arguments.rounds):
        rates.append(gemm_rate(getattr(torch, dtype), now, arguments.device))
        for name, step in steps.items():
            start = now()
            step()
            seconds[name].append(now() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rivals = {name: value for name, value in medians.items() if name.startswith("hf")}
    own = {name: value for name, value in medians.items() if not name.startswith("hf")}
    best, rival = min(own, key=own.__getitem__), min(rivals, key=rivals.__getitem__)
    return result | {
        "seconds": medians,
        "spread": {name: (min(values), max(values)) for name, values in seconds.items()},
        "ratio": rivals[rival] / own[best],
        "plain_ratio": min(rivals[name] for name in rivals if "compiled" not in name)
        / medians["native"],
        "gemm_gflops": statistics.median(rates) / 1e9,
        "gemm_seconds": step_flops(variants["native"], batch) / statistics.median(rates),
        "best_native": own[best],
        "best_rival": rivals[rival],
        "parts": time_parts(steps["native"], arguments.device),
    }


def measure_ranks(mesh: ParallelMesh, family: str, dtype: str, arguments: Arguments) -> None:
    """Times steps of the split model on one of the ranks, beside one process's and AutoTP's."""
    from communication import compare_steps

    reference = make_reference(family, arguments)
    batch = make_batch(family, reference.config, arguments)
    tolerance = (
        float("inf") if arguments.dropout else LOSS_TOLERANCE[dtype]
    )  # masks of dropout differ
    autotp = dtype == "float32" and family not in WITHOUT_AUTOTP
    kind = getattr(torch, dtype)
    compare_steps(
        mesh, f"{family} {dtype}", reference, batch, kind, arguments.rounds, tolerance, autotp
    )


def make_reference(family: str, arguments: Arguments) -> nn.Module:
    values = find_config(PRESETS[family]).to_dict() | SIZES[family] | arguments.overrides
    values |= dict.fromkeys(DROPOUTS[family], arguments.dropout)
    config = transformers.AutoConfig.for_model(**values)
    masked = transformers.AutoModelForMaskedLM
    causal = transformers.AutoModelForCausalLM
    kind = {"gpt2": causal, "llama": causal, "bert": masked, "modernbert": masked}
    torch.manual_seed(0)
    model = kind.get(family, transformers.AutoModelForSeq2SeqLM).from_config(config)
    if family == "mt5":
        model.lm_head.weight = nn.Parameter(
            torch.randn_like(model.lm_head.weight) * config.d_model**-0.5
        )
    return model


def make_batch(family: str, config, arguments: Arguments) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.batch_size, arguments.length)
    ids = torch.randint(5, config.vocab_size, shape, generator=generator)
    if family in ("gpt2", "llama"):
        return {"input_ids": ids, "labels": ids}  # packed
    mask = torch.ones(shape, dtype=torch.long)
    if arguments.padding:
        mask[arguments.batch_size // 2 :, -arguments.length // 4 :] = 0
    if family in ("bert", "modernbert"):
        labels = ids.masked_fill(torch.rand(shape, generator=generator) > 0.15, -100)
    else:
        labels = torch.randint(5, config.vocab_size, (shape[0], shape[1] // 4), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_variants(
    folder: str, kind: type, dtype: torch.dtype, arguments: Arguments
) -> dict[str, nn.Module]:
    def rival(attention: str) -> nn.Module:
        model = kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        return model.to(arguments.device, dtype).train()  # T5's wo stays in fp32 otherwise

    variants = {
        "hf eager": rival("eager"),
        "hf sdpa": rival("sdpa"),
        "native": shardzoo.from_pretrained(folder, dtype=dtype).to(arguments.device).train(),
    }
    if arguments.compiled:
        compiled = rival("sdpa")
        compiled.forward = torch.compile(compiled.forward)
        own = shardzoo.from_pretrained(folder, dtype=dtype).to(arguments.device).train()
        for name, module in own.named_modules():
            if name.rpartition(".")[0].endswith("blocks"):
                module.compile()
        variants |= {"hf compiled": compiled, "native, compiled blocks": own}
    return variants


def loss_and_norm(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Returns the loss and its gradients' norm, summed in fp64: PyTorch's sum in fp32 is off by 1.7e-4 for GPT-2."""
    dropout_state.set(1, 0)
    loss = model(**batch).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    model.zero_grad(set_to_none=True)
    return loss.item(), squares**0.5


def make_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Returns a function that runs a training step to its end."""
    native = isinstance(getattr(model, "config", None), ModelConfig)
    parameters = list(model.parameters())
    optimizer = (AdamW if native else torch.optim.AdamW)(parameters, lr=0.0, fused=True)

    def step() -> None:
        dropout_state.set(1, 0)
        loss = model(**batch).loss
        loss.backward()
        norm = (
            clip_gradients(parameters, 1.0, optimizer)
            if native
            else nn.utils.clip_grad_norm_(parameters, 1.0)
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        norm.item()  # waits for the device

    return step


def time_parts(step: Callable[[], object], device: str) -> dict[str, float]:
    """Returns the share of each of `PARTS` and of the rest in the time of one step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    shares = dict.fromkeys([*PARTS, "rest"], 0.0)
    for event in profiler.key_averages():
        part = (part for part, names in PARTS.items() if any(name in event.key for name in names))
        shares[next(part, "rest")] += (
            event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        )
    return {part: value / sum(shares.values()) for part, value in shares.items()}


def gemm_rate(dtype: torch.dtype, now: Callable[[], float], device: str) -> float:
    """Returns the floating-point operations per second of a large matrix product, measured on this machine now."""
    size = 8192 if device == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if device == "cuda":
        torch.mm(a, b)[0, 0].item()  # the first product initializes the library
    start = now()
    torch.mm(a, b)[0, 0].item()  # waits for the device
    return 2 * size**3 / (now() - start)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def step_flops(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Returns the multiplications and additions in the matrix products of a step, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    dropout_state.set(1, 0)
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    return float(counter.get_total_flops())


def show(result: dict) -> None:
    console = Console()
    parameters = f"{result['parameters'] / 1e6:.0f}M parameters"
    title = f"{result['family']} {result['dtype']}, {parameters}, {result['tokens']} tokens"
    if "error" in result:
        console.print(f"[red]{title}: not timed, because the results are wrong: {result['error']}")
        return
    table = Table(title=title, title_justify="left")
    for column in ("variant", "tokens/s", "median s", "min … max"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, seconds in sorted(result["seconds"].items(), key=lambda item: item[1]):
        low, high = result["spread"][name]
        table.add_row(
            name, f"{result['tokens'] / seconds:,.0f}", f"{seconds:.3f}", f"{low:.3f} … {high:.3f}"
        )
    console.print(table)
    best, gemm = result["best_native"], result["gemm_seconds"]
    console.print(
        f"native is {result['ratio']:.2f}x the best of transformers (uncompiled against uncompiled "
        f"{result['plain_ratio']:.2f}x). At this machine's {result['gemm_gflops']:,.0f} GFLOP/s for a large product, "
        f"native's products alone take {gemm:.3f} s, {gemm / best:.0%} of its step: without anything else it would be "
        f"{result['best_rival'] / gemm:.2f}x. Shares of native's step: "
        + ", ".join(f"{part} {share:.1%}" for part, share in result["parts"].items())
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
