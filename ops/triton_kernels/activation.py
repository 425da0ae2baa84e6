"""GELU, gated linear units and their gradients in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import choose_block, choose_warps, chunk_rows, partial_sums, pointer


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """Returns the activation and its derivative at z: 0 GELU, 1 tanh approximation of GELU, 2 SiLU."""
    if ACTIVATION == 0:
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        value = z * cdf
        derivative = cdf + tl.where(density == 0.0, 0.0, z * density)
    else:
        u = z
        slope = 1.0
        if ACTIVATION == 1:
            u = 1.5957691216057308 * (z + 0.044715 * z * z * z)
            slope = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
        s = 1.0 / (1.0 + tl.exp(-u))
        bump = s * (1.0 - s)
        value = z * s
        derivative = s + tl.where(bump == 0.0, 0.0, z * bump * slope)
    return value, derivative


@triton.jit
def gelu_forward(
    x_ptr,
    bias_ptr,
    y_ptr,
    columns,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = tl.program_id(0).to(tl.int64) * columns + column
    z = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = activate(z, ACTIVATION)
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gelu_backward(
    grad_ptr,
    x_ptr,
    bias_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    columns,
    chunk,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * chunk
    column = tl.arange(0, BLOCK)
    inside = column < columns
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(first, tl.minimum(first + chunk, rows)):
        at = row * columns + column
        z = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        _, derivative = activate(z, ACTIVATION)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * derivative
        sums += grad
        tl.store(grad_x_ptr + at, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
    if HAS_BIAS:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * columns + column, sums, mask=inside)


@triton.jit
def glu_forward(
    gate_ptr,
    up_ptr,
    y_ptr,
    columns,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = activate(gate, ACTIVATION)
    tl.store(y_ptr + row * columns + column, (value * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def glu_backward(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    columns,
    grad_stride,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, derivative = activate(gate, ACTIVATION)
    at = row * columns + column
    grad_gate = grad * up * derivative
    tl.store(grad_gate_ptr + at, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + at, (grad * value).to(grad_up_ptr.dtype.element_ty), mask=inside)


def launch_bias_gelu(x, bias, tanh, y):
    columns = x.shape[-1]
    block = choose_block(columns)
    flags = {"HAS_BIAS": bias is not None, "ACTIVATION": int(tanh), "BLOCK": block}
    grid = (x.numel() // columns,)
    gelu_forward[grid](x, pointer(bias, x), y, columns, **flags, num_warps=choose_warps(block))


def launch_bias_gelu_backward(grad, x, bias, tanh, grad_x, grad_bias):
    columns = x.shape[-1]
    rows = x.numel() // columns
    block = choose_block(columns)
    partial = partial_sums(x, rows, columns)
    gelu_backward[(len(partial),)](
        grad,
        x,
        pointer(bias, x),
        grad_x,
        partial,
        rows,
        columns,
        chunk_rows(rows),
        HAS_BIAS=bias is not None,
        ACTIVATION=int(tanh),
        BLOCK=block,
        num_warps=choose_warps(block),
    )
    if bias is not None:
        grad_bias.copy_(partial.sum(0))


def launch_glu(gate, up, activation, y):
    rows, columns = gate.shape
    block = choose_block(columns)
    glu_forward[(rows,)](
        gate,
        up,
        y,
        columns,
        gate.stride(0),
        up.stride(0),
        ACTIVATION=activation,
        BLOCK=block,
        num_warps=choose_warps(block),
    )


def launch_glu_backward(grad, gate, up, activation, grad_gate, grad_up):
    rows, columns = gate.shape
    block = choose_block(columns)
    glu_backward[(rows,)](
        grad,
        gate,
        up,
        grad_gate,
        grad_up,
        columns,
        grad.stride(0),
        gate.stride(0),
        up.stride(0),
        ACTIVATION=activation,
        BLOCK=block,
        num_warps=choose_warps(block),
    )
