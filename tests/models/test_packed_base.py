"""Packed bases (QLoRA): the values are bitsandbytes', every layout has the same, and training on them is the plain
model's with these values.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from every_case import every_day
from tiny_models import hf_model

import shardzoo
from shardzoo.models import ParallelConfig
from shardzoo.models.lora import add_lora, lora_config, merge_lora
from shardzoo.models.packing import find_packed_parameters, unpack_parameters
from shardzoo.mpu import gather_from_tp

FORMATS = ("nf4", "int8", "fp8")
# The largest error of an element, as a share of its block's largest: half of the widest gap.
ERRORS = {"nf4": 0.1520, "int8": 0.5 / 127 + 1e-6, "fp8": 2**-4 + 1e-6}
# Two and three ranks begin some parts of the Llama at blocks, and share the blocks of others. Three ranks share its
# key-value heads.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama": ("LlamaForCausalLM", WIDE),
    "t5": ("T5ForConditionalGeneration", {}),
    "bert": ("BertForMaskedLM", {}),
    "mt5": ("MT5ForConditionalGeneration", {}),
}
KINDS = every_day(["gpt2", "llama", "t5"], more=["bert", "mt5"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    for kind in KINDS:
        architecture, changes = MODELS[kind]
        hf_model(architecture, **changes).save_pretrained(root / kind)
    return root


def load(mesh, folder, **options):
    return shardzoo.from_pretrained(folder, mesh, **options)


def gather_unpacked(mesh, folder, format):
    """Returns the whole unpacked values of every packed parameter."""
    model = load(mesh, folder, base_precision=format)
    values = {}
    for name, packed in find_packed_parameters(model).items():
        part = packed.unpack()
        if mesh is None or mesh.tp_size == 1:
            values[name] = packed.shard.merge([part])
            continue
        dim = packed.shard.dim
        longest = packed.shard.local_shape(0, mesh.tp_size)
        padded = part.new_zeros(longest)
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        parts = gather_from_tp(padded, mesh, dim).split(longest[dim], dim)
        own = [
            each.narrow(dim, 0, packed.shard.local_shape(rank, mesh.tp_size)[dim])
            for rank, each in enumerate(parts)
        ]
        values[name] = packed.shard.merge(own)
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_whole_matrices_in_every_layout(folders, run_mesh, kind):
    plain = dict(load(None, folders / kind).named_parameters())
    work = partial(gather_unpacked, folder=folders / kind)
    for format in FORMATS:
        expected = work(None, format=format)
        assert len(expected) >= 8
        for name, value in expected.items():
            weight = plain[name].shard.merge([plain[name].detach()])
            blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64))
            scales = blocks.view(-1, 64).abs().amax(1).repeat_interleave(64)[: weight.numel()]
            errors = (value - weight).flatten().abs() / scales.clamp(min=1e-30)
            assert errors.max() <= ERRORS[format]
        for ranks in (2, 3):
            for found in run_mesh(ranks, partial(work, format=format)):
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_nf4_is_that_of_bitsandbytes(folders):
    """The bytes and the values, in fp32 and bf16; and the logits."""
    functional = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.float32, torch.bfloat16):
        plain = load(None, folders / "gpt2", dtype=dtype)
        packed_model = load(None, folders / "gpt2", dtype=dtype, base_precision="nf4")
        weights = dict(plain.named_parameters())
        for name, packed in find_packed_parameters(packed_model).items():
            # Its blocks run on over the rows of a matrix. On a CPU bitsandbytes 0.50 takes the scales of
            # other blocks for rows that are shorter than a block, so it gets one row.
            row = weights[name].detach().flatten()
            codes, state = functional.quantize_4bit(row, blocksize=64, quant_type="nf4")
            assert torch.equal(packed.codes[: codes.numel()], codes.flatten())
            values = functional.dequantize_4bit(codes, state).view_as(weights[name])
            assert torch.equal(packed.unpack(), values)
            weights[name].data.copy_(values)
        ids = torch.arange(2, 14).view(2, 6)
        with torch.no_grad():
            torch.testing.assert_close(
                packed_model(ids).logits, plain(ids).logits, rtol=0, atol=1e-6
            )


def train_step(mesh, folder, format, sequence_parallel):
    """Returns the loss, and the gradients of LoRA weights on the replicated side by name."""
    parallel = ParallelConfig(sequence_parallel=sequence_parallel)
    model = load(mesh, folder, base_precision=format, parallel_config=parallel).train()
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):
            module.p = 0.0
    return measure(model)


def measure(model):
    add_lora(model, lora_config(r=2, target_modules="all-linear", init_lora_weights="gaussian"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.fill_(0.01)
    ids = torch.arange(2, 14).view(2, 6)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {
        name: parameter.grad.norm().item()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not hasattr(parameter, "shard")
    }
    return loss.item(), grads


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_plain_models_with_these_values(folders, run_mesh, kind):
    model = load(None, folders / kind, base_precision="nf4").train()
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):
            module.p = 0.0
    unpack_parameters(model)
    assert not find_packed_parameters(model)
    loss, grads = measure(model)
    assert len(grads) >= 4
    found_loss, found = train_step(None, folders / kind, "nf4", False)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found == pytest.approx(grads, rel=1e-5)
    for ranks, sequence_parallel in ((2, True), (3, False)):
        work = partial(
            train_step, folder=folders / kind, format="nf4", sequence_parallel=sequence_parallel
        )
        for found_loss, found in run_mesh(ranks, work):
            assert found_loss == pytest.approx(loss, rel=1e-5)
            assert found == pytest.approx(grads, rel=1e-4)


def test_backward_keeps_packed_weights_alone(folders):
    """No tensor as large as an unpacked weight is saved, and merging gives the sum of both."""
    model = load(None, folders / "gpt2", base_precision="int8")
    weights = {p.packing.shape for p in find_packed_parameters(model).values()}
    own = {parameter.data_ptr() for parameter in model.parameters()}
    saved: list[tuple[int, ...]] = []

    def note(tensor):
        if tensor.data_ptr() not in own:
            saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        measure(model)
    assert saved
    assert not [shape for shape in saved if shape in weights or shape[::-1] in weights]
    ids = torch.arange(2, 14).view(2, 6)
    model.eval()
    with torch.no_grad():
        expected = model(ids).logits
        merge_lora(model)
        assert not find_packed_parameters(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_mistakes(folders, tmp_path):
    with pytest.raises(ValueError, match="base_precision packs weights as they are read"):
        load(None, folders / "gpt2", base_precision="nf4", device="meta")
    with pytest.raises(ValueError, match="must be nf4, int8 or fp8, not 'int4'"):
        load(None, folders / "gpt2", base_precision="int4")
    model = load(None, folders / "gpt2", base_precision="nf4")
    with pytest.raises(ValueError, match="packed, so its files hold more"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="which is packed and cannot be trained"):
        add_lora(model, lora_config(r=2, target_modules=["c_attn"], modules_to_save=["c_fc"]))
