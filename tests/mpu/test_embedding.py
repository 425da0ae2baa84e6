"""The vocabulary-parallel embedding and head against `F.embedding` and `F.linear` on the whole table."""

from __future__ import annotations

import math

import pytest
import torch
from every_case import every_day
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

from shardzoo.mpu import VocabParallelEmbedding, VocabParallelHead


def pad(tensor, rank, size, multiple):
    """Rank's rows of a vocabulary, zeros where there are none; written without `Shard`."""
    width = math.ceil(math.ceil(len(tensor) / size) / multiple) * multiple
    whole = torch.cat([tensor, tensor.new_zeros(width * size - len(tensor), *tensor.shape[1:])])
    return whole[rank * width : (rank + 1) * width]


def both_modes(mesh, run, *args):
    """Without and with sequence parallelism, in one round trip."""
    return [run(mesh, *args, sequence_parallel) for sequence_parallel in (False, True)]


def embed(mesh, pad, ids, table, grad, padding_idx, multiple, sequence_parallel):
    rank, size = mesh.tp_rank, mesh.tp_size
    layer = VocabParallelEmbedding(
        *table.shape,
        padding_idx=padding_idx,
        pad_multiple=multiple,
        sequence_parallel=sequence_parallel,
        mesh=mesh,
    ).to(table.dtype)
    with torch.no_grad():
        layer.weight.copy_(pad(table, rank, size, multiple))
    output = layer(ids)
    output.backward(grad.chunk(size, 1)[rank] if sequence_parallel else grad)
    return output.detach(), layer.weight.grad


@pytest.mark.parametrize("tp", every_day([2, 3], more=[1, 4]))
def test_embedding_equals_unsplit(tp, run_mesh, helpers):
    @given(
        batch=st.integers(0, 3),
        positions=st.integers(1, 3),
        vocabulary=st.integers(1, 23),
        hidden=st.integers(1, 5),
        multiple=st.sampled_from([1, 4]),
        padding_idx=st.none() | st.integers(-23, 22),
    )
    @example(batch=2, positions=4, vocabulary=7, hidden=3, multiple=1, padding_idx=2)
    @example(batch=2, positions=4, vocabulary=5, hidden=3, multiple=4, padding_idx=-1)
    def check(batch, positions, vocabulary, hidden, multiple, padding_idx):
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (batch, positions * tp), generator=generator)
        if padding_idx is not None:
            padding_idx = max(-vocabulary, min(padding_idx, vocabulary - 1))
        table = torch.randn(vocabulary, hidden, generator=generator).requires_grad_()
        grad = torch.randn(batch, positions * tp, hidden, generator=generator)
        expected = F.embedding(ids, table, padding_idx)
        expected.backward(grad)
        results = run_mesh(
            tp, both_modes, embed, pad, ids, table.detach(), grad, padding_idx, multiple
        )
        for rank, ((whole, whole_grad), (part, part_grad)) in enumerate(results):
            helpers.close(whole, expected.detach())
            helpers.close(part, helpers.cut(expected.detach(), 1, rank, tp))
            for weight_grad in (whole_grad, part_grad):
                helpers.close(weight_grad, pad(table.grad, rank, tp, multiple))

    check()


def project(mesh, pad, x, table, bias, grad, multiple, tied, sequence_parallel):
    rank, size = mesh.tp_rank, mesh.tp_size
    vocabulary, hidden = table.shape
    embedding = (
        VocabParallelEmbedding(vocabulary, hidden, pad_multiple=multiple, mesh=mesh)
        if tied
        else None
    )
    head = VocabParallelHead(
        hidden,
        vocabulary,
        bias=bias is not None,
        tied=embedding,
        pad_multiple=multiple,
        sequence_parallel=sequence_parallel,
        mesh=mesh,
    ).to(table.dtype)
    assert not tied or head.weight is embedding.weight
    with torch.no_grad():
        head.weight.copy_(pad(table, rank, size, multiple))
        if bias is not None:
            head.bias.copy_(pad(bias, rank, size, multiple))
    x = (x.chunk(size, 1)[rank] if sequence_parallel else x).clone().requires_grad_()
    logits = head(x)
    logits.backward(pad(grad.movedim(-1, 0), rank, size, multiple).movedim(0, -1))
    return logits.detach(), x.grad, head.weight.grad, None if bias is None else head.bias.grad


