"""A mixture whose experts are dealt over ranks, with other samples on each, equals transformers'."""

from __future__ import annotations

import pytest
import torch
from expert_ranks import draw_ids, run
from safetensors.torch import load_file

SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 20,
    "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 24, "num_local_experts": 5,
    "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """Yields a folder, and the losses and gradients of six samples in transformers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixtral")
    config = MixtralConfig(**SIZES, attn_implementation="eager", experts_implementation="eager")
    model = MixtralForCausalLM(config).double()
    model.save_pretrained(folder)
    ids = draw_ids(6)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: value.grad for name, value in model.named_parameters()}
    tokens = model.generate(ids[:2, :5], max_new_tokens=6, do_sample=False, eos_token_id=None)
    return folder, loss.item(), grads, tokens


def name_as_in_files(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Unstacks transformers' experts, as its files have them."""
    found: dict[str, torch.Tensor] = {}
    for name, value in grads.items():
        prefix = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for number, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                found[f"{prefix}.{number}.w1.weight"] = gate
                found[f"{prefix}.{number}.w3.weight"] = up
        elif name.endswith("experts.down_proj"):
            for number, matrix in enumerate(value):
                found[f"{prefix}.{number}.w2.weight"] = matrix
        else:
            found[name.replace(".mlp.", ".block_sparse_moe.")] = value
    return found


LAYOUTS = [
    (1, 2, {}),
    (2, 2, {"sequence_parallel": True, "recompute": "full"}),
    (1, 3, {"recompute": "selective"}),
]


@pytest.mark.parametrize(("tensor", "expert", "mode"), LAYOUTS)
def test_loss_gradients_and_tokens_equal_those_of_transformers(
    run_ranks, oracle, tmp_path, tensor, expert, mode
):
    folder, loss, grads, tokens = oracle
    again = tmp_path / "again"
    by_rank = run_ranks(tensor * expert, run, str(folder), str(again), tensor, expert, **mode)
    expected = name_as_in_files(grads)
    norm = sum(value.square().sum().item() for value in grads.values()) ** 0.5
    for own_loss, own_grads, own_norm, own_tokens in by_rank:
        assert own_loss == pytest.approx(loss, rel=2e-7)
        assert own_norm == pytest.approx(norm, rel=1e-6)
        assert torch.equal(own_tokens, tokens)
        found = {name.replace(".mlp.", ".block_sparse_moe."): v for name, v in own_grads.items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=2e-5, atol=1e-8), name
    # What the ranks write together is what transformers wrote.
    written = load_file(again / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


def count_own_parameters(folder: str, tensor: int, expert: int) -> int:
    from shardzoo.models.auto import build_on_meta, find_config
    from shardzoo.mpu import ParallelMesh

    model = build_on_meta(find_config(folder), ParallelMesh(tensor, expert_parallel_size=expert))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("tensor", "expert"), [(1, 2), (2, 2), (1, 3)])
def test_the_estimate_counts_the_parameters_of_the_first_rank(run_ranks, oracle, tensor, expert):
    from shardzoo.models.auto import find_config
    from shardzoo.trainer.estimate.model import Job, model_memory

    folder = str(oracle[0])
    first = run_ranks(tensor * expert, count_own_parameters, folder, tensor, expert)[0]
    job = Job(
        tensor_parallel_size=tensor, expert_parallel_size=expert, precision="fp32", zero_stage=0, length=12
    )  # fmt: skip
    memory = model_memory(find_config(folder), job)
    assert sum(size.local for size in memory.parameters) == first


def test_the_estimate_refuses_layouts_that_the_trainer_refuses(oracle):
    from shardzoo.models.auto import find_config
    from shardzoo.trainer.estimate.model import Job, model_memory

    with pytest.raises(ValueError, match="5 experts of MixtralForCausalLM cannot be dealt over 6"):
        model_memory(find_config(str(oracle[0])), Job(expert_parallel_size=6, precision="fp32"))
    with pytest.raises(ValueError, match="expert_parallel_size=2 does not work with ZeRO"):
        Job(expert_parallel_size=2, zero_stage=3)
    for wrong in ({"precision": "fp16"}, {"optimizer": "muon"}):
        with pytest.raises(ValueError, match="use fp32 or bf16 with adamw"):
            Job(expert_parallel_size=2, **wrong)


def test_the_estimate_divides_the_state_of_experts_among_the_ranks_that_have_them(oracle):
    from shardzoo.models.auto import find_config
    from shardzoo.trainer.estimate.estimate import engine_memory
    from shardzoo.trainer.estimate.model import Job, model_memory

    job = Job(data_parallel_size=3, expert_parallel_size=5, zero_stage=1, length=12)
    memory = model_memory(find_config(str(oracle[0])), job)
    own = sum(
        size.local / (3 if ".experts." in size.name else 15) for size in memory.trained
    )  # one expert of each mixture
    assert engine_memory(memory, job).masters == pytest.approx(4 * own, abs=4 * 2)
