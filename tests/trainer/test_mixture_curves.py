"""Every family of mixtures trains one curve over tensor, expert, data and pipeline ranks, and resumes in any of them.

Twenty steps with dropout, clipping, auxiliary losses or moved corrections, accumulation, and samples of unequal lengths
and numbers of targets. A step has twelve samples.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from every_case import EVERY_CASE, by_turns
from training import endless_losses

SAME_LOSS = {"rel": 1e-5, "abs": 0}
STEPS = 20 if EVERY_CASE else 4
SAVED = STEPS // 2  # the step of the checkpoint with which runs are resumed
SHAPE: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2, "vocab_size": 97,
    "max_position_embeddings": 24, "intermediate_size": 20, "attention_dropout": 0.1, "num_experts_per_tok": 2,
}  # fmt: skip
BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
CORRECTED: dict[str, Any] = {
    **SHAPE, "n_routed_experts": 6, "moe_intermediate_size": 10, "n_group": 3, "topk_group": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
# Five experts, which two, three and four ranks share unequally, and inner features that three ranks cannot divide.
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**SHAPE, **BALANCED, "num_local_experts": 5},
    "qwen2_moe": {
        **SHAPE, **BALANCED, "num_experts": 5, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 13,
    },
    "qwen3_moe": {**SHAPE, **BALANCED, "num_experts": 5, "moe_intermediate_size": 10, "head_dim": 4},
    "olmoe": {**SHAPE, **BALANCED, "num_experts": 5, "num_key_value_heads": 6},
    "gpt_oss": {**SHAPE, **BALANCED, "num_local_experts": 5, "head_dim": 8, "sliding_window": 7},
    "glm4_moe": {**CORRECTED, "head_dim": 8, "use_qk_norm": True},
    "deepseek_v3": {
        **CORRECTED, "num_key_value_heads": 6, "q_lora_rank": 11, "kv_lora_rank": 9, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 7,
    },
    "switch_transformers": {
        "d_model": 24, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 6,
        "vocab_size": 97, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 5,
        "expert_capacity": 6, "router_jitter_noise": 0.0, "router_z_loss_coef": 0.2, "decoder_start_token_id": 0,
        **BALANCED,
    },
    "nllb-moe": {
        "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 6, "encoder_ffn_dim": 20, "decoder_layers": 2,
        "decoder_attention_heads": 6, "decoder_ffn_dim": 20, "vocab_size": 97, "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0, "num_experts": 5, "encoder_sparse_step": 2, "decoder_sparse_step": 1,
        "expert_capacity": 999, **BALANCED,
    },
}  # fmt: skip


class Layout(NamedTuple):
    """How many ranks an axis has, and further arguments of the trainer."""

    tensor: int = 1
    expert: int = 1
    data: int = 1
    stages: int = 1
    arguments: dict[str, Any] = {}  # noqa: RUF012 - of a tuple, and never changed
    context: int = 1


LAYOUTS = {
    "TP 2 x EP 2, SP": Layout(2, 2, arguments={"sequence_parallel": True, "recompute": "full"}),
    "EP 2 x PP 2": Layout(1, 2, 1, 2, {"zero_stage": 1}),
    "EP 2 x DP 2, ZeRO 2": Layout(1, 2, 2, arguments={"zero_stage": 2}),
    "TP 2 x DP 2, ZeRO 1, SP": Layout(
        2, 1, 2, arguments={"zero_stage": 1, "sequence_parallel": True}
    ),
    "EP 4": Layout(1, 4),
    "PP 2 x TP 2": Layout(2, 1, 1, 2, {"recompute": "selective"}),
    "EP 2 x DP 2, DDP": Layout(1, 2, 2, arguments={"env_type": "pytorchDDP"}),
    "TP 3": Layout(3, arguments={"micro_batch_size": 3}),
    "EP 3": Layout(1, 3, arguments={"micro_batch_size": 2, "zero_stage": 0}),
    "DP 4, ZeRO 2": Layout(
        1, 1, 4, arguments={"micro_batch_size": 1, "zero_stage": 2, "env_type": "deepspeed"}
    ),
    "PP 2 x DP 2": Layout(1, 1, 2, 2, {"micro_batch_size": 3}),
    "one micro-batch": Layout(1, 2, arguments={"micro_batch_size": 6}),
}
NAMES = list(LAYOUTS)
FSDP: dict[str, Any] = {"env_type": "fsdp"}
FURTHER_LAYOUTS = {
    "FSDP over EP 2 x DP 2": Layout(1, 2, 2, arguments=FSDP),
    "FSDP over EP 4, recomputed": Layout(1, 4, arguments={**FSDP, "recompute": "full"}),
    "CP 2 x EP 2": Layout(1, 2, arguments={"zero_stage": 1}, context=2),
    "FSDP over CP 2 x EP 2": Layout(1, 2, arguments=FSDP, context=2),
}
# Neighbors in this list differ in family and in layout, so that every part of it is a mixed one.
CASES = [
    (family, NAMES[(number + turn) % len(NAMES)])
    for turn in range(len(NAMES))
    for number, family in enumerate(CONFIGS)
]


def _train(family: str, layout: Layout, folder: Path, **changes: Any) -> list[float]:
    from shardzoo.mpu import ParallelMesh

    mesh = ParallelMesh(layout.tensor, layout.stages, layout.context, layout.expert)
    settings: dict[str, Any] = {
        "train_steps": STEPS, "global_batch_size": 12, "micro_batch_size": 12 // mesh.size("data", "expert") // 2,
        "expert_parallel_size": layout.expert, "context_parallel_size": layout.context, **layout.arguments, **changes,
    }  # fmt: skip
    if family == "nllb-moe":
        settings["lr"] = 2e-3  # Its scaled embeddings amplify what is rounded elsewhere.
    if family in ("glm4_moe", "deepseek_v3"):
        settings["router_bias_update_rate"] = 0.01
    return endless_losses(mesh, folder, {"model_type": family, **CONFIGS[family]}, **settings)


@pytest.fixture(scope="module")
def unsplit(run_ranks, tmp_path_factory):
    """`unsplit(family)`: the losses of one process, which are computed once."""
    known: dict[str, list[float]] = {}

    def losses(family: str) -> list[float]:
        if family not in known:
            [known[family]] = run_ranks(1, _train, family, Layout(), tmp_path_factory.mktemp("one"))
        return known[family]

    return losses


@pytest.fixture
def train(run_ranks, tmp_path):
    """`train(family, layout, folder, …)`: the losses, which are the same on all ranks."""

    def run(family: str, layout: Layout, folder: str, **changes: Any) -> list[float]:
        ranks = layout.tensor * layout.expert * layout.data * layout.stages * layout.context
        training = partial(_train, family, layout, tmp_path / folder, **changes)
        by_rank = run_ranks(ranks, training)
        assert all(losses == by_rank[0] for losses in by_rank)
        return by_rank[0]

    return run


@pytest.mark.parametrize(("family", "name"), by_turns(CASES, 58))
def test_every_family_trains_and_resumes_in_every_layout(train, unsplit, tmp_path, family, name):
    layout = LAYOUTS[name]
    other = LAYOUTS[NAMES[(NAMES.index(name) + 5) % len(NAMES)]]
    expected = unsplit(family)
    losses = train(family, layout, "run", save_interval=SAVED)
    assert losses == pytest.approx(expected, **SAME_LOSS)
    # Resumed in the same layout nothing changes, and in another one only what is rounded elsewhere.
    start = str(tmp_path / "run" / "checkpoints" / f"step-{SAVED:06d}")
    assert train(family, layout, "again", load_dir=start) == losses[SAVED:]
    resumed = train(family, other, "other", load_dir=start)
    assert resumed == pytest.approx(expected[SAVED:], **SAME_LOSS)


def _train_with_large_parameters(layout: Layout, folder: Path) -> tuple[list[float], int]:
    """The losses, and the number of parameters that count as large, which DDP does not exchange."""
    from shardzoo.trainer.engines import ddp_engine

    counts: list[int] = []
    usual, list_large = ddp_engine.SMALLEST, ddp_engine._list_large

    def note(model: Any, experts: set[str]) -> Any:
        large = list_large(model, experts)
        counts.append(len(large))
        return large

    ddp_engine.SMALLEST = 500
    ddp_engine._list_large = note
    try:
        return _train("mixtral", layout, folder, train_steps=2), counts[0]
    finally:
        ddp_engine.SMALLEST = usual
        ddp_engine._list_large = list_large


def test_ddp_adds_up_large_gradients_where_they_are(run_ranks, tmp_path):
    """Two steps: the first one's gradients decide the second one's loss."""
    [expected] = run_ranks(1, partial(_train, "mixtral", Layout(), tmp_path / "one", train_steps=2))
    layout = Layout(1, 2, arguments={"env_type": "pytorchDDP"})
    for losses, large in run_ranks(2, _train_with_large_parameters, layout, tmp_path / "two"):
        assert large > 2
        assert losses == pytest.approx(expected, **SAME_LOSS)


FURTHER_CASES = [
    (family, name)
    for family in CONFIGS
    for name, layout in FURTHER_LAYOUTS.items()
    # An expert's capacity counts the tokens of a whole sequence.
    if layout.context == 1 or family not in ("switch_transformers", "nllb-moe")
]


@pytest.mark.before_release
@pytest.mark.parametrize(("family", "name"), FURTHER_CASES)
def test_every_family_trains_and_resumes_where_else_experts_are_dealt(
    train, unsplit, tmp_path, family, name
):
    layout = FURTHER_LAYOUTS[name]
    expected = unsplit(family)
    losses = train(family, layout, "run", save_interval=SAVED)
    assert losses == pytest.approx(expected, **SAME_LOSS)
    start = str(tmp_path / "run" / "checkpoints" / f"step-{SAVED:06d}")
    assert train(family, layout, "again", load_dir=start) == losses[SAVED:]
    resumed = train(family, LAYOUTS["EP 2 x DP 2, DDP"], "other", load_dir=start)
    assert resumed == pytest.approx(expected[SAVED:], **SAME_LOSS)


@pytest.mark.before_release
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "switch_transformers"])
def test_dealt_experts_are_updated_within_the_backward_pass(train, tmp_path, family):
    changes = {"clip_grad": 0.0, "optimizer_in_backward": True, "env_type": "fsdp"}
    expected = train(family, Layout(), "one", clip_grad=0.0, micro_batch_size=12)
    split = train(family, Layout(1, 2, 2), "split", micro_batch_size=3, **changes)
    assert split == pytest.approx(expected, **SAME_LOSS)
