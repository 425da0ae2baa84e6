"""Initial weights are bit-identical for every layout; materialising keeps ties and declarations."""

from __future__ import annotations

import copy

import pytest
import torch
from small_transformer import build_transformer, fill
from torch import nn

from shardzoo import mpu


def initial_state(mesh, build, dtype):
    model = build(mesh, layers=1, hidden=24, heads=12).to(dtype)
    return {
        name: (parameter.detach(), getattr(parameter, "shard", None))
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_merged_weights_are_those_of_one_process(tp, dtype, run_mesh):
    expected = initial_state(None, build_transformer, dtype)
    ranks = run_mesh(tp, initial_state, build_transformer, dtype)
    assert set(ranks[0]) == set(expected)
    for name, (value, shard) in expected.items():
        parts = [rank[name][0] for rank in ranks]
        assert ranks[0][name][1] == shard  # the declaration does not depend on the degree
        if shard is None:
            assert all(torch.equal(part, value) for part in parts)
        else:
            assert torch.equal(shard.merge(parts), value)


def test_a_value_depends_on_the_seed_and_the_name_alone():
    def values(names, seed, prefix=""):
        model = nn.ParameterDict({name: nn.Parameter(torch.empty(3, 5)) for name in names})
        mpu.initialize(model, fill, seed, prefix=prefix)
        return dict(model.items())

    both, other_order = values(["a", "b"], 1), values(["b", "c", "a"], 1)
    assert torch.equal(both["a"], other_order["a"])
    assert torch.equal(both["b"], other_order["b"])
    assert not torch.equal(both["a"], both["b"])
    assert not torch.equal(both["a"], values(["a"], 2)["a"])
    assert not torch.equal(both["a"], values(["a"], 1, prefix="stage")["a"])
    # Golden: the stream must not change between versions, or a run would no longer repeat.
    assert (
        mpu.initialization.parameter_seed(1234, "transformer.h.0.attn.weight")
        == 8373530452572947252
    )


def test_a_tied_copy_in_another_stage_gets_the_values_of_its_source():
    source = nn.ParameterDict({"embedding": nn.Parameter(torch.empty(6, 2))})
    copy = nn.ParameterDict({"head": nn.Parameter(torch.empty(6, 2))})
    copy["head"].shard = mpu.Shard((6, 2), 0, tied_to="embedding")
    mpu.initialize(source, fill, 0)
    mpu.initialize(copy, fill, 0)
    assert torch.equal(source["embedding"], copy["head"])


def test_a_fill_that_forgets_a_parameter_is_an_error():
    with pytest.raises(ValueError, match="fill left values of 'weight' unset"):
        mpu.initialize(mpu.LayerNorm(4), lambda name, full, generator: None, 0)


def test_materialize_keeps_ties_declarations_and_real_values():
    with torch.device("meta"):
        embedding = mpu.VocabParallelEmbedding(11, 4)
        model = nn.ModuleDict({"e": embedding, "h": mpu.VocabParallelHead(4, 11, tied=embedding)})
    model["n"] = mpu.LayerNorm(4)
    model["n"].weight.requires_grad_(False)
    model.register_buffer("table", torch.arange(3))
    mpu.materialize(model, "cpu", torch.bfloat16)
    assert model["h"].weight is model["e"].weight
    assert model["e"].weight.shard == mpu.Shard((11, 4), 0, pad_multiple=1)
    assert model["e"].weight.model_parallel
    assert model["e"].weight.tensor_model_parallel
    assert not hasattr(model["n"].weight, "shard")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model["n"].weight.float(), torch.ones(4))
    assert not model["n"].weight.requires_grad
    assert torch.equal(model.table, torch.arange(3))


def test_a_buffer_lost_on_the_meta_device_is_an_error():
    module = nn.Module()
    module.register_buffer("angles", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="buffer 'angles' of Module is on the meta device"):
        mpu.materialize(module, "cpu")


def test_parameters_that_nobody_set_are_nan():
    layers = nn.ModuleList([mpu.ColumnParallelLinear(3, 4), mpu.RowParallelLinear(3, 4)])
    assert all(parameter.isnan().all() for parameter in layers.parameters())


def test_a_copied_model_keeps_its_declarations():
    model = copy.deepcopy(mpu.ColumnParallelLinear(3, 4))
    assert model.weight.shard == mpu.Shard((4, 3), 0)
    assert model.weight.model_parallel
    assert model.weight.tensor_model_parallel
    moved = mpu.ColumnParallelLinear(3, 4).to(torch.bfloat16)
    assert moved.bias.shard == mpu.Shard((4,), 0)
