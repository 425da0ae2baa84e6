"""The memory estimate, against tensors that are really there."""

from __future__ import annotations

import json
import tempfile

import pytest
import torch
from every_case import by_turns
from memory import kept_bytes, peak_of

from shardzoo.cli.estimate import main
from shardzoo.models import ParallelConfig, find_config, from_config, from_pretrained
from shardzoo.ops import variants
from shardzoo.trainer.distillation import Distillation, Teacher
from shardzoo.trainer.estimate import Job, estimate, largest_micro_batch

# Blocks that keep much more than their weights, so that a moment that is left out shows.
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 4, "vocab_size": 128, "n_positions": 128}
T5 = {"d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 256, "num_layers": 2, "vocab_size": 128}


def tiny(name: str, **changes):
    return find_config(name).with_changes(
        **{"gpt2": GPT2, "t5-small": T5, "mt5-small": T5}[name] | changes
    )


def peak_of_tensors(config, job: Job, optimizer=None) -> int:
    """The largest sum of all tensors that a training step of the plain engine holds, in bytes.

    What torch's profiler sees of the allocator, in a second step, on top of what is there before it.
    """
    from shardzoo.models.lora import add_lora, lora_config
    from shardzoo.models.sizes import is_embedding
    from shardzoo.mpu import dropout_state

    model = from_config(config, parallel_config=ParallelConfig(recompute=job.recompute)).train()
    if "embeddings" in job.frozen:
        for module in filter(is_embedding, model.modules()):
            module.requires_grad_(False)
    if job.base_precision is not None:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = from_pretrained(
                folder,
                base_precision=job.base_precision,
                parallel_config=ParallelConfig(recompute=job.recompute),
            ).train()
    if job.lora_rank:
        add_lora(
            model, lora_config(r=job.lora_rank, target_modules=job.lora_target_modules), seed=0
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer(trained) if optimizer else torch.optim.AdamW(trained, fused=True)
    ids = torch.arange(job.micro_batch_size * job.length).view(job.micro_batch_size, -1) % 97 + 5
    batch = {"input_ids": ids, "labels": ids}
    if job.padded:
        batch["attention_mask"] = torch.ones_like(ids)

    teacher = None
    if job.teacher is not None:
        teacher = from_config(job.teacher)
        distillation = Distillation(model, Teacher(teacher, None, None))

    def step() -> None:
        for micro_batch in range(job.accumulation_steps):
            dropout_state.set(0, micro_batch)
            output = model(**batch)
            loss = output.loss
            if teacher is not None:
                loss = distillation.add_to_loss(output, batch)
            del output
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tensors = [
        *model.parameters(),
        *(teacher.parameters() if teacher is not None else ()),
        *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    ]
    there = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return there + peak_of(step)


def adafactor(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


SHORT = {"micro_batch_size": 1, "length": 8}
TAGGING = {"vocab_size": 2048, "num_labels": 128}  # logits of the vocabulary would be large
CASES = [
    ("gpt2", {}, {}, None, "the last block's backward"),
    ("gpt2", {"vocab_size": 4096}, {"recompute": "full"}, None, "the head's backward"),
    ("gpt2", {}, {"recompute": "full"}, None, "the first block's backward"),
    (
        "gpt2",
        {},
        {"accumulation_steps": 2, "recompute": "selective"},
        None,
        "the last block's backward",
    ),
    (
        "gpt2",
        {"n_embd": 512, "n_layer": 2},
        SHORT | {"optimizer": "adafactor"},
        adafactor,
        "the optimizer's step",
    ),
    ("gpt2", {"vocab_size": 32768}, SHORT, None, "the head's backward"),
    ("mt5-small", {"vocab_size": 16384}, SHORT, None, "the first block's backward"),
    ("t5-small", {}, {}, None, "the last block's backward"),
    (
        "gpt2",
        {**TAGGING, "architecture": "GPT2ForTokenClassification"},
        {},
        None,
        "the last block's backward",
    ),
    (
        "t5-small",
        {**TAGGING, "architecture": "T5ForTokenClassification"},
        {},
        None,
        "the last block's backward",
    ),
    ("t5-small", {}, {"recompute": "full"}, None, "the first block's backward"),
    (
        "mt5-small",
        {"vocab_size": 16384},
        SHORT | {"frozen": ("embeddings",)},
        None,
        "the first block's backward",
    ),
    ("gpt2", {"n_embd": 256, "n_layer": 3}, {"lora_rank": 8}, None, "the last block's backward"),
    (
        "t5-small",
        {},
        {"lora_rank": 4, "lora_target_modules": "all-linear"},
        None,
        "the last block's backward",
    ),
    (
        "gpt2",
        {"n_embd": 256, "n_layer": 6},
        SHORT | {"lora_rank": 2, "base_precision": "nf4"},
        None,
        "the last block's backward",
    ),
]


LARGE = {"n_embd": 128, "n_layer": 3, "vocab_size": 4096}
CASES += [
    ("gpt2", {"vocab_size": 4096}, {"teacher": tiny("gpt2", **LARGE)}, None, "the head's backward"),
    ("gpt2", {}, {"teacher": tiny("gpt2", n_embd=128)}, None, "the teacher's forward"),
]


@pytest.mark.parametrize(("name", "changes", "job", "optimizer", "moment"), by_turns(CASES, 2))
def test_the_peak_of_a_step(name, changes, job, optimizer, moment):
    values = {
        "micro_batch_size": 8,
        "length": 128,
        "precision": "fp32",
        "device": "cpu",
        "padded": False,
    }
    job = Job(**values | job)
    config = tiny(name, **changes)
    found = estimate(config, job)
    measured = peak_of_tensors(config, job, optimizer)
    assert found.peak.name == moment
    aside = ("framework", "copy for checkpoints")
    expected = found.peak.total - sum(found.peak.lines[name] for name in aside)
    if variants.unavailable("cpp", "cpu") is None:
        # The formulas leave the small tensors of a step out: batches, positions, biases' gradients.
        assert expected == pytest.approx(measured, rel=0.05)
    else:  # the reference keeps what the kernels recompute
        assert expected < 1.05 * measured


def states_held(mesh, config, job):
    """Parameters and optimizer states that a rank holds, in bytes."""
    model = from_config(config, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    states = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim()
    )
    return parameters, states


def test_a_rank_holds_the_parameters_and_states_that_are_said(run_mesh):
    config = tiny("mt5-small", vocab_size=301)  # padded over two ranks
    job = Job(tensor_parallel_size=2, zero_stage=0, precision="fp32", length=8)
    lines = estimate(config, job).peak.lines
    said = (lines["parameters"], lines["optimizer state"])
    assert run_mesh(2, states_held, config, job) == [said, said]


def states_under_deepspeed(mesh, config, job):
    """The optimizer states of a rank after a step, in bytes."""
    from shardzoo.mpu import dropout_state
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.factory import make_engine
    from shardzoo.trainer.engines.optimizers import make_optimizer
    from shardzoo.trainer.launch.ranks import Ranks

    how = {
        "env_type": "deepspeed+mpu",
        "model_parallel_size": mesh.tp_size,
        "zero_stage": job.stage,
    }
    arguments = TrainingArguments(**how, optimizer=job.optimizer, precision=job.precision)
    model = from_config(
        config, mesh, dtype=torch.float32 if job.precision == "fp32" else torch.bfloat16
    )
    engine = make_engine(model, make_optimizer(model, arguments), arguments, Ranks(mesh))
    ids = torch.ones(1, 8, dtype=torch.long)
    dropout_state.set(0, 0)
    engine.forward_backward(lambda _: engine.model(input_ids=ids, labels=ids).loss / 2, 1)
    engine.step()
    values = [value for state in engine.optimizer.state.values() for value in state.values()]
    engine.close(whole=True)
    return sum(value.nbytes for value in values if torch.is_tensor(value) and value.dim())


@pytest.mark.parametrize(
    ("optimizer", "zero", "precision"),
    [("adafactor", 0, "fp32"), ("adafactor", 1, "bf16"), ("lamb", 2, "fp32")],
)
def test_states_of_whole_matrices_are_as_large_as_said(run_mesh, optimizer, zero, precision):
    config = tiny("mt5-small", vocab_size=301)
    sizes = {
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "zero_stage": zero,
        "precision": precision,
    }
    job = Job(**sizes, optimizer=optimizer, length=8)
    said = estimate(config, job).peak.lines["optimizer state"]
    held = run_mesh(2, states_under_deepspeed, config, job, data=2)
    assert held == [pytest.approx(said, abs=512)] * 4  # ZeRO aligns its partitions


def test_another_decoder_of_transformers_is_measured_on_meta():
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = [[["global", "local"], 2]]
    sizes = {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 64,
    }
    config = AutoConfig.for_model(
        "gpt_neo", **sizes, attention_types=kinds, bos_token_id=1, eos_token_id=2
    )
    job = Job(micro_batch_size=4, length=64, precision="fp32", device="cpu")
    found = estimate(config, job)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    assert found.parameters == sum(p.numel() for p in model.parameters())
    ids = torch.ones(4, 64, dtype=torch.long)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids,
        "use_cache": False,
    }
    measured = kept_bytes(lambda: model(**batch).loss, (*model.parameters(), *model.buffers()))
    lines = found.moments[0].lines
    log_softmax = 4 * 64 * 256 * 4
    assert lines["activations"] + log_softmax == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 100])
