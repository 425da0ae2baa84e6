"""Checks that the emulated CUDA kernels fail their cases when a kernel is broken: one small change at a time.

    python tests/ops/cuda_emulation/mutants.py FOLDER [NAME... | PART/PARTS]

Builds each mutant below FOLDER, and runs the cases that reach the change in a process of its own, in several orders of
threads, until one fails. Prints a line per mutant. Exits with 1 if the unchanged kernels fail or a mutant survives.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

import emulated_build
import torch

from shardzoo import ops
from shardzoo.ops import library

library.COMPILED = Path("not yet")  # conftest asks what can run here
TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "ops"), str(TESTS / "harness")]
import conftest  # noqa: E402

# name: (file of csrc/cuda, text, what replaces it, beginnings of the names of the cases that reach it)
MUTANTS = {
    "turns of a reduction": ("common.cuh", "of_warps[turn ^= 1]", "of_warps[turn]", "layer_norm"),
    "barrier inside a reduction": (
        "common.cuh",
        "= value;\n  __syncthreads();\n  if (lane",
        "= value;\n  if (lane",
        "rms_norm",
    ),
    "team of a reduction": ("common.cuh", " + threadIdx.y * warps", "", "tall_layer_norm"),
    "barrier of column sums": ("norm.cu", "= sum;\n  __syncthreads();", "= sum;", "layer_norm"),
    "barrier that one warp skips": (
        "norm.cu",
        "= sum;\n  __syncthreads();\n  if (warp != 0 || column >= a.columns) return;",
        "= sum;\n  if (warp != 0 || column >= a.columns) return;\n  __syncthreads();",
        "layer_norm",
    ),
    "one warp left out of a reduction": (
        "common.cuh",
        "if (lane < warps) value",
        "if (lane < warps - 1) value",
        "rms",
    ),
    "half of the lanes left out": (
        "common.cuh",
        "int offset = 16; offset",
        "int offset = 8; offset",
        "rms_norm",
    ),
    "blocks of broken warps": ("common.cuh", "(threads + 31) / 32 * 32", "threads", "softmax"),
    "barrier before the teams' sums": (
        "common.cuh",
        "__syncthreads();  // of_threads may still be read by the call before",
        "",
        "layer_norm",
    ),
    "barrier of the teams' sums": (
        "common.cuh",
        "= sums[j];\n  __syncthreads();",
        "= sums[j];",
        "layer_norm",
    ),
    "one team left out": ("common.cuh", "for (int team = 1;", "for (int team = 2;", "layer_norm"),
    "too many teams": ("common.cuh", "kTeamThreads / threads", "1024 / threads", "tall_layer_norm"),
    "divisibility of columns": ("common.cuh", "columns % kVector<T> == 0 && ", "", "gelu"),
    "alignment of pointers": ("common.cuh", " && (aligned(pointers, 16) && ...)", "", "rms_norm"),
    "alignment of one pointer": (
        "norm.cu",
        "(a.columns, a.x, a.residual,",
        "(a.columns, a.x,",
        "add_rms_norm",
    ),
    "divisibility of a mask's rows": (
        "softmax.cu",
        "tensor == nullptr || (aligned",
        "tensor == nullptr || true || (aligned",
        "mask_of_odd_rows",
    ),
    "divisibility of a gate's rows": (
        "activation.cu",
        "even && vectors_fit<T>(a.columns, a.gate, a.up, a.y)",
        "vectors_fit<T>(a.columns, a.gate, a.up, a.y)",
        "gate_of_odd_rows",
    ),
    "columns: one too many": (
        "common.cuh",
        "* N; column < columns; column +=",
        "* N; column <= columns; column +=",
        "rms",
    ),
    "columns: one thread too many": (
        "activation.cu",
        "if (column >= a.columns) return;",
        "if (column > a.columns) return;",
        "swiglu",
    ),
    "rows of a tile": (
        "elementwise.cuh",
        "blockIdx.y) * blockDim.y + threadIdx.y, step",
        "blockIdx.y) * blockDim.y, step",
        "gelu",
    ),
    "second of two rows": (
        "elementwise.cuh",
        "two = begin(r + step)",
        "two = begin(r)",
        "tall_gelu",
    ),
    "rows between a block's": ("elementwise.cuh", "r += 2 * step", "r += step", "tall_bias_gelu"),
    "rows of the last chunk": (
        "elementwise.cuh",
        "first + chunk_rows < rows ? first + chunk_rows : rows",
        "first + chunk_rows",
        "bias_gelu",
    ),
    "rows of the last chunk of a norm": (
        "norm.cu",
        "first + a.chunk_rows < a.rows ? first + a.chunk_rows : a.rows",
        "first + a.chunk_rows",
        "layer_norm",
    ),
    "row that is fetched ahead": (
        "norm.cu",
        "(a, r + blockDim.y, stop)",
        "(a, r, stop)",
        "tall_layer_norm",
    ),
    "row after the last": ("norm.cu", "if (r >= stop) return row;", "", "many_rows"),
    "rows that a team skips": (
        "norm.cu",
        "base < stop; base += blockDim.y",
        "base < stop; base += 99",
        "tall_layer_norm",
    ),
    "divisor of the mean": (
        "norm.cu",
        "/ count;  // the mean",
        "/ (count + 1);  // the mean",
        "layer_norm",
    ),
    "last partial sum": (
        "norm.cu",
        "for (int w = 1; w < 32; ++w)",
        "for (int w = 1; w < 2; ++w)",
        "many_rows",
    ),
    "sums of long rows": (
        "norm.cu",
        "(r > first ? to_weight",
        "(r > first + 1 ? to_weight",
        "layer_norm",
    ),
    "causal limit": (
        "softmax.cu",
        "q + a.columns - a.queries + 1",
        "q + a.columns - a.queries",
        "softmax_causal",
    ),
    "last visible column": ("softmax.cu", "j < left ? z[j]", "j <= left ? z[j]", "softmax_causal"),
    "gradient of a shared bias": (
        "softmax.cu",
        "bias_sum[k][j] += p[k][j]",
        "bias_sum[k][j] = p[k][j]",
        "many_samples",
    ),
    "samples of a team": ("softmax.cu", "base += blockDim.y", "base += 1", "softmax_bias"),
    "sample after the last": ("softmax.cu", "if (!is_row) continue;", "", "many_samples"),
    "gradient of a long bias": (
        "softmax.cu",
        "first += blockDim.x)",
        "first += 2 * blockDim.x)",
        "softmax_bias",
    ),
    "launch bounds": (
        "softmax.cu",
        "kEach<T, 1>, threads = threads_for(a.columns, each, kTeamThreads)",
        "kEach<T, 1>, threads = threads_for(a.columns, each, 1024)",
        "softmax_head",
    ),
    "column of dropout": ("common.cuh", "d.first_column + column", "column", "dropout"),
    "row of dropout": ("dropout.cu", "dropout.first_row + row", "row", "bias_dropout"),
    "sample of dropout": (
        "dropout.cu",
        "sample = first / rows_per_sample",
        "sample = first / (rows_per_sample + 1)",
        "dropout",
    ),
    "next sample of dropout": (
        "dropout.cu",
        "row -= rows_per_sample, ++sample",
        "row -= rows_per_sample",
        "tall_dropout",
    ),
    "step of dropout": (
        "dropout.cu",
        "rows_each = step % rows_per_sample",
        "rows_each = step",
        "tall_short",
    ),
    "padding of the vocabulary": (
        "cross_entropy.cu",
        "last < a.columns)",
        "last <= a.columns)",
        "padded_vocabulary",
    ),
    "gradient of the padding": (
        "cross_entropy.cu",
        "last < a.columns ?",
        "last <= a.columns ?",
        "padded_vocab",
    ),
    "stride of a row": (
        "cross_entropy.cu",
        "column + kThreads * N < whole; column += 2 * kThreads * N",
        "column + kThreads * N < whole; column += kThreads * N",
        "cross_entropy",
    ),
    "a larger maximum": (
        "cross_entropy.cu",
        "seen.sum_exp *= exponential(seen.largest - shift);",
        "",
        "cross_entropy",
    ),
    "writer of the target": (
        "cross_entropy.cu",
        "target / N % kThreads",
        "target % kThreads",
        "cross_entropy",
    ),
    "share of the target": (
        "cross_entropy.cu",
        "is_mine ? widen(x[target])",
        "is_mine ? C(0)",
        "cross_entropy",
    ),
}
# What a mutant of a header is compiled into: the source of the cases that reach it, by how their names end.
SOURCES = {"norm": "norm.cu", "rms": "norm.cu", "softmax": "softmax.cu"}
SOURCES |= {"gelu": "activation.cu", "swiglu": "activation.cu", "dropout": "dropout.cu"}
ORDERS = ("forward", "reversed", "5")
# short rows, whole vectors, several warps, and rows too long for registers, for scalars and for vectors
SIZES = ((5, 37), (3, 64), (2, 520), (2, 2057), (1, 16400))


def odd_cases(rows: int, columns: int) -> dict[str, conftest.Case]:
    """Returns cases whose rows are longer in memory than they are, and of many rows."""
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 2, rows, columns + 1, generator=g, dtype=torch.float64)
    target = torch.randint(columns - 3, (2 * rows,), generator=g)
    settings = {"first": 0, "columns": columns - 3}

    def masked(scores, mask):
        return ops.masked_softmax(scores, mask[..., :columns])

    def gated(both):
        return ops.swiglu(both[0, :, :, :columns], both[1, :, :, :columns])

    def loss(logits, target):
        maximum, total, picked, _ = ops.cross_entropy_stats(logits, target, 0, columns - 3)
        log_z = maximum + total.log()
        grad = ops.cross_entropy_grad(
            logits, target, torch.ones_like(log_z), log_z, num_classes=columns, **settings
        )
        return log_z - picked, grad

    def summed(x, weight):
        return ops.rms_norm(x, weight, 1e-6)

    tall = torch.randn(32 * 3 + 5, 7, generator=g, dtype=torch.float64)
    scores = torch.randn(
        17, 1, rows, columns, generator=g, dtype=torch.float64
    )  # one sample more than teams fit
    return {
        "many_samples": conftest.Case(
            ops.masked_softmax, {"scores": scores, "bias": scores[:1]}, ("scores", "bias")
        ),
        "mask_of_odd_rows": conftest.Case(
            masked, {"scores": wide[..., 1:], "mask": wide}, ("scores",)
        ),
        "gate_of_odd_rows": conftest.Case(gated, {"both": wide}, ("both",)),
        "padded_vocabulary": conftest.Case(
            loss, {"logits": wide[0, ..., 1:].flatten(0, 1), "target": target}, ()
        ),
        "many_rows": conftest.Case(summed, {"x": tall, "weight": tall[0]}, ("x", "weight")),
    }


def tall_cases() -> dict[str, conftest.Case]:
    """Returns cases of whole vectors and of so many rows that threads and teams have several."""
    cases = conftest.build_cases(rows=70, columns=136)
    cases["layer_norm"] = conftest.build_cases(rows=27, columns=576)[
        "layer_norm"
    ]  # teams of several warps
    tall = {
        f"tall_{name}": cases[name]
        for name in ("bias_gelu", "gelu", "layer_norm", "dropout", "swiglu")
    }
    samples = torch.randn(
        40, 3, 136, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    tensors = {
        "x": samples,
        "keys": ops.dropout_keys(7, 5, 40),
    }  # a thread's next row is ten samples on
    return {**tall, "tall_short_samples": conftest.Case(ops.dropout, tensors, ("x",), {"p": 0.4})}


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that does not start on a 16-byte boundary, in its own dtype."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


def check(prefix: str) -> None:
    """Runs the cases whose names begin with `prefix`, at all sizes. Raises AssertionError for a wrong result."""
    for rows, columns in SIZES:
        cases = {**conftest.build_cases(rows, columns), **odd_cases(rows, columns)}
        cases |= tall_cases() if columns == 64 else {}
        for name in (name for name in cases if name.startswith(prefix)):
            for dtype in (torch.float32, torch.bfloat16):
                check_case(cases[name].rounded(dtype), dtype, shift=columns == 64)


def check_case(case: conftest.Case, dtype: torch.dtype, *, shift: bool) -> None:
    """Compares a case with the reference; with `shift` again, with each of its tensors misaligned."""
    gradient = bool(case.differentiable)
    expected = case.run("reference", torch.float64, with_grad=gradient)
    kept = {
        name: t.to(dtype) if t is not None and t.is_floating_point() else t
        for name, t in case.tensors.items()
    }
    shifted = [{**kept, name: misaligned(t)} for name, t in kept.items() if shift and t is not None]
    for tensors in [kept, *shifted]:
        moved = conftest.Case(case.function, tensors, case.differentiable, case.constants)
        conftest.assert_close(moved.run("cuda", dtype, with_grad=gradient), expected, dtype)


def run_in_child(built: Path, prefix: str, order: str) -> None:
    """Runs the cases with a library, and ends this process: with 0, with 1 for a wrong result, or with 2."""
    os.environ["SHARDZOO_EMULATION_ORDER"] = order
    library.COMPILED = built
    for function in (library.load_error, library.emulates_cuda, library.missing_kernels):
        function.cache_clear()
    try:
        check(prefix)
    except AssertionError as error:
        print(str(error).splitlines()[0], flush=True)
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(2)
    os._exit(0)


def fails(built: Path, prefix: str, order: str) -> str | None:
    """Returns why the cases fail with a library, as the process told before it ended; None if they pass.

    Raises:
        RuntimeError: The cases could not run.
    """
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            run_in_child(built, prefix, order)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if code == 2:
        raise RuntimeError(text)
    lines = (text or f"signal {-code}").splitlines()
    return next((line for line in lines if "runtime error" in line), lines[-1]) if code else None


def source_of(prefix: str) -> str:
    """Returns the source whose kernels the cases call whose names begin with `prefix`."""
    return next(source for end, source in SOURCES.items() if prefix.endswith(end))


def main(folder: Path, names: list[str]) -> int:
    """Returns the exit code: 1 if a mutant survives or the unchanged kernels fail."""
    torch.set_num_threads(1)  # processes with OpenMP's threads cannot fork
    bad = 0
    if names and (share := re.fullmatch(r"(\d+)/(\d+)", names[0])):
        names = ["", *MUTANTS][int(share[1]) :: int(share[2])]
    for name in names or ["", *MUTANTS]:
        file, old, new, prefix = MUTANTS[name] if name else ("norm.cu", "#include", "#include", "")
        text = (emulated_build.CSRC / "cuda" / file).read_text()
        if old not in text:
            raise ValueError(f"{file} has no {old!r} any more; change the mutant {name!r}")
        only = source_of(prefix) if name and file.endswith(".cuh") else None
        built = emulated_build.build(folder, changed={file: text.replace(old, new)}, only=only)
        found = next(
            ((order, line) for order in ORDERS if (line := fails(built, prefix, order))), None
        )
        bad += (found is not None) != bool(name)
        told = (
            f"{'caught' if name else 'FAILED'} ({found[0]}): {found[1]}"
            if found
            else "SURVIVED"
            if name
            else "passes"
        )
        print(f"{name or 'unchanged'}: {told}"[:160], flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
