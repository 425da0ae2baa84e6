"""Training LoRA weights: every layout takes peft's steps, only they change, and a stopped run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from every_case import EVERY_CASE, by_turns, every_day
from safetensors.torch import load_file
from tiny_models import hf_model, save_glm, text
from training import Pairs, losses, run_training

from shardzoo.data import train_tokenizer
from shardzoo.models import from_pretrained
from shardzoo.models.lora import load_adapter, merge_lora, save_adapter

# Losses in fp32 differ by the order of sums alone.
SAME_LOSS = {"rel": 1e-5, "abs": 0}
STEPS = 20 if EVERY_CASE else 8
RUN = {
    "train_steps": STEPS,
    "lr": 5e-3,
    "clip_grad": 0.5,
    "micro_batch_size": 4,
    "weight_decay": 0.1,
    "vocab_size": 60,
}
SETTINGS = {
    "t5": ("T5ForConditionalGeneration", {"num_layers": 2, "num_decoder_layers": 2}, ["q", "v", "wi"], None),
    "llama": (
        "LlamaForCausalLM", {"tie_word_embeddings": False}, ["q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"],
        ["lm_head"],
    ),
    "gpt2": ("GPT2LMHeadModel", {}, ["c_attn", "mlp.c_proj"], None),
}  # fmt: skip
# (tensor-parallel, data-parallel and pipeline size, arguments)
LAYOUTS = [
    (1, 1, 1, {}),
    (2, 1, 1, {"zero_stage": 1}),
    (4, 1, 1, {"sequence_parallel": True}),
    (2, 2, 1, {"zero_stage": 2}),
    (1, 1, 2, {}),
    (2, 1, 2, {"zero_stage": 0}),
    (1, 2, 1, {"env_type": "pytorchDDP"}),
]


class Even(Pairs):
    """Equal lengths, which a split of the sequence needs."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, 60, (8,), generator=generator)
        labels = ids.flip(0)
        labels[: index % 3] = -100
        return {"input_ids": ids, "labels": labels}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """`bases(kind)`: a folder with base/ and peft's initial adapter/, and peft's losses and final weights."""
    made: dict[str, Any] = {}

    def make(kind: str) -> tuple[Path, list[float], dict[str, torch.Tensor]]:
        if kind not in made:
            architecture, changes, targets, saved = SETTINGS[kind]
            folder = tmp_path_factory.mktemp(kind)
            model = hf_model(architecture, 0.0, vocab_size=64, **changes)
            model.save_pretrained(folder / "base")
            config = peft.LoraConfig(
                r=4, lora_alpha=8, target_modules=targets, modules_to_save=saved
            )
            wrapped = peft.get_peft_model(model, config)
            wrapped.save_pretrained(folder / "adapter")
            steps, _ = run_training(
                None, folder / "peft", model=wrapped, data=Even(96), **arguments({})
            )
            made[kind] = folder, losses(steps), peft.get_peft_model_state_dict(wrapped)
        return made[kind]

    return make


def arguments(changes: dict[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in RUN.items() if name != "vocab_size"}, **changes}


def adapted(mesh: Any, folder: Path, parallel: bool = False) -> Any:
    from shardzoo.models import ParallelConfig

    model = from_pretrained(
        folder / "base", mesh, parallel_config=ParallelConfig(sequence_parallel=parallel)
    )
    load_adapter(model, folder / "adapter")
    return model


def train_on_rank(mesh: Any, folder: Path, run: str, changes: dict[str, Any]) -> Any:
    model = adapted(mesh, folder, changes.get("sequence_parallel", False))
    frozen = {
        name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
    }
    given = {
        "env_type": "deepspeed+mpu", "model_parallel_size": mesh.tp_size, "pipeline_parallel_size": mesh.pp_size,
        "micro_batch_size": 4 // mesh.dp_size,
    }  # fmt: skip
    steps, after = run_training(
        mesh, folder / run, model=model, data=Even(96), **{**arguments({}), **given, **changes}
    )
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    save_adapter(model, folder / f"{run}-adapter")
    return steps


EVERY_DAY = [("t5", 3), ("t5", 6), ("llama", 2), ("gpt2", 5)]


