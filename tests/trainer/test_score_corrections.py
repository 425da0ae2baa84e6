"""Corrections of a router's scores: moved after each step by the choices of the global batch, in every layout alike."""

from __future__ import annotations

import pytest
import torch
from every_case import every_day
from tiny_models import tiny
from training import Pairs, run_training

RATE = 0.01
CONFIG = tiny("glm4_moe", 0.1, vocab_size=64, hidden_size=24, num_attention_heads=4, layers=4)


class EvenPairs(Pairs):
    """Samples of 4 to 10 tokens, which two ranks can share."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        length = len(sample["input_ids"]) // 2 * 2
        return {name: value[:length] for name, value in sample.items()}


def build(mesh, changes=None, **options):
    """A model whose scores are far enough apart that rounding changes no choice."""
    from shardzoo.models import ParallelConfig, from_config

    model = from_config(
        {**CONFIG, **(changes or {})}, mesh, seed=3, parallel_config=ParallelConfig(**options)
    )
    for name, weight in model.named_parameters():
        if name.endswith("router.weight"):
            weight.data.mul_(20)
    return model


def train(mesh, folder, options=None, changes=None, **arguments):
    """Returns the losses, and the corrections [mixtures of this rank's stage, E]."""
    size = 1 if mesh is None else mesh.size("data", "expert")
    settings = {
        "env_type": "deepspeed+mpu", "router_bias_update_rate": RATE, "micro_batch_size": 8 // size, "train_steps": 4,
        "global_batch_size": 8, **arguments,
    }  # fmt: skip
    steps, weights = run_training(
        mesh,
        folder,
        model=lambda mesh: build(mesh, changes, **(options or {})),
        data=EvenPairs(8),
        **settings,
        **({} if mesh is None else {"model_parallel_size": mesh.tp_size}),
    )
    found = [value for name, value in weights.items() if name.endswith("correction.value")]
    assert all(value.dtype == torch.float32 for value in found)
    return [step["loss"] for step in steps], torch.stack(found)


def test_the_first_step_follows_the_choices_of_transformers(run_mesh, tmp_path):
    """Padding is not counted, dropout is off, and the samples come in two micro-batches."""
    import transformers

    build(None, {"attention_dropout": 0.0}).save_pretrained(tmp_path / "hf")
    theirs = transformers.Glm4MoeForCausalLM.from_pretrained(tmp_path / "hf")
    counts = torch.zeros(3, 6, dtype=torch.long)
    for number in range(8):
        ids = EvenPairs(8)[number]["input_ids"][None]
        for layer, scores in enumerate(
            theirs(input_ids=ids, output_router_logits=True).router_logits
        ):
            groups = scores.sigmoid().view(-1, 3, 2)
            best = groups.sum(-1).topk(2).indices
            is_open = torch.zeros(len(groups), 3, dtype=torch.bool).scatter(1, best, True)
            chosen = groups.masked_fill(~is_open[..., None], -1).flatten(1).topk(2).indices
            counts[layer] += chosen.flatten().bincount(minlength=6)
    expected = RATE * (counts.double().mean(1, keepdim=True) - counts).sign()
    assert expected.any()
    changes = {"attention_dropout": 0.0}
    [(_, found)] = run_mesh(
        1, train, tmp_path / "run", None, changes, train_steps=1, micro_batch_size=4
    )
    assert torch.equal(found, expected.float())


LAYOUTS = {
    "TP 2 x DP 2": (
        2, {"data": 2}, {"zero_stage": 1, "micro_batch_size": 2}, {"sequence_parallel": True, "recompute": "full"}
    ),
}  # fmt: skip
MORE = {
    "DDP": (1, {"data": 2}, {"env_type": "pytorchDDP"}, {}),
    "FSDP": (1, {"data": 2}, {"env_type": "fsdp"}, {}),
    "ZeRO 2": (1, {"data": 2}, {"zero_stage": 2, "micro_batch_size": 1}, {}),
    "pipeline": (1, {"pipeline": 2}, {"micro_batch_size": 4}, {"recompute": "selective"}),
}


@pytest.mark.parametrize("name", every_day(LAYOUTS, more=MORE))
def test_every_layout_changes_them_alike(run_mesh, tmp_path, name):
    tp, axes, arguments, options = (LAYOUTS | MORE)[name]
    [(losses, corrections)] = run_mesh(1, train, tmp_path / "one")
    assert corrections.abs().max() > 2.5 * RATE
    ranks = run_mesh(tp, train, tmp_path / "run", options, **arguments, **axes)
    for own_losses, own in ranks:
        assert own_losses == pytest.approx(losses, rel=1e-5)
        # A stage has those of its own blocks.
        assert torch.equal(own, corrections) or ("pipeline" in axes and len(own) < len(corrections))
    if "pipeline" in axes:
        stages = {tuple(own.flatten().tolist()): own for _, own in ranks}
        assert torch.equal(torch.cat(list(stages.values())), corrections)


def _train_dealt(tensor, expert, folder, **arguments):
    from shardzoo.mpu import ParallelMesh

    mesh = ParallelMesh(tensor, expert_parallel_size=expert)
    return train(mesh, folder, None, None, expert_parallel_size=expert, **arguments)


@pytest.mark.before_release
def test_dealt_experts_change_them_alike(run_ranks, run_mesh, tmp_path):
    [(losses, corrections)] = run_mesh(1, train, tmp_path / "one")
    for own_losses, own in run_ranks(4, _train_dealt, 2, 2, tmp_path / "run", zero_stage=None):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert torch.equal(own, corrections)


def test_a_resumed_run_goes_on_with_them(run_mesh, tmp_path):
    settings = {"precision": "bf16", "save_interval": 2, "env_type": "pytorch"}
    losses, corrections = train(None, tmp_path / "run", **settings)
    start = str(tmp_path / "run" / "checkpoints" / "step-000002")
    again, same = train(None, tmp_path / "again", load_dir=start, **settings)
    assert again == losses[2:]
    assert torch.equal(same, corrections)
    # No bf16 number is one of these.
    assert not torch.equal(corrections, corrections.bfloat16().float())


def test_a_model_without_corrections_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"router_bias_update_rate=0\.01 needs a mixture"):
        run_training(None, tmp_path, env_type="pytorch", router_bias_update_rate=RATE)


def test_adapters_leave_them_alone():
    from shardzoo.trainer import TrainingArguments

    with pytest.raises(ValueError, match="would change the model that LoRA weights are added to"):
        TrainingArguments(router_bias_update_rate=RATE, lora_rank=2, train_steps=1)