@pytest.mark.parametrize("tp", every_day([2, 3], more=[1, 4]))
def test_head_equals_unsplit(tp, run_mesh, helpers):
    @given(
        batch=st.integers(0, 3),
        positions=st.integers(1, 3),
        vocabulary=st.integers(1, 23),
        hidden=st.integers(1, 5),
        multiple=st.sampled_from([1, 4]),
        with_bias=st.booleans(),
        tied=st.booleans(),
    )
    @example(batch=2, positions=2, vocabulary=7, hidden=3, multiple=4, with_bias=True, tied=True)
    def check(batch, positions, vocabulary, hidden, multiple, with_bias, tied):
        generator = torch.Generator().manual_seed(0)
        x, table, bias, grad = (
            torch.randn(*shape, generator=generator)
            for shape in (
                (batch, positions * tp, hidden),
                (vocabulary, hidden),
                (vocabulary,),
                (batch, positions * tp, vocabulary),
            )
        )
        whole = [t.clone().requires_grad_() for t in (x, table, bias)]
        logits = F.linear(whole[0], whole[1], whole[2] if with_bias else None)
        logits.backward(grad)
        args = (pad, x, table, bias if with_bias else None, grad, multiple, tied)
        for rank, by_mode in enumerate(run_mesh(tp, both_modes, project, *args)):
            expected = pad(logits.detach().movedim(-1, 0), rank, tp, multiple).movedim(0, -1)
            x_grads = [whole[0].grad, helpers.cut(whole[0].grad, 1, rank, tp)]
            for (output, x_grad, weight_grad, bias_grad), expected_x_grad in zip(
                by_mode, x_grads, strict=True
            ):
                helpers.close(output, expected)
                helpers.close(x_grad, expected_x_grad)
                helpers.close(weight_grad, pad(whole[1].grad, rank, tp, multiple))
                if with_bias:
                    helpers.close(bias_grad, pad(whole[2].grad, rank, tp, multiple))

    check()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_bf16(tp, sequence_parallel, run_mesh, helpers):
    """The embedding adds one row to zeros, which is exact; the head may be 1.5 times as far from fp64 as unsplit."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(101, generator=generator)[:48].view(2, 24)
    x, table, bias, grad, logits_grad = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((2, 24, 64), (101, 64), (101,), (2, 24, 64), (2, 24, 101))
    )
    dim = 1 if sequence_parallel else 0
    embedded = run_mesh(tp, embed, pad, ids, table, grad, None, 1, sequence_parallel)
    parts = [output for output, _ in embedded] if sequence_parallel else [embedded[-1][0]]
    assert torch.equal(torch.cat(parts, dim), table[ids])
    weight_grad = torch.zeros_like(table).index_put_((ids,), grad)  # no id twice: exact too
    assert torch.equal(torch.cat([part for _, part in embedded])[:101], weight_grad)

    def unsplit(dtype):
        leaves = [tensor.clone().to(dtype).requires_grad_() for tensor in (x, table, bias)]
        logits = F.linear(*leaves)
        logits.backward(logits_grad.to(dtype))
        return [logits.detach(), *(leaf.grad for leaf in leaves)]

    exact, plain = unsplit(torch.float64), unsplit(torch.bfloat16)
    results = run_mesh(tp, project, pad, x, table, bias, logits_grad, 1, False, sequence_parallel)
    for which, vocabulary_dim in enumerate([-1, None, 0, 0]):
        parts = [result[which] for result in results]
        if vocabulary_dim is None:
            whole = torch.cat(parts, 1) if sequence_parallel else parts[-1]
        else:
            whole = torch.cat(parts, vocabulary_dim).narrow(vocabulary_dim, 0, 101)
        assert whole.dtype == torch.bfloat16
        assert helpers.distance(whole, exact[which]) <= 1.5 * helpers.distance(
            plain[which], exact[which]
        )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bad", [-1, 7, 8])
def test_an_id_outside_the_vocabulary_is_an_error_even_where_padding_rows_exist(tp, bad, run_mesh):
    def refused(mesh):
        layer = VocabParallelEmbedding(7, 2, pad_multiple=8, mesh=mesh)
        with pytest.raises(ValueError, match=rf"token id {bad} is outside 0\.\.6"):
            layer(torch.tensor([[0, bad]]))

    run_mesh(tp, refused)


def test_mismatched_ties_and_padding_indices_are_refused():
    with pytest.raises(ValueError, match="a head of 8 x 4 cannot be tied to an embedding of 7 x 4"):
        VocabParallelHead(4, 8, tied=VocabParallelEmbedding(7, 4))
    with pytest.raises(ValueError, match="padding_idx 7 is outside a vocabulary of 7"):
        VocabParallelEmbedding(7, 4, padding_idx=7)


def test_layers_print_their_shard():
    assert "7x4 split along 0 padded to multiples of 8" in repr(
        VocabParallelEmbedding(7, 4, pad_multiple=8)
    )
    assert "7x4 split along 0" in repr(VocabParallelHead(4, 7, bias=True))
