"""Twenty steps of preferences: TRL's trainers for GPT-2, and the formula in fp64 on transformers' T5.

Both sides begin with the same LoRA weights (of reward models, with the same model), and take the same batches with the
same optimizer and schedule, without dropout.
"""

from __future__ import annotations

import json
from functools import partial

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import PRETRAINED, hf_model, save_model, text

from shardzoo import finetuning as t2t
from shardzoo.data.loading.orders import EpochShuffle
from shardzoo.models.lora import save_adapter

STEPS = 20
BATCH = 4
LR = 3e-3
BETA = 0.3
TOLERANCE = {"rel": 1e-4, "abs": 1e-4}
SHORT = {
    "max_source_length": 16,
    "max_target_length": 16,
    "lr": LR,
    "beta": BETA,
    "train_steps": STEPS,
    "log_interval": 1,
    "save_interval": 1000,
    "validation_split": 0,
}
NAMES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Tiny models, an adapter of each as it is before training, and files of answers."""
    folder = tmp_path_factory.mktemp("curves")
    for kind in ("gpt2", "t5"):
        save_model(folder / kind, PRETRAINED[kind], kind)
    save_model(folder / "scored", PRETRAINED["gpt2"], "gpt2")
    config = transformers.AutoConfig.from_pretrained(folder / "gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "gpt2")
    settings = {"vocab_size": config.vocab_size, "num_labels": 1}
    settings["pad_token_id"] = tokenizer.pad_token_id or tokenizer.eos_token_id
    hf_model("GPT2ForSequenceClassification", **settings).save_pretrained(folder / "scored")
    pairs = [
        {"prompt": text(n, 3), "chosen": " " + text(n, 2), "rejected": " " + text(n + 50, 4)}
        for n in range(16)
    ]
    single = [
        {"prompt": text(n, 3), "completion": " " + text(n + n % 2 * 50, 2), "label": n % 2 == 0}
        for n in range(8)
    ]
    for name, records in (("pairs", pairs), ("single", single)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def list_in_order(records):
    """The records of all steps in the order in which the trainer takes them."""
    order = EpochShuffle(len(records), t2t.TrainerArguments.seed)
    return [records[order(position)] for position in range(STEPS * BATCH)]


def tune(mesh, setting, output, kind, file="pairs", **arguments):
    """Trains, and leaves the adapter before training in `output/before`."""
    options = {"task": "preference", "micro_batch_size": BATCH, **SHORT, **arguments}
    if options["task"] == "preference":
        options |= {"lora_rank": 2, "lora_target_modules": ("all-linear",)}
    trainer = t2t.Trainer(
        model_name_or_path=str(setting / kind),
        train_file=str(setting / f"{file}.jsonl"),
        output_dir=str(output),
        mesh=mesh,
        **options,
    )
    if options["task"] == "preference":
        save_adapter(trainer.model, output.with_name(f"{output.name}-before"), str(setting / kind))
    trainer.train(valid=False)


def logged(folder):
    records = [record for record in read(folder / "metrics.jsonl") if "train/loss" in record]
    return [{name: r[f"train/{name}"] for name in NAMES if f"train/{name}" in r} for r in records]


def check_same(found, expected):
    assert len(found) == len(expected) == STEPS
    for one, other in zip(found, expected, strict=True):
        common = one.keys() & other.keys()
        assert len(common) >= 3
        wanted = {name: other[name] for name in common}
        assert {name: one[name] for name in common} == pytest.approx(wanted, **TOLERANCE)


def run_trl(module, setting, tmp_path, model, records, batch, **options):
    """Returns what TRL's trainer logs of each step."""
    from datasets import Dataset

    trl = pytest.importorskip(f"trl.trainer.{module}_trainer")
    configs = pytest.importorskip(f"trl.trainer.{module}_config")
    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward"}[module]
    settings = getattr(configs, f"{name}Config")(
        output_dir=str(tmp_path / "theirs"),
        max_steps=STEPS,
        per_device_train_batch_size=batch,
        learning_rate=LR,
        lr_scheduler_type="linear",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(setting / "gpt2")
    trainer = getattr(trl, f"{name}Trainer")(
        model, args=settings, train_dataset=Dataset.from_list(records), processing_class=tokenizer
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    # RewardTrainer has other names.
    renamed = {"margin": "rewards/margins", "accuracy": "rewards/accuracies"}
    values = [{renamed.get(name, name): entry[name] for name in entry} for entry in steps]
    return [{name: float(entry[name]) for name in NAMES if name in entry} for entry in values]


def load_adapted(setting, kind, before, architecture):
    model = architecture.from_pretrained(setting / kind)
    return peft.PeftModel.from_pretrained(model, before, is_trainable=True)


def test_dpo_of_gpt2_is_trls(setting, tmp_path, run_mesh):
    pytest.importorskip("trl")
    tune(None, setting, tmp_path / "one", "gpt2")
    split = {"model_parallel_size": 2}
    run_mesh(2, partial(tune, setting=setting, output=tmp_path / "split", kind="gpt2", **split))
    model = load_adapted(
        setting, "gpt2", tmp_path / "one-before", transformers.AutoModelForCausalLM
    )
    records = list_in_order(read(setting / "pairs.jsonl"))
    expected = run_trl("dpo", setting, tmp_path, model, records, BATCH, beta=BETA, max_length=32)
    assert expected[-1]["loss"] < 0.6 < expected[0]["loss"]
    assert len(expected[0]) == len(NAMES)
    check_same(logged(tmp_path / "one"), expected)
    check_same(logged(tmp_path / "split"), expected)


@pytest.mark.before_release
def test_kto_of_gpt2_is_trls(setting, tmp_path, run_mesh):
    """A batch is the whole file, so that both pair each prompt with the same other answer."""
    pytest.importorskip("trl")
    options = {"preference_loss": "kto", "micro_batch_size": 8, "file": "single"}
    tune(None, setting, tmp_path / "one", "gpt2", **options)
    options |= {"micro_batch_size": 4, "env_type": "pytorchDDP"}
    work = partial(tune, setting=setting, output=tmp_path / "replicas", kind="gpt2", **options)
    run_mesh(1, work, data=2)
    model = load_adapted(
        setting, "gpt2", tmp_path / "one-before", transformers.AutoModelForCausalLM
    )
    records = read(setting / "single.jsonl") * STEPS
    expected = run_trl("kto", setting, tmp_path, model, records, 8, beta=BETA, max_length=32)
    assert expected[-1]["loss"] < expected[0]["loss"]
    check_same(logged(tmp_path / "one"), expected)
    check_same(logged(tmp_path / "replicas"), expected)


@pytest.mark.before_release
def test_reward_of_gpt2_is_trls(setting, tmp_path, run_mesh):
    pytest.importorskip("trl")
    options = {"task": "reward", "max_source_length": 32, "kind": "scored"}
    tune(None, setting, tmp_path / "one", **options)
    options["model_parallel_size"] = 2
    run_mesh(2, partial(tune, setting=setting, output=tmp_path / "split", **options))
    load = transformers.AutoModelForSequenceClassification
    model = load.from_pretrained(setting / "scored")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    records = list_in_order(read(setting / "pairs.jsonl"))
    expected = run_trl("reward", setting, tmp_path, model, records, BATCH, max_length=32)
    assert expected[-1]["loss"] < expected[0]["loss"]
    check_same(logged(tmp_path / "one"), expected)
    check_same(logged(tmp_path / "split"), expected)


@pytest.mark.before_release
def test_dpo_of_t5_is_its_formula_in_fp64(setting, tmp_path, run_mesh):
    tune(None, setting, tmp_path / "one", "t5")
    split = {"model_parallel_size": 2}
    run_mesh(2, partial(tune, setting=setting, output=tmp_path / "split", kind="t5", **split))
    model = load_adapted(setting, "t5", tmp_path / "one-before", transformers.AutoModelForSeq2SeqLM)
    model = model.double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(setting / "t5")

    def measure(record, name):
        ids = tokenizer(record["prompt"], return_tensors="pt").input_ids
        labels = tokenizer(text_target=record[name], return_tensors="pt").input_ids
        chances = model(input_ids=ids, labels=labels).logits.log_softmax(-1)
        return chances.gather(-1, labels[..., None]).sum()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    records = list_in_order(read(setting / "pairs.jsonl"))
    expected = []
    for step in range(STEPS):
        rewards = []
        for record in records[step * BATCH : (step + 1) * BATCH]:
            own = [measure(record, name) for name in ("chosen", "rejected")]
            with torch.no_grad(), model.disable_adapter():
                base = [measure(record, name) for name in ("chosen", "rejected")]
            rewards.append(torch.stack([BETA * (a - b) for a, b in zip(own, base, strict=True)]))
        chosen, rejected = torch.stack(rewards).unbind(1)
        loss = -F.logsigmoid(chosen - rejected).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        values = [loss, chosen.mean(), rejected.mean(), (chosen - rejected).mean()]
        values.append((chosen > rejected).double().mean())
        expected.append(dict(zip(NAMES, (float(value) for value in values), strict=True)))
    assert expected[-1]["loss"] < 0.6 < expected[0]["loss"]
    check_same(logged(tmp_path / "one"), expected)
    check_same(logged(tmp_path / "split"), expected)
