"""Distillation in pretraining: the loss is that of transformers' models, and layouts learn alike."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from every_case import every_day
from pretraining_runs import arguments_of, run_pretraining, train_losses
from tiny_models import hf_model, save_model

import shardzoo
from shardzoo.pretraining.inputs import choose_inputs
from shardzoo.trainer.distillation import Distillation, Teacher
from shardzoo.trainer.launch.rank_info import RankInfo

WEIGHT = 0.7
TEMPERATURE = 2.0
TEACHING = {"teacher_weight": WEIGHT, "teacher_temperature": TEMPERATURE}
ARCHITECTURES = {
    "bert": "BertForPreTraining",
    "roberta": "RobertaForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
}


@pytest.mark.parametrize("family", every_day(["bert"], more=["roberta", "gpt2", "t5"]))
def test_the_loss_is_the_formula(tmp_path, family):
    """With few labels, as masked language models have them, and the loss of next sentences beside."""
    models = []
    for number in range(2):
        theirs = hf_model(ARCHITECTURES[family], 0.0)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(
                    0.3 * torch.randn(parameter.shape, generator=torch.manual_seed(number))
                )
        theirs.save_pretrained(tmp_path / str(number))
        models.append(theirs.double().eval())
    student = shardzoo.from_pretrained(tmp_path / "0").eval()
    teacher = shardzoo.from_pretrained(tmp_path / "1")
    torch.manual_seed(0)
    ids = torch.randint(5, 90, (3, 9))
    batch = {"input_ids": ids, "labels": ids.masked_fill(torch.rand(3, 9) > 0.4, -100)}
    if family == "bert":
        batch["next_sentence_label"] = torch.tensor([0, 1, 1])
    distillation = Distillation(student, Teacher(teacher, None, None), WEIGHT, TEMPERATURE)
    loss = distillation.add_to_loss(student(**batch), batch)
    loss.backward()

    outputs = [model(**batch) for model in models]
    name = "prediction_logits" if family == "bert" else "logits"
    student_logits, teacher_logits = (output[name] for output in outputs)
    labels = batch["labels"]
    if family == "gpt2":
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    kept = labels != -100
    divergence = F.kl_div(
        (student_logits[kept] / TEMPERATURE).log_softmax(-1),
        (teacher_logits[kept].detach() / TEMPERATURE).log_softmax(-1),
        log_target=True,
        reduction="batchmean",
    )
    expected = (1 - WEIGHT) * outputs[0].loss + WEIGHT * TEMPERATURE**2 * divergence
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    norms = []
    for model in (student, models[0]):
        grads = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
        norms.append(torch.stack(grads).norm().item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.before_release  # docs/pretraining.md has a run of every day
@pytest.mark.parametrize(
    ("family", "objective"), [("bert", "roberta"), ("t5", "t5"), ("gpt2", "gpt")]
)
def test_layouts_learn_alike(run_mesh, tmp_path, texts, config, family, objective):
    """New weights take the teacher's tokenizer; students and teachers may be split alike or not."""
    # More rows than tokens, of which T5's objective adds a hundred.
    words = 500
    teacher = save_model(
        tmp_path / "teacher", ARCHITECTURES[family], family, seed=5, vocab_size=words
    )
    options = {"teacher_model": str(teacher), **TEACHING, "export": False}
    options |= {"model": str(config(family, vocab_size=words)), "vocab_size": None}
    options["data"] = (str(texts),)

    def losses(name, student, replicas, ranks=None):
        run = partial(
            run_pretraining, folder=tmp_path / name, objective=objective, teacher_parallel_size=ranks,
            global_batch_size=4, micro_batch_size=4 // replicas, **options,
        )  # fmt: skip
        return train_losses(run_mesh(student, run, data=replicas)[0])

    expected = losses("one", 1, 1)
    assert expected[-1] < expected[0]
    layouts = {"split teacher": (1, 2, 2), "whole teacher": (2, 1, 1), "split alike": (2, 2, None)}
    for name, layout in layouts.items():
        assert losses(name, *layout) == pytest.approx(expected, rel=1e-4), name


def test_mistakes(tmp_path, texts, config):
    teacher = save_model(tmp_path / "teacher", "BertForPreTraining", "bert")

    def choose(family="bert", objective="roberta", **changes):
        options = {"model": str(config(family)), "data": (str(texts),), **changes}
        options = {"teacher_model": str(teacher), **options}
        arguments = arguments_of(tmp_path / "run", objective, **options)
        choose_inputs(arguments, RankInfo.from_environment())

    def refuse(match, *choice, **changes):
        with pytest.raises(ValueError, match=match):
            choose(*choice, **changes)

    refuse("does not fit model", "t5", "t5")
    refuse("neither env_type='fsdp' nor ZeRO", env_type="fsdp")
    refuse("pipeline_parallel_size above 1", pipeline_parallel_size=2)
    refuse("must be at least 1, not 0", teacher_parallel_size=0)
    refuse("is for a teacher: name it", teacher_model=None, teacher_parallel_size=2)
    other = save_model(tmp_path / "other", "BertForPreTraining", "bert", vocab_size=500)
    refuse("has another vocabulary than the model", init_from=str(other), model=None)
