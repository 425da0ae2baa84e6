"""AdamW of many tensors in one launch, in Triton: scale, clip, update and round in one pass over memory.

A table has the addresses of a tensor's parts in each row, so that a launch takes any number of
tensors. A program updates a block of one tensor. Nothing is written where `found_inf` is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import is_recording, pins_host_memory
from .common import ceil_div
from .launching import launch

# Elements that a program updates.
BLOCK = 1024
# The columns of the table: addresses, and the number of elements.
PARAMETER, GRADIENT, AVERAGE, SQUARE, STEP, ROUNDED, ELEMENTS = (
    tl.constexpr(column) for column in range(7)
)
COLUMNS = tl.constexpr(7)


@triton.jit
def load_pointer(row_ptr, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns the address in a column as a pointer; addresses are multiples of 16 if ALIGNED."""
    pointer = tl.load(row_ptr + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def one_minus_exp(x):
    """Returns 1 - exp(x) of a number below 0, to all digits of fp32 also near 0, where they cancel."""
    series = 1.0 + x * (1.0 / 8.0)
    series = 1.0 + x * series * (1.0 / 7.0)
    series = 1.0 + x * series * (1.0 / 6.0)
    series = 1.0 + x * series * (1.0 / 5.0)
    series = 1.0 + x * series * (1.0 / 4.0)
    series = 1.0 + x * series * (1.0 / 3.0)
    series = 1.0 + x * series * (1.0 / 2.0)
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def update_block(
    row_ptr, at, inside, factor, rate, step_size, root, gain1, gain2, eps, weight_decay,
    GRADIENT_DTYPE: tl.constexpr, ROUNDED_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Updates the elements `at` of a tensor, all of them if `inside` is None."""
    parameter_ptr = load_pointer(row_ptr, PARAMETER, tl.float32, ALIGNED) + at
    average_ptr = load_pointer(row_ptr, AVERAGE, tl.float32, ALIGNED) + at
    square_ptr = load_pointer(row_ptr, SQUARE, tl.float32, ALIGNED) + at
    gradient_ptr = load_pointer(row_ptr, GRADIENT, GRADIENT_DTYPE, ALIGNED) + at
    gradient = tl.load(gradient_ptr, mask=inside).to(tl.float32) * factor
    parameter = tl.load(parameter_ptr, mask=inside)
    average = tl.load(average_ptr, mask=inside)
    square = tl.load(square_ptr, mask=inside)
    parameter -= rate * weight_decay * parameter
    average += gain1 * (gradient - average)
    square += gain2 * (gradient * gradient - square)
    parameter -= step_size * average / (tl.sqrt(square) / root + eps)
    tl.store(parameter_ptr, parameter, mask=inside)
    tl.store(average_ptr, average, mask=inside)
    tl.store(square_ptr, square, mask=inside)
    if ROUNDED_DTYPE is not None:
        rounded_ptr = load_pointer(row_ptr, ROUNDED, ROUNDED_DTYPE, ALIGNED) + at
        tl.store(rounded_ptr, parameter.to(ROUNDED_DTYPE), mask=inside)


@triton.jit
def update(
    table_ptr, owners_ptr, found_inf_ptr, factor_ptr, rate_ptr, rate, gain1, gain2, log1, log2, eps, weight_decay,
    GRADIENT_DTYPE: tl.constexpr, ROUNDED_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates a program's block. A pair of `owners_ptr` is the row of its tensor, and the block's number.

    `gain1` and `gain2` are 1 - beta, `log1` and `log2` the logarithms of the betas: so a beta near 1
    loses no digits as an fp32 argument.
    """
    is_skipped = False
    if found_inf_ptr is not None:
        is_skipped = tl.load(found_inf_ptr) != 0
    if not is_skipped:
        factor = 1.0
        if factor_ptr is not None:
            factor = tl.load(factor_ptr).to(tl.float32)
        if rate_ptr is not None:
            rate = tl.load(rate_ptr).to(tl.float32)
        owner = owners_ptr + tl.program_id(0) * 2
        row_ptr = table_ptr + tl.load(owner) * COLUMNS
        elements = tl.load(row_ptr + ELEMENTS)
        step = tl.load(tl.load(row_ptr + STEP).to(tl.pointer_type(tl.float32)))
        correction1 = one_minus_exp(step * log1)
        root = tl.sqrt(one_minus_exp(step * log2))
        first = tl.load(owner + 1).to(tl.int64) * BLOCK
        at = first + tl.arange(0, BLOCK)
        step_size = rate / correction1
        if first + BLOCK <= elements:
            update_block(
                row_ptr, at, None, factor, rate, step_size, root, gain1, gain2, eps, weight_decay, GRADIENT_DTYPE,
                ROUNDED_DTYPE, ALIGNED,
            )  # fmt: skip
        else:
            update_block(
                row_ptr, at, at < elements, factor, rate, step_size, root, gain1, gain2, eps, weight_decay,
                GRADIENT_DTYPE, ROUNDED_DTYPE, ALIGNED,
            )  # fmt: skip


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class LaunchTable:
    """Holds on a device where the tensors of a launch are, and which program has which of them.

    They are sent again only if they have changed: the addresses in many steps, because gradients get
    other memory, and which program has which tensor with the sizes alone.
    """

    def __init__(self) -> None:
        self._addresses: list[list[int]] = []
        self.addresses: Tensor | None = None
        self.owners: Tensor | None = None
        self._owners_are_sent = False

    def fill(self, addresses: list[list[int]], device: torch.device) -> int:
        """Takes the rows of the table; returns the number of programs.

        Raises RuntimeError if a step is recorded whose tensors have other sizes than those before.
        """
        counts = [ceil_div(row[6], BLOCK) for row in addresses]
        if addresses != self._addresses:
            sizes_changed = [row[6] for row in addresses] != [row[6] for row in self._addresses]
            if sizes_changed and is_recording(device):
                raise RuntimeError("it updates other parameters than the step before")
            self._addresses = addresses
            if sizes_changed:
                shape = (len(addresses), COLUMNS.value)
                self.addresses = torch.empty(shape, dtype=torch.int64, device=device)
                self.owners = torch.empty(sum(counts), 2, dtype=torch.int32, device=device)
                self._owners_are_sent = False
            if not is_recording(device):
                self.send()
        return sum(counts)

    def copy_for_recording(self) -> LaunchTable:
        """Returns a table of the same launch for a graph that is recorded, in memory that exists before.

        Memory that is taken while a graph is recorded belongs to the graph, which writes other tensors
        there earlier in each run.
        """
        assert self.addresses is not None
        table = LaunchTable()
        table._addresses = [[0] * ELEMENTS.value + [row[6]] for row in self._addresses]
        table.addresses = torch.empty_like(self.addresses)
        table.owners = self.owners
        table._owners_are_sent = self._owners_are_sent
        return table

    def send(self) -> None:
        """Sends the table, which a graph that was recorded needs before it runs.

        A recorded copy would read the host's memory anew in each run.
        """
        assert self.addresses is not None
        assert self.owners is not None
        _send(torch.tensor(self._addresses, dtype=torch.int64), self.addresses)
        if not self._owners_are_sent:
            counts = torch.tensor([ceil_div(row[6], BLOCK) for row in self._addresses])
            rows = torch.arange(len(counts)).repeat_interleave(counts)
            firsts = (counts.cumsum(0) - counts).repeat_interleave(counts)
            blocks = torch.arange(len(rows)) - firsts
            _send(torch.stack([rows, blocks], 1).to(torch.int32), self.owners)
            self._owners_are_sent = True


def _send(on_host: Tensor, target: Tensor) -> None:
    """Copies a tensor to a device without waiting for it."""
    if pins_host_memory(target.device):
        on_host = on_host.pin_memory()
    target.copy_(on_host, non_blocking=True)


def launch_adamw(
    tensors: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]],
    table: LaunchTable,
    found_inf: Tensor | None,
    factor: Tensor | None,
    rate: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Updates tensors whose gradients have one dtype, and whose rounded copies have one."""
    addresses = [
        [*(0 if part is None else part.data_ptr() for part in parts), parts[0].numel()]
        for parts in tensors
    ]
    # A step is one number, which may lie anywhere.
    aligned = all(address % 16 == 0 for row in addresses for address in (*row[:4], row[5]))
    programs = table.fill(addresses, tensors[0][0].device)
    _, gradient, *_, rounded = tensors[0]
    constants = {
        "GRADIENT_DTYPE": DTYPES[gradient.dtype],
        "ROUNDED_DTYPE": None if rounded is None else DTYPES[rounded.dtype],
        "ALIGNED": aligned,
        "BLOCK": BLOCK,
    }
    is_on_device = isinstance(rate, Tensor)
    beta1, beta2 = betas
    arguments = (
        table.addresses,
        table.owners,
        found_inf,
        factor,
        rate if is_on_device else None,
        0.0 if is_on_device else float(rate),
        1.0 - beta1,
        1.0 - beta2,
        math.log(beta1) if beta1 else -math.inf,
        math.log(beta2) if beta2 else -math.inf,
        float(eps),
        float(weight_decay),
    )
    launch(update, programs, arguments, constants, num_warps=4)
