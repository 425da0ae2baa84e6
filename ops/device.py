"""Answers what layers and training ask about a device and about compilers, each question by its
reason.

Code that can do something in two ways asks here which one to take, so that it names no device
itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from .dispatcher import can_bypass_dispatcher, needs_gradient

T = TypeVar("T")


def host_can_read(tensor: Tensor) -> bool:
    """Returns whether the host reads the tensor's values from its own memory, without waiting for
    an accelerator.
    """
    return tensor.is_cpu


def writes_gradients_in_place(x: Tensor) -> bool:
    """Returns whether the gradients of views of x should be written into their places in the
    gradient of x.

    Autograd concatenates them, which is one launch on an accelerator. On a CPU it would first copy
    each of them.
    """
    return x.is_cpu and needs_gradient(x) and can_bypass_dispatcher(x)


def can_overwrite_gradients() -> bool:
    """Returns whether a backward pass may write over a tensor, or a call depend on data.

    A compiler traces neither.
    """
    return not torch.compiler.is_compiling()


def records_graph() -> bool:
    """Returns whether a compiler records the calls now, so that what it cannot trace must be one
    operator.
    """
    return torch.compiler.is_compiling()


def traces_whole_program() -> bool:
    """Returns whether `torch.export` records the model, in which no call may depend on data."""
    return torch.compiler.is_exporting()


def overlaps_communication(tensor: Tensor) -> bool:
    """Returns whether the device computes while tensors travel between ranks, as accelerators do."""
    return not tensor.is_cpu


def sums_natively(tensor: Tensor) -> bool:
    """Returns whether the process group's own reduction is faster than exchanging tensors and
    summing them here.

    NCCL's reductions can run in switches (NVLS, SHARP). Gloo's, on a CPU, round each hop's 16-bit
    partial sum and divide a tensor into many messages.
    """
    return not tensor.is_cpu


def computes_on_host(device: torch.device) -> bool:
    """Returns whether the host computes, in its own memory, so that each call returns with its
    result.

    An accelerator computes while the host goes on, which therefore should not ask for results
    early.
    """
    return device.type == "cpu"


def has_tf32(device: torch.device) -> bool:
    """Returns whether the device can multiply fp32 matrices in TF32."""
    return device.type == "cuda"


def pins_host_memory(device: torch.device) -> bool:
    """Returns whether copies between the device and pinned memory of the host run while the host
    goes on.
    """
    return device.type == "cuda"


def make_copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns a stream on which copies run beside the device's work; None if it has no streams."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)


@cache
def find_copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns the device's stream for copies to and from the host's memory; None if it has no
    streams.
    """
    return make_copy_stream(device)


def is_for_amd() -> bool:
    """Returns whether PyTorch is built for AMD's GPUs, which it calls "cuda" as well."""
    return torch.version.hip is not None


def can_record_graphs(device: torch.device) -> bool:
    """Returns whether what is queued on the device can be recorded and queued again as one graph."""
    return device.type == "cuda"


def is_recording(device: torch.device) -> bool:
    """Returns whether what is queued on the device is recorded into a graph now, and does not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def record_graph(device: torch.device, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """Records what a function queues on a GPU, which does not run.

    Returns:
        What queues all of it again, and the function's results, whose memory each run renews.

    Raises RuntimeError if something in the function cannot be recorded: the host waits for the
    device.
    """
    # Autograd adds a gradient on the stream where its parameter was first used in a graph of autograd
    # that is still alive. One in a cycle of references would draw another stream into the recording.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    # Triton loads a kernel when it first runs, and PyTorch allocates pinned memory. Neither queues
    # anything, but the stricter modes refuse both.
    mode = "relaxed"
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode=mode):
        results = function()
    return graph.replay, results


def make_current(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context in which a GPU is the current one, on which Triton launches its kernels.

    Without it, a model on cuda:1 would run its kernels on cuda:0, whose memory is another.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@contextmanager
def attending_to_growing_cache(device: torch.device) -> Generator[None]:
    """Within the context, PyTorch's attention on a GPU does not run in cuDNN.

    cuDNN makes a plan for each combination of lengths, so that every token of a decoding would wait
    for a new one. PyTorch's other kernels take any lengths.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    if device.type != "cuda" or not enabled:
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