def test_the_largest_micro_batch(largest):
    assert largest_micro_batch(lambda size: size <= largest) == largest


def test_layouts_change_what_they_should():
    config = find_config("t5-3b")
    base = Job(micro_batch_size=4, length=512, precision="bf16", zero_stage=1, accumulation_steps=2)
    peak = {name: estimate(config, job).peak.lines for name, job in {
        "base": base,
        "dp": Job(**vars(base) | {"data_parallel_size": 8}),
        "zero 2": Job(**vars(base) | {"data_parallel_size": 8, "zero_stage": 2}),
        "zero 3": Job(**vars(base) | {"data_parallel_size": 8, "zero_stage": 3}),
        "tp": Job(**vars(base) | {"tensor_parallel_size": 2}),
        "sequence": Job(**vars(base) | {"tensor_parallel_size": 2, "sequence_parallel": True}),
    }.items()}  # fmt: skip
    assert peak["dp"]["optimizer state"] == pytest.approx(peak["base"]["optimizer state"] / 8)
    assert peak["zero 2"]["gradients"] < peak["dp"]["gradients"]
    assert peak["zero 3"]["parameters"] < peak["dp"]["parameters"] / 4
    assert peak["tp"]["parameters"] == pytest.approx(peak["base"]["parameters"] / 2, rel=0.01)
    assert peak["sequence"]["activations"] < peak["tp"]["activations"] < peak["base"]["activations"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["gpt2", "--tp", "13"],
            "cannot be split 13 ways; use a tensor-parallel size from 1 to 12",
        ),
        (["gpt2", "--tp", "2", "--zero-stage", "3"], "use 0, 1 or 2"),
        (
            ["gpt2", "--zero-stage", "3", "--optimizer", "lamb"],
            "lamb needs statistics of whole parameters",
        ),
        (["gpt2", "--length", "4096"], "4096 is more than the model's 1024 positions"),
        (["gpt2", "--precision", "bf16", "--zero-stage", "0"], "use 1, 2 or 3"),
        (["gpt2", "--micro-batch-size", "0"], "--micro-batch-size must be at least 1"),
        (["gpt2", "--device-memory", "-1"], "--device-memory must be above 0"),
        (["gpt5"], "neither a preset"),
    ],
)
def test_a_mistake_is_one_message(options, message, capsys):
    assert main(options) == 2
    assert message in capsys.readouterr().err


