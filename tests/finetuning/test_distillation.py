"""Distillation: the loss is that of transformers' models in fp64, and layouts learn alike."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import transformers
from every_case import every_day
from tiny_models import PRETRAINED, save_model, text

from shardzoo import finetuning as t2t
from shardzoo.mpu.divergence import vocab_parallel_divergence

WEIGHT = 0.7
TEMPERATURE = 2.0
SHORT = {
    "max_source_length": 16,
    "max_target_length": 16,
    "lr": 3e-3,
    "train_steps": 4,
    "log_interval": 1,
    "validation_split": 0,
    "teacher_weight": WEIGHT,
    "teacher_temperature": TEMPERATURE,
}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    for kind in ("gpt2", "t5", "bert"):
        save_model(folder / kind, PRETRAINED[kind], kind)
        save_model(folder / f"{kind}-teacher", PRETRAINED[kind], kind, seed=5)
    records = [{"s": text(n, 3), "t": text(n + 50, 2 + n % 3)} for n in range(16)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "pairs.jsonl").write_text(lines)
    return folder


def make(mesh, setting, output, kind, **arguments):
    return t2t.Trainer(
        model_name_or_path=str(setting / kind),
        train_file=str(setting / "pairs.jsonl"),
        output_dir=str(output),
        mesh=mesh,
        **{
            "micro_batch_size": 4,
            "teacher_model": str(setting / f"{kind}-teacher"),
            **({"task": "text2text-generation"} if kind == "bert" else {}),
            **SHORT,
            **arguments,
        },
    )


def tune(mesh, setting, output, kind, **arguments):
    make(mesh, setting, output, kind, **arguments).train(valid=False)


def curve(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


@pytest.mark.parametrize("kind", every_day(["t5"], more=["gpt2"]))
def test_it_is_the_formula_and_layouts_learn_alike(setting, tmp_path, run_mesh, kind):
    trainer = make(None, setting, tmp_path / "loss", kind)
    samples = trainer._data.samples(trainer._data.train(False))
    batch = trainer._collate()([samples[row] for row in range(5)])
    trainer.model.eval()
    found = trainer.run_model(dict(batch), trainer.model, None)["loss"]
    found.backward()

    load = transformers.AutoModelForCausalLM
    if kind == "t5":
        load = transformers.AutoModelForSeq2SeqLM
    folders = (setting / kind, setting / f"{kind}-teacher")
    models = [load.from_pretrained(folder).double().eval() for folder in folders]
    labels = batch["labels"]
    student, teacher = (model(**batch).logits for model in models)
    if kind == "gpt2":
        student, teacher, labels = student[:, :-1], teacher[:, :-1], labels[:, 1:]
    kept = labels != -100
    student, teacher, labels = student[kept], teacher[kept].detach(), labels[kept]
    entropy = torch.nn.functional.cross_entropy(student, labels)
    divergence = torch.nn.functional.kl_div(
        (student / TEMPERATURE).log_softmax(-1),
        (teacher / TEMPERATURE).log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    expected = (1 - WEIGHT) * entropy + WEIGHT * TEMPERATURE**2 * divergence
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    norms = [
        torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None])
        for model in (trainer.model, models[0])
    ]
    assert norms[0].norm().item() == pytest.approx(norms[1].norm().item(), rel=1e-5)

    work = partial(tune, setting=setting, kind=kind)
    work(None, output=tmp_path / "one")
    losses = curve(tmp_path / "one")
    assert losses[-1] < losses[0]
    for ranks in (2, 3):
        run_mesh(ranks, partial(work, output=tmp_path / f"tp{ranks}", model_parallel_size=ranks))
        assert curve(tmp_path / f"tp{ranks}") == pytest.approx(losses, rel=1e-4)
    replicas = {"micro_batch_size": 2, "env_type": "pytorchDDP"}
    run_mesh(1, partial(work, output=tmp_path / "replicas", **replicas), data=2)
    assert curve(tmp_path / "replicas") == pytest.approx(losses, rel=1e-4)


# Tensor-parallel ranks of the student and of the teacher, and replicas of the student.
LAYOUTS = every_day(
    [(2, 1, 1), (2, 4, 2)],
    more=[(1, 2, 2), (4, 2, 1), (4, 1, 1), (1, 4, 4), (2, 1, 2), (3, 1, 1), (1, 3, 3), (2, 2, 2)],
)


@pytest.mark.parametrize("kind", every_day(["bert"], more=["gpt2", "t5"]))
def test_a_teacher_may_have_another_layout(setting, tmp_path, run_mesh, kind):
    """Whole on each rank, split over fewer ranks than the student or over more: then over several replicas, whose
    batches have unequal lengths.
    """
    work = partial(tune, setting=setting, kind=kind, micro_batch_size=12)
    work(None, output=tmp_path / "one")
    losses = curve(tmp_path / "one")
    for student, teacher, replicas in LAYOUTS:
        name = f"{student} {teacher} {replicas}"
        options = {
            "model_parallel_size": student,
            "teacher_parallel_size": teacher,
            "micro_batch_size": 12 // replicas,
            "env_type": "deepspeed+mpu" if student > 1 else "pytorchDDP",
        }
        run_mesh(student, partial(work, output=tmp_path / name, **options), data=replicas)
        assert curve(tmp_path / name) == pytest.approx(losses, rel=1e-4), name


def test_evaluations_have_the_loss_of_the_targets(setting, tmp_path):
    values = make(None, setting, tmp_path / "own", "gpt2", teacher_weight=0.0).evaluate(
        str(setting / "pairs.jsonl")
    )
    found = make(None, setting, tmp_path / "both", "gpt2").evaluate(str(setting / "pairs.jsonl"))
    assert found == values


def test_padding_columns_do_not_count():
    """Also with hostile values in them, and of a vocabulary that ends before a rank's columns."""
    torch.manual_seed(0)
    logits = torch.randn(3, 8).requires_grad_()
    teacher = torch.randn(3, 8)
    expected = torch.nn.functional.kl_div(
        logits[:, :5].log_softmax(-1), teacher[:, :5].softmax(-1), reduction="none"
    ).sum(-1)
    with torch.no_grad():
        teacher[:, 5:] = 1e30
    found = vocab_parallel_divergence(logits, teacher, num_classes=5)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads)


def test_mistakes(setting, tmp_path):
    def refuse(match, kind="gpt2", **arguments):
        with pytest.raises(ValueError, match=match):
            make(None, setting, tmp_path / "no", kind, **arguments)

    refuse("teacher_weight must be from 0 to 1, not 2", teacher_weight=2)
    refuse("teacher_temperature must be above 0", teacher_temperature=0.0)
    refuse("works with neither env_type='fsdp'", env_type="fsdp")
    refuse("is for a teacher: name it", teacher_model=None, teacher_parallel_size=2)
    refuse("teacher_parallel_size must be at least 1", teacher_parallel_size=0)
    refuse("or be a multiple", teacher_parallel_size=3, model_parallel_size=2)
    refuse("is for tasks that learn tokens", kind="bert", task="embedding")
