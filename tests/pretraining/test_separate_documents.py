"""Documents that are packed into one sequence and do not see one another, with `--document-mask`."""

from __future__ import annotations

import json
import shutil
from functools import partial
from itertools import pairwise

import pytest
import torch
from every_case import every_day
from pretraining_runs import run_pretraining, train_losses
from tiny_models import WORDS, hf_model

import shardzoo
from shardzoo.cli.pretrain import read_arguments
from shardzoo.data import GPTDataset, GPTObjective, RobertaObjective
from shardzoo.data.indexed.dataset import MemoryDataset

LENGTHS = [1, 5, 2, 9, 3, 30, 4]


@pytest.fixture(scope="module")
def documents():
    """A corpus in memory: in each document the tokens ascend, and 0 ends it."""
    import numpy as np

    parts = [[*range(start, start + size - 1), 0] for start, size in enumerate(LENGTHS, 10)]
    return MemoryDataset(
        "documents", np.concatenate(parts).astype(np.uint16), np.array(LENGTHS), None
    )


@pytest.mark.parametrize(
    ("options", "is_masked"),
    [
        (["--document-mask"], True),
        (["document_mask=true"], True),
        (["--objective.separate-documents"], True),
        (["--objective.separate-documents", "--no-document-mask"], False),
        ([], False),
    ],
)
def test_two_spellings_mean_the_same(options, is_masked):
    for model, kind in (("llama", GPTObjective), ("roberta", RobertaObjective)):
        argv = ["--model", f"{model}-quickstart", *options]
        arguments = read_arguments(argv, quiet=True)
        assert arguments.objective == kind(separate_documents=is_masked)
        # A run that resumes reads the objective alone.
        assert "document_mask" not in arguments.run_arguments()


def test_an_objective_that_packs_no_documents_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        read_arguments(["--model", "t5-quickstart", "--document-mask"], quiet=False)
    assert ended.value.code == 2
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "--document-mask is for objectives that pack documents" in message
    assert "use objective 'gpt' or 'roberta'" in message


def find_documents(sample) -> list[torch.Tensor]:
    """The documents of a sample, by their ends."""
    ids = sample["input_ids"]
    ends = [0, *((ids[:-1] == 0).nonzero()[:, 0] + 1).tolist(), len(ids)]
    return [ids[start:stop] for start, stop in pairwise(ends)]


def test_samples_say_where_documents_begin(documents):
    packed = GPTDataset(documents, 13, seed=2)
    separate = GPTDataset(documents, 13, seed=2, separate_documents=True)
    for number in range(12):
        sample = separate[number]
        assert torch.equal(sample["input_ids"], packed[number]["input_ids"])
        found = find_documents(sample)
        assert sample["seq_idx"].tolist() == [i for i, part in enumerate(found) for _ in part]
        assert sample["position_ids"].tolist() == [i for part in found for i in range(len(part))]
        labels = torch.cat([torch.cat([torch.tensor([-100]), part[1:]]) for part in found])
        assert torch.equal(sample["labels"], labels)


def compute_loss(mesh, folder, sample) -> float:
    model = shardzoo.from_pretrained(folder, mesh)
    batch = {name: values[None] for name, values in sample.items()}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return model(**batch).loss.item()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_the_loss_is_that_of_each_document_alone(architecture, documents, tmp_path, run_mesh):
    theirs = hf_model(architecture, 0.0).eval()
    theirs.save_pretrained(tmp_path)
    samples = GPTDataset(documents, 31, seed=1, separate_documents=True)
    sample = max((samples[number] for number in range(6)), key=lambda found: found["seq_idx"][-1])
    alone = [part[None] for part in find_documents(sample) if len(part) > 1]
    with torch.no_grad():
        losses = [theirs(part, labels=part).loss.item() * (part.shape[1] - 1) for part in alone]
    wanted = sum(losses) / sum(part.shape[1] - 1 for part in alone)
    assert len(alone) > 2
    found = [compute_loss(None, tmp_path, sample), *run_mesh(2, compute_loss, tmp_path, sample)]
    assert found == pytest.approx([wanted] * 3, rel=1e-5)


@pytest.fixture(scope="module")
def short_texts(tmp_path_factory):
    """A file of 300 documents of 3 to 13 words."""
    path = tmp_path_factory.mktemp("short") / "texts.jsonl"
    texts = [
        " ".join(WORDS[(7 * i + j) % len(WORDS)] for j in range(3 + i % 11)) for i in range(300)
    ]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.mark.parametrize(
    ("family", "kind"), every_day([("llama", GPTObjective)], more=[("roberta", RobertaObjective)])
)
def test_every_layout_learns_alike_resumes_and_exports(
    run_mesh, tmp_path, short_texts, config, family, kind
):
    run = partial(
        run_pretraining,
        model=str(config(family, layers=2)),
        objective=kind(separate_documents=True),
        global_batch_size=8,
        save_interval=4,
    )
    # The export is compared with the held-out loss, by transformers.
    first = partial(run, folder=tmp_path / "whole", data=(str(short_texts),))
    whole = train_losses(run_mesh(1, first)[0])

    run = partial(run, data=(str(tmp_path / "whole" / "data" / "train"),), export=False)
    together = run_mesh(1, partial(run, folder=tmp_path / "together", objective=kind.name))[0]
    assert train_losses(together)[-1] != pytest.approx(whole[-1], rel=1e-3)
    layouts = [
        (2, {}, {}),
        (1, {"data": 2}, {"micro_batch_size": 2, "zero_stage": 2}),
        (1, {"pipeline": 2}, {"pipeline_parallel_size": 2}),
        (1, {"context": 2}, {"context_parallel_size": 2, "context_exchange": "ring"}),
    ]
    for number, (tp, axes, changes) in enumerate(layouts):
        split = partial(run, folder=tmp_path / str(number), **changes)
        assert train_losses(run_mesh(tp, split, **axes)[0]) == pytest.approx(whole, rel=1e-5)

    shutil.rmtree(sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))[-1])
    again = partial(first, resume=True, export=False)
    assert train_losses(run_mesh(1, again)[0]) == whole
