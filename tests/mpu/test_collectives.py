"""Each collective and its gradient against the same thing computed on all ranks' tensors in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from every_case import by_turns, every_day
from hypothesis import example, given
from hypothesis import strategies as st

from shardzoo import mpu
from shardzoo.mpu import shared_memory
from shardzoo.mpu.collectives import gather_bytes

FUNCTIONS = [
    "copy_to_tp",
    "reduce_from_tp",
    "gather_from_tp",
    "scatter_to_tp",
    "gather_sequence",
    "gather_sequence_replicated",
    "scatter_sequence",
    "reduce_scatter_sequence",
]


def expected_results(name, xs, grads, size):
    """Every rank's output and input gradient, in fp64."""
    xs, grads = [x.double() for x in xs], [grad.double() for grad in grads]
    dim = -1 if name in ("gather_from_tp", "scatter_to_tp") else 1

    def share(tensor, rank):
        return tensor.chunk(size, dim)[rank]

    ranks = range(size)
    if name == "copy_to_tp":
        return xs, [sum(grads)] * size
    if name == "reduce_from_tp":
        return [sum(xs)] * size, grads
    if name == "gather_sequence":
        return [torch.cat(xs, dim)] * size, [share(sum(grads), rank) for rank in ranks]
    if name in ("gather_from_tp", "gather_sequence_replicated"):
        return [torch.cat(xs, dim)] * size, [share(grads[rank], rank) for rank in ranks]
    if name == "reduce_scatter_sequence":
        return [share(sum(xs), rank) for rank in ranks], [torch.cat(grads, dim)] * size
    return [share(xs[rank], rank) for rank in ranks], [torch.cat(grads, dim)] * size


def apply(mesh, name, xs, grads, strided, way):
    if way != "memory":
        find, shared_memory.find = shared_memory.find, lambda tensor, group: None
        mpu.set_reduction(mesh.tp_group, way)
        try:
            return apply(mesh, name, xs, grads, strided, "memory")
        finally:
            shared_memory.find = find
            mpu.set_reduction(mesh.tp_group, "auto")
    x, grad = xs[mesh.tp_rank], grads[mesh.tp_rank]
    if strided:
        x, grad = (t.transpose(0, 2).contiguous().transpose(0, 2) for t in (x, grad))
    x.requires_grad_()
    kept = x.detach().clone(), grad.clone()
    if name == "gather_sequence_replicated":
        output = mpu.gather_sequence(x, mesh, partial_grad=False)
    else:
        output = getattr(mpu, name)(x, mesh)
    output.backward(grad)
    assert torch.equal(x.detach(), kept[0])
    assert torch.equal(grad, kept[1])
    return output.detach(), x.grad


@pytest.mark.parametrize("name", by_turns(FUNCTIONS, 3))
@pytest.mark.parametrize(
    ("tp", "way"),
    every_day(
        [(3, "memory"), (3, "native")],
        more=[
            (4, "fp32"),
            (1, "memory"),
            (2, "fp32"),
            (4, "memory"),
            (2, "memory"),
            (4, "auto"),
            (2, "native"),
            (4, "native"),
        ],
    ),
)
def test_forward_and_backward(tp, way, name, run_mesh):
    shrinks = name in ("scatter_to_tp", "scatter_sequence", "reduce_scatter_sequence")
    grows = name.startswith("gather")
    dim = 2 if name.endswith("_tp") else 1

    @given(
        sizes=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        strided=st.booleans(),
    )
    @example(sizes=(2, 3, 4), dtype=torch.float32, strided=True)
    @example(sizes=(2, 3, 4), dtype=torch.bfloat16, strided=True)
    def check(sizes, dtype, strided):
        wide = list(sizes)
        wide[dim] *= tp
        x_shape, grad_shape = (wide if shrinks else sizes), (wide if grows else sizes)
        generator = torch.Generator().manual_seed(0)
        xs, grads = (
            [torch.randn(*shape, generator=generator).to(dtype) for _ in range(tp)]
            for shape in (x_shape, grad_shape)
        )
        outputs, x_grads = expected_results(name, xs, grads, tp)
        for rank, (output, x_grad) in enumerate(run_mesh(tp, apply, name, xs, grads, strided, way)):
            assert output.dtype == x_grad.dtype == dtype
            # Sums of up to four numbers; in bf16 they are rounded exactly once, however many ranks there are. Only
            # the backend's own sum rounds its partial sums, of at most 8.
            tolerance = {
                torch.float32: {"rtol": 1e-5, "atol": 1e-6},
                torch.float64: {"rtol": 1e-14, "atol": 1e-14},
                torch.bfloat16: {
                    "rtol": 2**-8,
                    "atol": 1e-6 if way != "native" else (tp - 2) * 8 * 2**-9 + 1e-6,
                },
            }[dtype]
            torch.testing.assert_close(output.double(), outputs[rank], **tolerance)
            torch.testing.assert_close(x_grad.double(), x_grads[rank], **tolerance)

    check()


def test_large_16_bit_sums_of_several_ranks_are_rounded_once(run_mesh):
    """Beyond half a MiB, ranks sum pieces of a tensor and then gather the sums; the last piece is padded."""
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(1, 100_001, 1, generator=generator).bfloat16() for _ in range(3)]
    wanted = (xs[0].float() + xs[1].float() + xs[2].float()).bfloat16()
    for output, _ in run_mesh(3, apply, "reduce_from_tp", xs, xs, False, "fp32"):
        assert torch.equal(output, wanted)


def test_without_a_mesh_everything_is_the_identity():
    x = torch.ones(2, 3, 4)
    for name in FUNCTIONS:
        assert getattr(mpu, name.removesuffix("_replicated"))(x, None) is x


def test_a_length_that_does_not_divide_is_refused(run_mesh):
    def refused(mesh):
        for function in (mpu.scatter_sequence, mpu.reduce_scatter_sequence):
            with pytest.raises(
                ValueError, match=r"sequence parallelism .* 13 positions .* 4, such as 16, or"
            ):
                function(torch.zeros(2, 13, 4), mesh)
        with pytest.raises(
            ValueError, match="9 positions of dim 2 cannot be split 4 ways; use 1, 3 or 9"
        ):
            mpu.scatter_to_tp(torch.zeros(2, 4, 9), mesh)

    run_mesh(4, refused)


def test_bytes_of_every_rank(run_ranks):
    def gathered(lengths):
        return gather_bytes(bytes(range(lengths[dist.get_rank()])))

    for lengths in ([3, 0, 200], [0, 0, 0]):
        assert run_ranks(3, gathered, lengths) == [[bytes(range(length)) for length in lengths]] * 3
