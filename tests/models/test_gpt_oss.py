"""gpt-oss beyond the parity table: experts dealt over ranks, and the published files' MXFP4."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 16,
    "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 32, "num_local_experts": 3,
    "num_experts_per_tok": 2, "sliding_window": 5, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """Yields a folder that transformers wrote, and its model in fp64."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gpt-oss")
    config = GptOssConfig(**SIZES, attn_implementation="eager", experts_implementation="eager")
    model = GptOssForCausalLM(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder, model


def run_dealt(folder: str, again: str):
    """On 2 x 2 ranks: the loss of two samples, their whole gradients by name, and this rank's share of both."""
    import torch.distributed as dist

    import shardzoo
    from shardzoo.models.hf_state import hf_state_dict
    from shardzoo.mpu import ParallelMesh
    from shardzoo.mpu.mesh import SAMPLE_AXES

    mesh = ParallelMesh(2, expert_parallel_size=2)
    model = shardzoo.from_pretrained(folder, mesh=mesh, dtype=torch.float64).train()
    model.save_pretrained(again)
    first = mesh.rank_in(*SAMPLE_AXES)
    ids = torch.arange(3, 27).view(2, 12)[first : first + 1]
    output = model(input_ids=ids, labels=ids, num_items_in_batch=22)
    output.loss.backward()
    loss = output.loss.detach().clone()
    dist.all_reduce(loss, group=mesh.group(*SAMPLE_AXES))
    for parameter in model.parameters():
        if not getattr(parameter, "expert_parallel", False):
            dist.all_reduce(parameter.grad, group=mesh.group("data", "context", "expert"))
        parameter.data = parameter.grad
    return loss.item(), hf_state_dict(model), hf_state_dict(model, gather=False)


def test_experts_dealt_over_ranks_equal_transformers(oracle, run_ranks, tmp_path):
    folder, model = oracle
    ids = torch.arange(3, 27).view(2, 12)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    for own_loss, grads, own in run_ranks(4, run_dealt, str(folder), str(tmp_path / "again")):
        assert own_loss == pytest.approx(loss.item(), rel=2e-7)
        assert grads.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(grads[name], value, rtol=2e-5, atol=1e-8)
        # Three experts over two ranks, and half of an expert's columns.
        assert own[stacked].shape[0] in (1, 2)
        assert own[stacked].shape[1:] == (64, 32)
    # What the ranks write together is what transformers wrote.
    written = load_file(tmp_path / "again" / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], value) for name, value in stored.items())


@pytest.fixture(scope="module")
def packed(oracle, tmp_path_factory):
    """A folder like the published ones, whose experts are in MXFP4."""
    source, _ = oracle
    folder = tmp_path_factory.mktemp("mxfp4")
    tensors = {
        name: value.bfloat16() for name, value in load_file(source / "model.safetensors").items()
    }
    generator = torch.Generator().manual_seed(1)
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(256, (*shape, 16), generator=generator)
            scales = torch.randint(115, 127, shape, generator=generator)
            tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
            tensors[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_mxfp4_files_are_refused_with_the_command_that_reads_them(packed):
    import shardzoo

    with pytest.raises(ValueError, match=r"mxfp4.*convert merge FOLDER NEW --dequantize bf16"):
        shardzoo.from_pretrained(packed)


def test_dequantized_shards_are_what_transformers_dequantizes(packed, tmp_path):
    from transformers import GptOssForCausalLM, Mxfp4Config

    from shardzoo.convert import Options, merge, split

    expected = GptOssForCausalLM.from_pretrained(
        packed, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    split(packed, tmp_path / "shards", 2, Options(dequantize="BF16"))
    merge(tmp_path / "shards", tmp_path / "whole", Options())
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.bfloat16()), name
