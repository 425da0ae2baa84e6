"""The memory of large CPU outputs goes from one output to the next, and never to two at once."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

from shardzoo import ops
from shardzoo.ops import library

LARGE = (1 << 10, 1 << 11)  # 8 MiB of fp32
pytestmark = pytest.mark.skipif(
    library.load_error() is not None, reason="the pool is a compiled part"
)


def idle():
    return torch.ops.shardzoo_kernels.recycled_idle()


def gelu(value):
    return ops.bias_gelu(torch.full(LARGE, value))


def test_freed_memory_is_used_again():
    first = gelu(1.0)
    place, before = first.data_ptr(), idle()
    del first
    assert (
        8 << 20 <= idle() - before <= 10 << 20
    )  # a block of up to a quarter more may have been lying there
    second = gelu(2.0)
    assert second.data_ptr() == place
    assert idle() == before
    torch.testing.assert_close(second, torch.nn.functional.gelu(torch.full(LARGE, 2.0)))


def test_a_view_keeps_the_memory():
    row = gelu(3.0)[5]
    expected = row.clone()
    others = [gelu(float(i)) for i in range(4)]
    assert torch.equal(row, expected)
    assert len({other.data_ptr() for other in others}) == 4


def test_activations_survive_until_the_backward_pass():
    x = torch.randn(LARGE, requires_grad=True)
    outputs = ops.swiglu(ops.bias_gelu(x), ops.bias_gelu(x, approximate="tanh"))
    for value in range(3):
        gelu(float(value))
    (grad,) = torch.autograd.grad(outputs.sum(), x)
    with ops.kernels("reference"):
        wanted = torch.autograd.grad(
            ops.swiglu(ops.bias_gelu(x), ops.bias_gelu(x, approximate="tanh")).sum(), x
        )[0]
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)


def test_a_smaller_output_does_not_take_much_more_than_it_needs():
    large = gelu(1.0)
    place = large.data_ptr()
    del large
    assert ops.bias_gelu(torch.zeros(1 << 10, 1 << 10)).data_ptr() != place


def test_threads_share_it():
    results = {}

    def work(number):
        for step in range(6):
            value = float(number * 10 + step)
            output = gelu(value)
            results[number, step] = (
                bool((output == output[0, 0]).all()) and abs(output[0, 0].item() - value) < 0.2
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 24
    assert all(results.values())


def test_what_lies_unused_is_bounded():
    blocks = [
        torch.ops.shardzoo_kernels.recycled(torch.empty(0), (1 << 16, 1 << 10)) for _ in range(5)
    ]  # untouched
    assert len({block.data_ptr() for block in blocks}) == 5
    del blocks
    assert idle() <= 1 << 30


def child(queue):
    torch.set_num_threads(1)
    queue.put(gelu(2.0)[0, 0].item())


def test_a_forked_process_can_use_it():
    expected = gelu(2.0)[0, 0].item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == expected
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.before_release
def test_the_pool_can_be_switched_off():
    program = (
        "import torch; from shardzoo import ops; x = ops.bias_gelu(torch.ones(1 << 10, 1 << 11)); del x; "
        "print(torch.ops.shardzoo_kernels.recycled_idle())"
    )
    for most, idle_bytes in (("0", 0), ("8", 8 << 20)):
        environment = {**os.environ, "SHARDZOO_POOL_MIB": most}
        shown = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert shown.stdout == f"{idle_bytes}\n", shown.stderr