@pytest.mark.parametrize(
    ("kind", "layout"),
    by_turns(
        every_day(
            EVERY_DAY, more=[("t5", 0), ("t5", 1), ("t5", 2), ("t5", 4), ("t5", 5), ("llama", 4)]
        ),
        4,
    ),
)
def test_every_layout_takes_the_steps_of_peft(bases, run_mesh, kind, layout):
    tp, data, stages, changes = LAYOUTS[layout]
    folder, expected, weights = bases(kind)
    run = f"run-{tp}-{data}-{stages}"
    for steps in run_mesh(tp, train_on_rank, folder, run, changes, data=data, pipeline=stages):
        assert losses(steps) == pytest.approx(expected, **SAME_LOSS)
    stored = load_file(folder / f"{run}-adapter" / "adapter_model.safetensors")
    assert stored.keys() == weights.keys()
    for name, value in weights.items():
        # AdamW divides gradients by their own size, so rounding in the smallest ones is enlarged.
        torch.testing.assert_close(stored[name], value, rtol=1e-3, atol=1e-4)


def with_dropout(mesh: Any, folder: Path, run: str, steps: int, **changes: Any) -> list[float]:
    """Trains new LoRA weights of a base with everything on, by the arguments alone."""
    given = {
        "env_type": "deepspeed+mpu", "model_parallel_size": mesh.tp_size, "pipeline_parallel_size": mesh.pp_size,
        "lora_rank": 3, "lora_dropout": 0.3, "lora_target_modules": ("q", "k", "wo"), "use_rslora": True,
        "recompute": "full", "train_steps": 6, "save_interval": 3,
    }  # fmt: skip
    model = from_pretrained(folder / "base", mesh).train()
    found, _ = run_training(
        mesh, folder / run, model=model, data=Even(96), **{**arguments({}), **given, **changes}
    )
    return losses(found)[-steps:]


@pytest.mark.before_release
def test_dropout_initial_values_and_resumed_runs_do_not_depend_on_the_layout(bases, run_mesh):
    folder, *_ = bases("t5")
    [whole] = run_mesh(1, with_dropout, folder, "whole", 6)
    checkpoint = folder / "whole" / "checkpoints" / "step-000003"
    assert not (checkpoint / "rank_00.safetensors").exists()
    moments = load_file(checkpoint / "optimizer_00.safetensors")
    assert all("lora_" in name for name in moments)
    for tp, stages in ((3, 1), (2, 2)):
        for found in run_mesh(tp, with_dropout, folder, f"split-{tp}", 6, pipeline=stages):
            assert found == pytest.approx(whole, **SAME_LOSS)
        for found in run_mesh(
            tp, with_dropout, folder, f"resumed-{tp}", 3, load_dir=str(checkpoint), pipeline=stages
        ):
            assert found == pytest.approx(whole[3:], **SAME_LOSS)
    [again] = run_mesh(1, with_dropout, folder, "again", 3, load_dir=str(checkpoint))
    assert again == whole[3:]
    base = hf_model(
        "T5ForConditionalGeneration", 0.0, vocab_size=64, num_layers=2, num_decoder_layers=2
    )
    peft.PeftModel.from_pretrained(
        base, checkpoint
    )  # a checkpoint of any layout is a folder of peft
    assert (
        folder / "split-3" / "checkpoints" / "step-000003" / "adapter_model.safetensors"
    ).exists()


def test_a_run_goes_on_only_with_its_base_and_its_settings(bases, run_mesh, tmp_path):
    folder, *_ = bases("t5")
    run_mesh(1, with_dropout, folder, "first", 6, train_steps=3)
    last = str(folder / "first")
    hf_model(
        "T5ForConditionalGeneration",
        0.1,
        vocab_size=64,
        num_layers=2,
        num_decoder_layers=2,
        d_ff=40,
    ).save_pretrained(tmp_path / "base")
    with pytest.raises(Exception, match="was trained with r=3, and cannot go on with 4"):
        run_mesh(1, with_dropout, folder, "other", 3, load_dir=last, lora_rank=4)
    with pytest.raises(
        Exception,
        match=r"belongs to another base model than .*base, whose weights have another digest",
    ):
        run_mesh(1, with_dropout, tmp_path, "other", 3, load_dir=last)
    with pytest.raises(
        Exception, match="lora_rank makes new LoRA weights and adapter names a folder"
    ):
        run_mesh(1, with_dropout, folder, "other", 3, adapter="somewhere")


