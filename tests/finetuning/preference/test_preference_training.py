"""Preferences as a task: every reference is the same model, and layouts learn alike."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import transformers
from every_case import every_day
from tiny_models import PRETRAINED, save_model, text, tokenizer_like

from shardzoo import finetuning as t2t
from shardzoo.finetuning.preference.data import Preference, PreferenceSamples, _read_pair

SHORT = {
    "task": "preference",
    "max_source_length": 16,
    "max_target_length": 16,
    "lr": 3e-3,
    "beta": 0.5,
    "train_steps": 4,
    "log_interval": 1,
    "validation_split": 0,
}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Tiny models of each shape, pairs of answers, and single ones."""
    folder = tmp_path_factory.mktemp("preference")
    for kind in ("bert", "gpt2", "t5"):
        save_model(folder / kind, PRETRAINED[kind], kind)
    torch.manual_seed(7)
    for kind in ("gpt2", "t5"):
        save_model(folder / f"{kind}-other", PRETRAINED[kind], kind, seed=5)
    pairs = [
        {"prompt": text(n, 3), "chosen": " " + text(n, 2), "rejected": " " + text(n + 50, 4)}
        for n in range(16)
    ]
    single = [
        {"prompt": text(n, 3), "completion": " " + text(n + n % 2 * 50, 2), "label": n % 2 == 0}
        for n in range(16)
    ]
    for name, records in (("pairs", pairs), ("single", single)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def logged(folder) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    names = ("train/loss", "train/rewards/margins", "train/rewards/accuracies", "train/kl")
    records = [json.loads(line) for line in lines]
    return [{k: r[k] for k in names if k in r} for r in records if "train/loss" in r]


def check_same(found, expected, rel=1e-3):
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=rel, abs=2e-5)


def tune(mesh, setting, output, kind, file="pairs", **arguments):
    trainer = t2t.Trainer(
        model_name_or_path=str(setting / kind),
        train_file=str(setting / f"{file}.jsonl"),
        output_dir=str(output),
        mesh=mesh,
        **{"micro_batch_size": 4, **SHORT, **arguments},
    )
    trainer.train(valid=False)
    return trainer.evaluate(str(setting / f"{file}.jsonl"))


CASES = every_day([("t5", "orpo")], more=[("gpt2", "kto"), ("gpt2", "dpo"), ("t5", "ipo")])


@pytest.mark.parametrize(("kind", "loss"), CASES)
def test_layouts_learn_alike(setting, tmp_path, run_mesh, kind, loss):
    file = "single" if loss == "kto" else "pairs"
    work = partial(tune, setting=setting, kind=kind, file=file, preference_loss=loss)
    values = work(None, output=tmp_path / "one")
    expected = logged(tmp_path / "one")
    assert expected[-1]["train/loss"] < expected[0]["train/loss"]
    found, _ = run_mesh(2, partial(work, output=tmp_path / "split", model_parallel_size=2))
    check_same(logged(tmp_path / "split"), expected)
    assert found == pytest.approx(values, rel=1e-3, abs=2e-5)
    replicas = {"micro_batch_size": 2, "eval_batch_size": 4, "env_type": "pytorchDDP"}
    found, _ = run_mesh(1, partial(work, output=tmp_path / "replicas", **replicas), data=2)
    check_same(logged(tmp_path / "replicas"), expected)
    assert found == pytest.approx(values, rel=1e-3, abs=2e-5)


# A second copy of the model, a folder and the model without its LoRA weights as references.
STAGED = every_day(
    [("gpt2", "dpo", {})],
    more=[
        ("gpt2", "dpo", {"lora_rank": 2}),
        ("t5", "ipo", {"reference_model": "t5-other"}),
        ("gpt2", "kto", {}),
        ("t5", "orpo", {}),
        ("bert", "reward", {}),
    ],
)


@pytest.mark.parametrize(("kind", "loss", "options"), STAGED)
def test_stages_of_a_pipeline_learn_alike(setting, tmp_path, run_mesh, kind, loss, options):
    """Training, what it logs, and the evaluation."""
    options = {"preference_loss": loss, **options}
    if loss == "reward":
        options = {"task": "reward"}
    if "reference_model" in options:
        options["reference_model"] = str(setting / options["reference_model"])
    file = "single" if loss == "kto" else "pairs"
    work = partial(tune, setting=setting, kind=kind, file=file, **options)
    values = work(None, output=tmp_path / "one")
    stages = {"pipeline_parallel_size": 2, "env_type": "deepspeed+mpu"}
    for found in run_mesh(1, partial(work, output=tmp_path / "stages", **stages), pipeline=2):
        assert found == pytest.approx(values, rel=1e-3, abs=2e-5)
    expected = logged(tmp_path / "one")
    assert ("train/kl" in expected[0]) == (loss in ("dpo", "ipo", "kto"))
    check_same(logged(tmp_path / "stages"), expected)


