"""Mixtures of experts train the same curve under every layout, with the auxiliary loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import by_turns, every_day
from training import endless_losses

MIXTURE = {
    "model_type": "mixtral", "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3,
    "num_hidden_layers": 2, "intermediate_size": 20, "vocab_size": 97, "max_position_embeddings": 24,
    "attention_dropout": 0.1, "num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
}  # fmt: skip
SPARSE_LAYERS = {
    "model_type": "qwen3_moe", "num_experts": 5, "moe_intermediate_size": 20, "head_dim": 4, "mlp_only_layers": [1],
}  # fmt: skip
SAME_LOSS = {"rel": 1e-5, "abs": 0}


@pytest.fixture
def train(run_mesh, tmp_path):
    def run(
        tp: int, data: int = 1, folder: str = "run", config=MIXTURE, stages: int = 1, **changes
    ) -> list[float]:
        training = partial(endless_losses, folder=tmp_path / folder, config=config, **changes)
        by_rank = run_mesh(tp, training, data=data, pipeline=stages)
        assert all(losses == by_rank[0] for losses in by_rank)
        return by_rank[0]

    return run


ENCODER_DECODERS = {
    "switch_transformers": {
        "d_model": 24, "d_kv": 4, "d_ff": 30, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 6,
        "vocab_size": 97, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 3,
        "expert_capacity": 9, "router_jitter_noise": 0.0, "router_z_loss_coef": 0.2, "router_aux_loss_coef": 0.3,
        "decoder_start_token_id": 0, "output_router_logits": True,
    },
    "nllb-moe": {
        "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 6, "encoder_ffn_dim": 30, "decoder_layers": 2,
        "decoder_attention_heads": 6, "decoder_ffn_dim": 30, "vocab_size": 97, "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0, "num_experts": 3, "encoder_sparse_step": 2, "decoder_sparse_step": 1,
        "expert_capacity": 999, "router_aux_loss_coef": 0.3, "output_router_logits": True,
    },
}  # fmt: skip

LAYOUTS = {"TP 2 x DP 2, ZeRO 1": (2, 2, {"zero_stage": 1, "sequence_parallel": True})}
MORE = {
    "DP 4": (1, 4, {"zero_stage": 0}),
    "DDP": (1, 2, {"env_type": "pytorchDDP"}),
    "ZeRO 2": (2, 2, {"zero_stage": 2}),
    "one micro-batch": (2, 1, {"micro_batch_size": 8}),
    "PP 2 x DP 2": (1, 2, {"stages": 2, "zero_stage": 1}),
}


@pytest.mark.parametrize("name", every_day(list(LAYOUTS), more=list(MORE)))
def test_every_layout_trains_the_same_curve(train, name):
    tp, data, changes = (LAYOUTS | MORE)[name]
    expected = train(1, folder="unsplit")
    assert train(tp, data, **changes) == pytest.approx(expected, **SAME_LOSS)


def _train_dealt(
    tensor: int,
    expert: int,
    folder: Path,
    config: dict[str, Any],
    stages: int = 1,
    context: int = 1,
    **changes: Any,
) -> list[float]:
    from shardzoo.mpu import ParallelMesh

    mesh = ParallelMesh(tensor, stages, context, expert)
    size = mesh.size("data", "expert")
    settings = {
        "micro_batch_size": 4 // size,
        "zero_stage": None,
        "context_parallel_size": context,
        **changes,
    }
    return endless_losses(mesh, folder, config, expert_parallel_size=expert, **settings)


@pytest.fixture
def deal(run_ranks, tmp_path):
    """`deal(tensor, expert, processes)`: trains with experts that are dealt over ranks."""

    def run(
        tensor: int, expert: int, processes: int, folder: str = "dealt", config=MIXTURE, **changes
    ):
        training = partial(_train_dealt, folder=tmp_path / folder, config=config, **changes)
        by_rank = run_ranks(processes, training, tensor, expert)
        assert all(losses == by_rank[0] for losses in by_rank)
        return by_rank[0]

    return run


DEALT = {
    "TP 2 x EP 2": (2, 2, 4, {"sequence_parallel": True, "recompute": "full"}),
    "EP 2 x DP 2, DDP": (1, 2, 4, {"env_type": "pytorchDDP"}),
}
MORE_DEALT = {
    "EP 2 x DP 2, ZeRO 2": (1, 2, 4, {"zero_stage": 2}),
    "EP 2 x DP 2, ZeRO 1": (1, 2, 4, {"zero_stage": 1, "env_type": "deepspeed"}),
    "EP 2 x DP 2": (1, 2, 4, {"zero_stage": 0}),
    "EP 2 x PP 2, ZeRO 1": (1, 2, 4, {"stages": 2, "zero_stage": 1}),
    "EP 2 x PP 2": (1, 2, 4, {"stages": 2, "zero_stage": 0}),
    "EP 2 x CP 2": (1, 2, 4, {"context": 2, "recompute": "selective"}),
    "EP 2 x CP 2, DDP": (1, 2, 4, {"context": 2, "env_type": "pytorchDDP"}),
    "EP 4": (1, 4, 4, {}),
    "EP 2 x DP 2, FSDP": (1, 2, 4, {"env_type": "fsdp", "recompute": "full"}),
    "TP 2 x EP 2, FSDP": (2, 2, 4, {"env_type": "fsdp", "sequence_parallel": True}),
    "EP 2 x CP 2, FSDP": (1, 2, 4, {"env_type": "fsdp", "context": 2}),
    "EP 2 x DP 2, FSDP, replicas": (1, 2, 4, {"env_type": "fsdp", "fsdp_replicas": 2}),
    "EP 2, FSDP, offloaded": (1, 2, 2, {"env_type": "fsdp", "offload_optimizer": True}),
    "one micro-batch": (1, 2, 2, {"micro_batch_size": 4}),
}


@pytest.mark.parametrize("name", by_turns(DEALT | MORE_DEALT, 9))
def test_dealt_experts_train_the_same_curve_and_resume_anywhere(train, deal, tmp_path, name):
    tensor, expert, processes, changes = (DEALT | MORE_DEALT)[name]
    expected = train(1, folder="unsplit", save_interval=4)
    losses = deal(tensor, expert, processes, save_interval=4, **changes)
    assert losses == pytest.approx(expected, **SAME_LOSS)
    # Resumed in the same layout, in one process, and with experts dealt anew.
    start = str(tmp_path / "dealt" / "checkpoints" / "step-000004")
    resumed = deal(tensor, expert, processes, folder="again", load_dir=start, **changes)
    assert resumed == losses[4:]
    assert train(1, folder="one", load_dir=start) == pytest.approx(losses[4:], **SAME_LOSS)
    start = str(tmp_path / "unsplit" / "checkpoints" / "step-000004")
    again = deal(tensor, expert, processes, folder="dealt again", load_dir=start, **changes)
    assert again == pytest.approx(expected[4:], **SAME_LOSS)


EXPERTS = {"lora_target_parameters": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")}
BOTH = {**EXPERTS, "lora_target_modules": ("q_proj", "o_proj")}
ADAPTED = {
    "TP 2 x EP 2, both": (2, 2, 4, {"zero_stage": 1, "sequence_parallel": True}, BOTH),
    "EP 2 x DP 2, attention, ZeRO 1": (1, 2, 4, {"zero_stage": 1}, {"lora_dropout": 0.1}),
    "EP 2 x DP 2, both, ZeRO 2": (1, 2, 4, {"zero_stage": 2, "recompute": "full"}, BOTH),
    "EP 2 x DP 2, both, DDP": (1, 2, 4, {"env_type": "pytorchDDP"}, BOTH),
    "EP 2 x DP 2, experts, FSDP": (1, 2, 4, {"env_type": "fsdp"}, EXPERTS),
    "EP 2 x PP 2, experts": (1, 2, 4, {"stages": 2, "zero_stage": 1}, EXPERTS),
}


@pytest.mark.parametrize("name", by_turns(ADAPTED, 6))
def test_adapters_train_beside_and_in_dealt_experts(train, deal, tmp_path, name):
    tensor, expert, processes, changes, adapter = ADAPTED[name]
    adapter = {"lora_rank": 2, "lora_alpha": 8, **adapter}
    expected = train(1, folder="unsplit", save_interval=4, **adapter)
    changes = {**changes, **adapter, "save_interval": 4}
    losses = deal(tensor, expert, processes, **changes)
    assert losses == pytest.approx(expected, **SAME_LOSS)


def test_experts_alone_are_refused_where_an_engine_needs_more(deal):
    adapter = {"lora_rank": 2, **EXPERTS, "train_steps": 1}
    with pytest.raises(AssertionError, match=r"only experts that are dealt .* are trained"):
        deal(1, 2, 2, env_type="pytorchDDP", **adapter)


NORMS = {
    "EP 2 x DP 2, ZeRO 2": (1, 2, 4, {"zero_stage": 2}),
    "TP 2 x EP 2, ZeRO 1": (2, 2, 4, {"zero_stage": 1}),
    "EP 2 x PP 2": (1, 2, 4, {"stages": 2, "zero_stage": 0}),
    "EP 2 x DP 2, DDP": (1, 2, 4, {"env_type": "pytorchDDP"}),
    "EP 2 x CP 2, ZeRO 1": (1, 2, 4, {"context": 2, "zero_stage": 1}),
    "EP 2 x DP 2, FSDP": (1, 2, 4, {"env_type": "fsdp"}),
}


@pytest.mark.parametrize("name", by_turns(NORMS, 6))
def test_the_norm_counts_each_expert_once(train, deal, name):
    """AdamW would hide a norm that is off by a factor."""
    changes = {"logged": "grad_norm", "train_steps": 2}
    expected = train(1, folder="unsplit", **changes)
    tensor, expert, processes, layout = NORMS[name]
    norms = deal(tensor, expert, processes, **layout, **changes)
    assert norms == pytest.approx(expected, **SAME_LOSS)


NARROW = {
    "EP 2 x DP 2, ZeRO 1": (1, 2, 4, {"zero_stage": 1}),
    "TP 2 x EP 2, ZeRO 2": (2, 2, 4, {"zero_stage": 2, "sequence_parallel": True}),
    "EP 2 x PP 2": (1, 2, 4, {"stages": 2}),
    "EP 2 x DP 2, DDP": (1, 2, 4, {"env_type": "pytorchDDP"}),
    "EP 2 x DP 2, FSDP": (1, 2, 4, {"env_type": "fsdp"}),
}


@pytest.mark.parametrize("name", by_turns(NARROW, 5))
def test_dealt_experts_train_in_bf16(train, deal, tmp_path, name):
    """Close to one process, whose sums are rounded elsewhere; and a resumed run is the same."""
    tensor, expert, processes, changes = NARROW[name]
    changes = {**changes, "precision": "bf16", "train_steps": 6, "save_interval": 4}
    expected = train(1, folder="unsplit", precision="bf16", train_steps=6)
    losses = deal(tensor, expert, processes, **changes)
    assert losses == pytest.approx(expected, rel=1e-2)
    start = str(tmp_path / "dealt" / "checkpoints" / "step-000004")
    assert deal(tensor, expert, processes, folder="again", load_dir=start, **changes) == losses[4:]
    norm = {**changes, "logged": "grad_norm", "train_steps": 1}
    expected = train(1, folder="norm", precision="bf16", logged="grad_norm", train_steps=1)
    norms = deal(tensor, expert, processes, folder="dealt norm", **norm)
    assert norms == pytest.approx(expected, rel=1e-2)


REFUSED = [
    ({"env_type": "pytorch"}, "env_type='pytorch'"),
    ({"zero_stage": 3, "env_type": "deepspeed"}, "zero_stage=3"),
    ({"offload_optimizer": True}, "offload_optimizer"),
    ({"optimizer": "muon"}, "optimizer='muon'"),
    ({"precision": "fp16"}, "precision='fp16'"),
    ({"torch_compile": True}, "torch_compile"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_what_does_not_work_with_dealt_experts_is_refused_at_once(changes, named):
    from shardzoo.trainer import TrainingArguments

    settings = {"env_type": "deepspeed+mpu", "expert_parallel_size": 2, "train_steps": 1}
    with pytest.raises(ValueError, match="expert_parallel_size=2 does not work with") as caught:
        TrainingArguments(**{**settings, **changes})
    assert named in str(caught.value)


def test_a_stage_without_experts_is_refused_in_bf16(deal):
    config = {**MIXTURE, **SPARSE_LAYERS}
    with pytest.raises(
        AssertionError, match=r"pipeline stage 1 has no experts, .*use fewer stages"
    ):
        deal(1, 2, 4, config=config, stages=2, precision="bf16", train_steps=1)


def _train_without_experts(folder: Path) -> str:
    from shardzoo.mpu import ParallelMesh

    mesh = ParallelMesh(expert_parallel_size=2)
    dense = {**MIXTURE, "model_type": "mistral"}
    for name in ("num_local_experts", "num_experts_per_tok", "output_router_logits"):
        del dense[name]
    del dense["router_aux_loss_coef"]
    try:
        endless_losses(
            mesh, folder, dense, expert_parallel_size=2, zero_stage=None, micro_batch_size=2
        )
    except ValueError as error:
        return str(error)
    return ""


def _join_another_mesh(folder: Path, expert: int, asked: int) -> str:
    from shardzoo.mpu import ParallelMesh
    from shardzoo.trainer import Trainer, TrainingArguments

    arguments = TrainingArguments(
        env_type="deepspeed+mpu", expert_parallel_size=asked, train_steps=1, save_dir=str(folder)
    )
    try:
        Trainer(arguments, mesh=ParallelMesh(expert_parallel_size=expert))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("expert", "asked"), [(1, 2), (2, 1)])
def test_a_mesh_of_another_expert_axis_is_refused(run_ranks, tmp_path, expert, asked):
    for message in run_ranks(2, _join_another_mesh, tmp_path, expert, asked):
        assert f"over {expert} processes, but expert_parallel_size is {asked}" in message


def test_a_model_without_experts_is_refused(run_ranks, tmp_path):
    [message, _] = run_ranks(2, _train_without_experts, tmp_path)
    assert "has none; use expert_parallel_size=1" in message


def test_the_auxiliary_loss_is_in_the_loss(train):
    plain = train(
        1, folder="plain", config={**MIXTURE, "output_router_logits": False}, train_steps=1
    )
    balanced = train(1, folder="balanced", train_steps=1)
    assert balanced[0] - plain[0] == pytest.approx(0.3 * 2, rel=0.1)  # 2: experts of a token


@pytest.mark.before_release
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(train, tmp_path):
    losses = train(2, folder="run", save_interval=4)
    start = str(tmp_path / "run" / "checkpoints" / "step-000004")
    assert train(2, folder="again", load_dir=start) == losses[4:]
    other = train(1, folder="other", load_dir=start)
    assert other == pytest.approx(losses[4:], **SAME_LOSS)


STAGED = {
    "mixtral": (MIXTURE, 2, {"sequence_parallel": True}),
    **{
        family: ({"model_type": family, **sizes}, 2, {"recompute": "full"})
        for family, sizes in ENCODER_DECODERS.items()
    },
}
MORE_STAGED = {
    "a stage without mixtures": ({**MIXTURE, **SPARSE_LAYERS}, 1, {}),
    "mixtral, one pipeline": (MIXTURE, 1, {}),
    "switch_transformers, four stages": (STAGED["switch_transformers"][0], 1, {"stages": 4}),
}


@pytest.mark.parametrize("name", by_turns(STAGED | MORE_STAGED, 3))
def test_pipelines_add_the_auxiliary_losses_of_all_layers(train, name):
    config, tensor, changes = (STAGED | MORE_STAGED)[name]
    expected = train(1, folder="unsplit", config=config)
    losses = train(tensor, config=config, **{"stages": 2, **changes})
    assert losses == pytest.approx(expected, **SAME_LOSS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_travel_behind_narrower_hidden_states_bit_for_bit(dtype):
    from shardzoo.models.pipeline import pack_numbers, unpack_numbers

    generator = torch.Generator().manual_seed(1)
    wide = torch.promote_types(dtype, torch.float32)
    hidden = torch.randn(3, 5, 7, generator=generator).to(dtype).requires_grad_()
    numbers = torch.randn(3, 11, generator=generator).to(wide).requires_grad_()
    joined = torch.cat([hidden, pack_numbers(numbers, hidden)], 1)
    assert joined.dtype == dtype
    received = joined.detach().clone().requires_grad_()
    first, second = unpack_numbers(received, 11)
    assert torch.equal(first, hidden)
    assert torch.equal(second, numbers)
    weights = torch.randn(3, 11, generator=generator).to(wide)
    ((second * weights).sum() + (first * 3).sum()).backward()
    joined.backward(received.grad)
    assert torch.equal(numbers.grad, weights)
    assert torch.equal(hidden.grad, torch.full_like(hidden, 3))


def test_a_pipeline_refuses_scores_where_no_loss_needs_them(run_mesh):
    [message, *_] = run_mesh(1, _call, pipeline=2)
    assert "not supported with pipeline parallelism in a MixtralModel" in message


def _call(mesh) -> str:
    from shardzoo.models import from_config

    model = from_config({**MIXTURE, "architectures": ["MixtralModel"]}, mesh)
    ids = torch.arange(8)[None]
    try:
        model(input_ids=ids)
    except ValueError as error:
        return str(error)
    return ""