def in_bf16(
    mesh: Any, folder: Path, run: str, **changes: Any
) -> tuple[list[float], set[torch.dtype]]:
    """Trains from peft's initial weights in bf16; returns losses and the types of the frozen parameters."""
    model = adapted(mesh, folder)
    frozen = {
        name: p.detach().bfloat16() for name, p in model.named_parameters() if not p.requires_grad
    }
    given = {"env_type": "deepspeed+mpu", "model_parallel_size": mesh.tp_size, "precision": "bf16"}
    steps, after = run_training(
        mesh,
        folder / run,
        model=model,
        data=Even(96),
        **{**arguments({}), **given, "save_interval": 20, **changes},
    )
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    return losses(steps), {after[name].dtype for name in frozen}


@pytest.mark.before_release
@pytest.mark.parametrize(("tp", "data", "stage"), [(2, 1, 1), (1, 2, 2)])
def test_a_base_in_bf16_stays_as_it_is_and_the_optimizer_keeps_its_weights_in_fp32(
    bases, run_mesh, tp, data, stage
):
    folder, expected, _ = bases("t5")
    run = f"bf16-{tp}-{data}"
    changes = {"zero_stage": stage, "micro_batch_size": 4 // data}
    for found, types in run_mesh(tp, in_bf16, folder, run, data=data, **changes):
        assert types == {torch.bfloat16}
        assert found == pytest.approx(expected, rel=0.02)  # bf16 has 8 bits
    states = load_file(
        folder / run / "checkpoints" / f"step-{STEPS:06d}" / "optimizer_00.safetensors"
    )
    assert {value.dtype for name, value in states.items() if "lora_A" in name} == {torch.float32}


class Blanks:
    """A GLM's samples, of equal lengths."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 300, (16,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: 2 + index % 5] = -100
        return {"input_ids": tokens, "labels": labels}


def adapt_glm(
    mesh: Any, folder: Path, run: str, **changes: Any
) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Losses of LoRA weights in all layers, and logits of the trained model: of its files, and merged."""
    given = {
        "env_type": "deepspeed+mpu",
        "model_parallel_size": mesh.tp_size,
        "train_steps": 6,
        "lora_rank": 3,
    }
    model = from_pretrained(folder, mesh).train()
    steps, _ = run_training(
        mesh, folder.parent / run, model=model, data=Blanks(),
        **{**arguments({}), **given, "lora_target_modules": ("all-linear",), **changes},
    )  # fmt: skip
    save_adapter(model, folder.parent / f"{run}-adapter")
    again = from_pretrained(folder, mesh).eval()
    load_adapter(again, folder.parent / f"{run}-adapter")
    ids = Blanks()[0]["input_ids"][None]
    with torch.no_grad():
        read = again.gather_logits(again(input_ids=ids).logits)
        merge_lora(again)
        return losses(steps), read, again.gather_logits(again(input_ids=ids).logits)


def test_a_glm_takes_the_same_steps_in_every_layout(run_mesh, tmp_path):
    folder = tmp_path / "glm"
    train_tokenizer("glm-bpe", [text(seed, 12) for seed in range(200)], 340, folder)
    save_glm(folder, "gpt2", max_sequence_length=64)
    [(whole, logits, _)] = run_mesh(1, adapt_glm, folder, "whole")
    assert whole[-1] < whole[0]
    for tp, data in ((3, 1), (2, 2)):
        for found, read, merged in run_mesh(
            tp, adapt_glm, folder, f"split-{tp}", data=data, micro_batch_size=4 // data
        ):
            assert found == pytest.approx(whole, **SAME_LOSS)
            torch.testing.assert_close(
                read, logits, rtol=1e-3, atol=1e-3
            )  # AdamW enlarges rounding
            torch.testing.assert_close(merged, read, rtol=1e-5, atol=1e-5)