def test_every_reference_is_the_same_model(setting, tmp_path):
    """LoRA without its weights, a second copy, and values that were computed before."""
    lora = {"lora_rank": 2}
    own = str(setting / "gpt2")
    tune(None, setting, tmp_path / "adapter", "gpt2", **lora)
    expected = logged(tmp_path / "adapter")
    assert expected[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert expected[-1]["train/loss"] < 0.69
    tune(None, setting, tmp_path / "second", "gpt2", reference_model=own, **lora)
    check_same(logged(tmp_path / "second"), expected, rel=1e-4)
    tune(None, setting, tmp_path / "before", "gpt2", precompute_reference=True, **lora)
    check_same(logged(tmp_path / "before"), expected, rel=1e-4)


@pytest.mark.before_release
def test_the_values_of_the_file_are_the_reference_on_pipeline_stages(setting, tmp_path, run_mesh):
    records = [json.loads(line) for line in (setting / "pairs.jsonl").read_text().splitlines()]
    for n, record in enumerate(records):
        record |= {"ref_chosen_logps": -n / 4, "ref_rejected_logps": n / 8 - 3}
    path = tmp_path / "valued.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    work = partial(tune, setting=setting, kind="gpt2", file=path.with_suffix(""))
    values = work(None, output=tmp_path / "one")
    stages = {"pipeline_parallel_size": 2, "env_type": "deepspeed+mpu"}
    for found in run_mesh(1, partial(work, output=tmp_path / "stages", **stages), pipeline=2):
        assert found == pytest.approx(values, rel=1e-3, abs=2e-5)
    check_same(logged(tmp_path / "stages"), logged(tmp_path / "one"))


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_the_loss_is_that_of_transformers_models_in_fp64(setting, kind):
    other = setting / f"{kind}-other"
    trainer = t2t.Trainer(
        model_name_or_path=str(setting / kind),
        train_file=str(setting / "pairs.jsonl"),
        reference_model=str(other),
        **SHORT,
    )
    found = trainer.evaluate(str(setting / "pairs.jsonl"))
    load = transformers.AutoModelForCausalLM
    if kind == "t5":
        load = transformers.AutoModelForSeq2SeqLM
    tokenizer = transformers.AutoTokenizer.from_pretrained(setting / kind)
    models = [load.from_pretrained(path).double().eval() for path in (setting / kind, other)]

    def measure(model, prompt, answer):
        if kind == "t5":
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            labels = tokenizer(text_target=answer, return_tensors="pt").input_ids
            logits = model(input_ids=ids, labels=labels).logits
        else:
            # TRL's tokens: of the prompt, and what the whole text has after them.
            ids = tokenizer(prompt + answer + tokenizer.eos_token, return_tensors="pt").input_ids
            start = len(tokenizer(prompt).input_ids)
            logits = model(ids).logits[:, start - 1 : -1]
            labels = ids[:, start:]
        chances = logits.log_softmax(-1).gather(-1, labels[..., None])
        return chances.sum().item()

    losses, margins, ratios = [], [], []
    for line in (setting / "pairs.jsonl").read_text().splitlines():
        record = json.loads(line)
        gap = 0.0
        for answer, sign in (("chosen", 1), ("rejected", -1)):
            ours, theirs = (measure(m, record["prompt"], record[answer]) for m in models)
            gap += sign * (ours - theirs)
            ratios.append(ours - theirs)
        margins.append(0.5 * gap)
        losses.append(-torch.nn.functional.logsigmoid(torch.tensor(0.5 * gap)))
    assert found["loss"] == pytest.approx(float(sum(losses) / len(losses)), rel=1e-5)
    assert found["rewards/margins"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert found["kl"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    assert found["rewards/accuracies"] == pytest.approx(accuracy)


def test_a_reward_model_ranks_answers_and_is_transformers(setting, tmp_path, run_mesh):
    for kind in ("gpt2", "bert"):
        work = partial(tune, setting=setting, kind=kind, task="reward", lr=1e-2)
        values = work(None, output=tmp_path / kind)
        split = {"model_parallel_size": 2}
        found, _ = run_mesh(2, partial(work, output=tmp_path / f"{kind}-split", **split))
        assert found == pytest.approx(values, rel=1e-3, abs=1e-4)
        assert values["rewards/margins"] > 0


def test_messages_are_written_by_the_template():
    """Only the answer has labels, and without a prompt it is what both conversations have in common."""
    tokenizer = tokenizer_like("gpt2")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    user = [{"role": "user", "content": "red"}]
    chosen = [{"role": "assistant", "content": "blue green"}]
    rejected = [{"role": "assistant", "content": "two"}]
    record = {"chosen": user + chosen, "rejected": user + rejected}
    preference = _read_pair(record)
    assert preference == Preference(user, (chosen, rejected))
    assert preference == _read_pair({"prompt": user, "chosen": chosen, "rejected": rejected})
    sample = PreferenceSamples([preference], tokenizer, 30, 30, has_decoder=False)[0]
    for ids, labels, answer in zip(
        sample["columns"], sample["targets"], ("blue green ", "two "), strict=True
    ):
        assert tokenizer.decode(ids) == f"user:red assistant:{answer}"
        learned = [label for label in labels if label != -100]
        assert tokenizer.decode(learned).strip() == answer.strip()
        assert ids[-len(learned) :] == learned


def test_mistakes(setting, tmp_path):
    def refuse(match, kind="gpt2", file="pairs", **arguments):
        # Some mistakes are found when a run has begun.
        output = tmp_path / f"refused-{len(list(tmp_path.iterdir()))}"
        with pytest.raises(ValueError, match=match):
            tune(None, setting, output, kind, file, **arguments)

    refuse("'label' must be true or false|must be a text", preference_loss="kto")
    refuse("does not learn", kind="bert")
    wrong = {
        "half": ({"ref_chosen_logps": -3, "ref_rejected_logps": -2}, "either all records have"),
        "nan": ({"ref_chosen_logps": float("nan"), "ref_rejected_logps": 0}, "must be a number"),
    }
    for name, (columns, match) in wrong.items():
        record = {"prompt": "red", "chosen": " one", "rejected": " two"}
        lines = [json.dumps({**record, **columns}), json.dumps(record)] * 4
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        refuse(match, file=tmp_path / name)
    refuse("precompute_reference is for", preference_loss="orpo", precompute_reference=True)
    refuse("beta must be above 0", beta=0.0)