def test_the_command_says_whether_it_fits(capsys):
    options = ["gpt2-xl", "--precision", "fp32", "--length", "512", "--recompute", "full"]
    assert main([*options, "--device-memory", "40", "--json"]) == 0
    fits = json.loads(capsys.readouterr().out)
    assert fits["fits"]
    assert fits["parameters_on_rank"] == 1_557_686_400  # the padded vocabulary's rows included
    assert fits["peak"]["total"] + fits["spare"] == 40 << 30
    largest = fits["largest_micro_batch_size"]
    assert main([*options, "--device-memory", "40", "--micro-batch-size", str(largest)]) == 0
    assert f"the largest micro-batch that fits is {largest}" in capsys.readouterr().out
    assert main([*options, "--device-memory", "40", "--micro-batch-size", str(largest + 1)]) == 1
    assert "does not fit 40 GiB: " in capsys.readouterr().out
    assert main([*options, "--device-memory", "16"]) == 1
    assert "no micro-batch fits" in capsys.readouterr().out


def test_the_padding_of_a_vocabulary_is_named(capsys):
    assert main(["mt5-quickstart"]) == 0
    # 1,100 rows become 1,152, in the embedding and in the head, of 128 each.
    assert "1,279,744 parameters, 13,312 of them padding of" in capsys.readouterr().out
    assert main(["mt5-quickstart", "--tp", "2"]) == 0
    assert "on a rank, on average 6,656 of them padding" in capsys.readouterr().out


def test_a_folder_of_another_family(tmp_path, capsys):
    from transformers import AutoConfig

    AutoConfig.for_model(
        "gpt_neox", hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    ).save_pretrained(tmp_path)
    assert main([str(tmp_path), "--length", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters_on_rank"] > 50432 * 64
    assert main([str(tmp_path), "--length", "64", "--tp", "2"]) == 2
    assert "not a family of the zoo" in capsys.readouterr().err
