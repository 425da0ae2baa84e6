"""Every loss of embeddings, rankings and preferences: sentence-transformers' and TRL's own on the same batch and
weights, and curves that do not depend on the layout.

`SHARDZOO_TESTS=all python -m pytest -s` of this file prints the largest difference of each loss.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from every_case import every_day
from parity import merge_gradients
from tiny_models import PRETRAINED, hf_model, save_model, text

from shardzoo import finetuning as t2t

ROWS = 8
STEPS = 20
TOLERANCE = 1e-5
BETA = 0.3


@dataclass(frozen=True)
class Case:
    """A loss of ours beside a library's.

    kind: the folder of the model. file: of the records. options: of our trainer. theirs: the library's class.
    arguments: of that.
    """

    name: str
    task: str
    kind: str
    file: str
    options: dict[str, Any]
    theirs: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def embed(name: str, file: str, loss: str, theirs: str, arguments=None, **options: Any) -> Case:
    options = {"embedding_loss": loss, **options}
    return Case(name, "embedding", "bert", file, options, theirs, arguments or {})


def rank(loss: str, file: str, theirs: str) -> Case:
    return Case(loss, "reranking", "scorer", file, {"ranking_loss": loss}, theirs)


def prefer(name: str, loss: str, theirs: str, kind: str = "gpt2", **arguments: Any) -> Case:
    options = {"preference_loss": loss, "beta": BETA, "reference_model": f"{kind}-reference"}
    if loss in ("orpo", "simpo"):
        del options["reference_model"]
    file = "single" if loss == "kto" else "pairs"
    return Case(name, "preference", kind, file, options, theirs, {"beta": BETA, **arguments})


IN_BATCH = "multiple_negatives_ranking"
EMBEDDINGS = {
    case.name: case
    for case in (
        embed("in-batch negatives", "twos", IN_BATCH, "MultipleNegativesRankingLoss"),
        embed("hard negatives", "triplets", IN_BATCH, "MultipleNegativesRankingLoss"),
        embed(
            "cached", "triplets", IN_BATCH, "CachedMultipleNegativesRankingLoss",
            {"mini_batch_size": 3}, embedding_mini_batch=9,
        ),
        embed(
            "Matryoshka", "triplets", IN_BATCH, "MultipleNegativesRankingLoss",
            {"matryoshka_dims": [32, 20, 8]}, matryoshka_dims=(32, 20, 8),
        ),
        embed("CoSENT", "scored", "cosent", "CoSENTLoss"),
        embed("AnglE", "scored", "angle", "AnglELoss"),
        embed("cosine", "scored", "cosine", "CosineSimilarityLoss"),
        embed("contrastive", "binary", "contrastive", "ContrastiveLoss"),
        embed("online contrastive", "binary", "online_contrastive", "OnlineContrastiveLoss"),
        embed("triplet", "triplets", "triplet", "TripletLoss"),
        embed("margin MSE", "margins", "margin_mse", "MarginMSELoss"),
        embed("KL distillation", "candidates", "distill_kl", "DistillKLDivLoss"),
    )
}  # fmt: skip
RANKINGS = {
    case.name: case
    for case in (
        rank("bce", "documents", "BinaryCrossEntropyLoss"),
        rank("ranknet", "lists", "RankNetLoss"),
        rank("listnet", "lists", "ListNetLoss"),
        rank("listmle", "lists", "ListMLELoss"),
    )
}
PREFERENCES = {
    case.name: case
    for case in (
        prefer("DPO", "dpo", "trl.trainer.dpo DPO", loss_type="sigmoid"),
        prefer("IPO", "ipo", "trl.trainer.dpo DPO", loss_type="ipo"),
        prefer("KTO", "kto", "trl.trainer.kto KTO"),
        prefer("ORPO", "orpo", "trl.experimental.orpo.orpo ORPO"),
        prefer("ORPO of T5", "orpo", "trl.experimental.orpo.orpo ORPO", "t5"),
        prefer("SimPO", "simpo", "trl.experimental.cpo.cpo CPO", loss_type="simpo", cpo_alpha=0.0),
        prefer(
            "SimPO of T5", "simpo", "trl.experimental.cpo.cpo CPO", "t5",
            loss_type="simpo", cpo_alpha=0.0,
        ),
        Case(
            "reward", "reward", "scored-gpt2", "pairs", {"center_rewards": 0.2},
            "trl.trainer.reward Reward", {"center_rewards_coefficient": 0.2},
        ),
        Case("reward with margins", "reward", "scored-gpt2", "margined", {}, "trl.trainer.reward Reward"),
    )
}  # fmt: skip
CASES = {**EMBEDDINGS, **RANKINGS, **PREFERENCES}
DAILY = ("cached", "cosine", "online contrastive", "ranknet", "ORPO")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Tiny models with large weights, and a file of each kind of records."""
    folder = tmp_path_factory.mktemp("losses")
    save_model(folder / "bert", "BertModel", "bert", seed=1)
    for kind in ("gpt2", "t5"):
        save_model(folder / kind, PRETRAINED[kind], kind, seed=2)
        save_model(folder / f"{kind}-reference", PRETRAINED[kind], kind, seed=3)
    save_model(folder / "scorer", "BertForSequenceClassification", "bert", seed=4, num_labels=1)
    save_model(folder / "scored-gpt2", PRETRAINED["gpt2"], "gpt2")
    config = transformers.AutoConfig.from_pretrained(folder / "gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "gpt2")
    settings = {"vocab_size": config.vocab_size, "num_labels": 1}
    settings["pad_token_id"] = tokenizer.pad_token_id or tokenizer.eos_token_id
    model = hf_model("GPT2ForSequenceClassification", **settings)
    model.save_pretrained(folder / "scored-gpt2")

    files: dict[str, list[dict[str, Any]]] = {name: [] for name in (
        "twos", "triplets", "scored", "binary", "margins", "candidates", "documents", "lists",
        "pairs", "single", "margined",
    )}  # fmt: skip
    for n in range(2 * ROWS):
        anchor = text(n, 3)
        positive = text(n + 30, 2 + n % 3)
        negative = text(n + 60, 4)
        texts = {"anchor": anchor, "positive": positive, "negative": negative}
        files["twos"].append({"anchor": anchor, "positive": positive})
        files["triplets"].append(texts)
        two = {"first": anchor, "second": positive}
        files["scored"].append({**two, "score": (n * 7 % 11) / 10})
        files["binary"].append({**two, "label": n * 5 % 3 % 2})
        more = {**texts, "other": text(n + 90, 2)}
        files["margins"].append({**more, "score": [n % 3 - 0.5, n % 4 / 4]})
        files["candidates"].append({**more, "score": [n % 3 - 0.5, n % 4 / 4, n % 5 / 3]})
        files["documents"].append({"query": anchor, "docs": positive, "label": n % 2})
        size = 2 + n % 3
        documents = [text(n + 30 * m, 2 + m) for m in range(1, size + 1)]
        files["lists"].append({"query": anchor, "docs": documents, "labels": [1, 2, 0, 0][:size]})
        answers = {"chosen": f" {positive}", "rejected": f" {negative}"}
        files["pairs"].append({"prompt": anchor, **answers})
        files["margined"].append({"prompt": anchor, **answers, "margin": n % 3 / 2})
        files["single"].append({"prompt": anchor, "completion": f" {positive}", "label": n % 3 > 0})
    for name, records in files.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def make(case: Case, setting, mesh=None, **options: Any) -> t2t.Trainer:
    options = {**case.options, **options}
    if "reference_model" in options:
        options["reference_model"] = str(setting / options["reference_model"])
    return t2t.Trainer(
        task=case.task,
        model_name_or_path=str(setting / case.kind),
        train_file=str(setting / f"{case.file}.jsonl"),
        max_source_length=32,
        max_target_length=32,
        dropout_rate=0.0,
        mesh=mesh,
        **options,
    )


def make_batch(trainer: t2t.Trainer, rows: range) -> dict[str, torch.Tensor]:
    records = trainer._data.train(False)
    samples = trainer._data.samples(records)
    return trainer._collate()([samples[row] for row in rows])


def measure(mesh, names, setting) -> list[tuple[float, dict[str, Any]]]:
    """The loss of this rank's rows and the gradients, with their shards, of each case."""
    results = []
    replicas = 1 if mesh is None else mesh.dp_size
    first = 0 if mesh is None else mesh.dp_rank * ROWS // replicas
    rows = range(first, first + ROWS // replicas)
    for name in names:
        trainer = make(CASES[name], setting, mesh)
        trainer._prepare_answers()
        loss = trainer.objective(make_batch(trainer, rows), trainer.model)["loss"]
        loss.backward()
        parameters = trainer.model.named_parameters()
        grads = {
            n: (p.grad, getattr(p, "shard", None)) for n, p in parameters if p.grad is not None
        }
        results.append((loss.item(), grads))
    return results


def run_sentence_transformers(case: Case, setting) -> tuple[Any, torch.Tensor]:
    """Its model, and its loss of the first rows."""
    library = pytest.importorskip("sentence_transformers")
    trainer = make(case, setting)
    records = [trainer._data.train(False)[row] for row in range(ROWS)]
    if case.task == "reranking":
        from sentence_transformers.cross_encoder import losses

        model = library.CrossEncoder(str(setting / case.kind), num_labels=1, device="cpu")
        queries = [record.query for record in records]
        if case.name == "bce":
            documents = [record.documents[0] for record in records]
            labels = torch.tensor([record.relevance[0] for record in records])
        else:
            documents = [list(record.documents) for record in records]
            labels = [torch.tensor(record.relevance) for record in records]
        loss = getattr(losses, case.theirs)(model)([queries, documents], labels)
        return model.model, loss

    from sentence_transformers.sentence_transformer import losses

    model = library.SentenceTransformer(str(setting / case.kind), device="cpu")
    columns = zip(*(record.texts for record in records), strict=True)
    features = [model.preprocess(list(column)) for column in columns]
    arguments = dict(case.arguments)
    dims = arguments.pop("matryoshka_dims", None)
    compute = getattr(losses, case.theirs)(model, **arguments)
    if dims is not None:
        compute = losses.MatryoshkaLoss(model, compute, dims)
    labels = None
    if records[0].scores:
        labels = torch.tensor([record.scores for record in records])
        labels = labels[:, 0] if labels.shape[1] == 1 else labels
    return model[0].auto_model, compute(features, labels)


def run_trl(case: Case, setting, tmp_path) -> tuple[Any, torch.Tensor]:
    """TRL's model, and its loss of the batch that we train on."""
    from datasets import Dataset

    module, name = case.theirs.split()
    trl = pytest.importorskip(f"{module}_trainer")
    configs = pytest.importorskip(f"{module}_config")
    load = transformers.AutoModelForCausalLM
    if case.kind == "t5":
        load = transformers.AutoModelForSeq2SeqLM
    if case.task == "reward":
        load = transformers.AutoModelForSequenceClassification
    model = load.from_pretrained(setting / case.kind)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    options = {}
    if "reference_model" in case.options:
        options["ref_model"] = load.from_pretrained(setting / case.options["reference_model"])
    lines = (setting / f"{case.file}.jsonl").read_text().splitlines()
    theirs = getattr(trl, f"{name}Trainer")(
        model,
        args=getattr(configs, f"{name}Config")(
            output_dir=str(tmp_path), report_to="none", bf16=False, use_cpu=True,
            per_device_train_batch_size=ROWS, gradient_checkpointing=False, **case.arguments,
        ),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=transformers.AutoTokenizer.from_pretrained(setting / case.kind),
        **options,
    )  # fmt: skip
    return model, theirs.compute_loss(theirs.model, name_as_trl(case, setting))


def name_as_trl(case: Case, setting) -> dict[str, Any]:
    """Our batch with TRL's names."""
    batch = make_batch(make(case, setting), range(ROWS))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    both = {"input_ids": ids.transpose(0, 1).flatten(0, 1)}
    both["attention_mask"] = mask.transpose(0, 1).flatten(0, 1)
    if case.task == "reward":
        return {**both, **({"margin": batch["margin"]} if "margin" in batch else {})}
    targets = batch["targets"]
    is_answer = (targets != -100).long()
    loss = case.options["preference_loss"]
    if loss in ("dpo", "ipo"):
        return {**both, "completion_mask": is_answer.transpose(0, 1).flatten(0, 1)}
    if loss == "kto":
        named = {"label": batch["is_desirable"]}
        for place, prefix in enumerate(("", "KL_")):
            named[f"{prefix}input_ids"] = ids[:, place]
            named[f"{prefix}attention_mask"] = mask[:, place]
            named[f"{prefix}completion_mask"] = is_answer[:, place]
        return named
    named = {"prompt_input_ids": ids[:, 0], "prompt_attention_mask": mask[:, 0]}
    for place, prefix in enumerate(("chosen", "rejected")):
        named[f"{prefix}_labels"] = targets[:, place]
        if case.kind == "t5":
            continue
        named[f"{prefix}_input_ids"] = ids[:, place]
        named[f"{prefix}_attention_mask"] = mask[:, place]
    return named


def compare(
    case: Case, found: tuple[float, dict], wanted: tuple[float, dict]
) -> tuple[float, float]:
    """The difference of the losses, relative above 1, and of the gradients as a part of the largest element."""
    loss, grads = found
    expected, theirs = wanted
    prefixes = ("bert.", "transformer.")
    for prefix in prefixes:
        theirs = {name.removeprefix(prefix): grad for name, grad in theirs.items()}
        grads = {name.removeprefix(prefix): grad for name, grad in grads.items()}
    shared = {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    assert theirs.keys() - shared <= grads.keys(), case
    largest = max(grad.abs().max().item() for grad in theirs.values())
    assert largest > 1e-4, case
    common = theirs.keys() & grads.keys()
    worst = max((grads[name] - theirs[name]).abs().max().item() for name in common)
    return abs(loss - expected) / max(1.0, abs(expected)), worst / largest


def test_each_loss_is_the_librarys_in_every_layout(setting, tmp_path, run_mesh):
    """Values and gradients of one process, two tensor-parallel ranks, and two replicas of half of the rows."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("trl")
    names = every_day(DAILY, more=[name for name in CASES if name not in DAILY])
    single = measure(None, names, setting)
    work = partial(measure, names=names, setting=setting)
    split = run_mesh(2, work)
    replicas = run_mesh(1, work, data=2)
    failures = []
    for number, name in enumerate(names):
        case = CASES[name]
        if case.theirs.startswith("trl"):
            model, expected = run_trl(case, setting, tmp_path)
        else:
            model, expected = run_sentence_transformers(case, setting)
        expected.backward()
        wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        family = model.config.model_type

        found = {"one process": (single[number][0], merge_gradients(family, [single[number][1]]))}
        assert split[0][number][0] == split[1][number][0]
        grads = merge_gradients(family, [rank[number][1] for rank in split])
        found["TP 2"] = (split[0][number][0], grads)
        halves = [merge_gradients(family, [rank[number][1]]) for rank in replicas]
        grads = {n: (halves[0][n] + halves[1][n]) / 2 for n in halves[0]}
        found["DP 2"] = (sum(rank[number][0] for rank in replicas) / 2, grads)
        for layout, ours in found.items():
            gaps = compare(case, ours, (expected.item(), wanted))
            print(f"{name:20} {layout:12} loss {gaps[0]:.1e} gradients {gaps[1]:.1e}")
            if not max(gaps) <= TOLERANCE:
                failures.append((name, layout, *gaps))
    assert not failures


def tune(mesh, name, setting, output, **options) -> None:
    settings = {"micro_batch_size": 4, "lr": 3e-3, "train_steps": STEPS, "log_interval": 1}
    settings |= {"save_interval": 1000, "validation_split": 0, "output_dir": str(output)}
    make(CASES[name], setting, mesh, **{**settings, **options}).train(valid=False)


def curve(folder) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


LAYOUTS = {
    "TP 2": {"model_parallel_size": 2},
    "SP 2": {"model_parallel_size": 2, "sequence_parallel": True},
    "DP 2": {"micro_batch_size": 2, "env_type": "pytorchDDP"},
    "PP 2": {"pipeline_parallel_size": 2, "env_type": "deepspeed+mpu"},
    "PP 2, two micro-batches": {
        "pipeline_parallel_size": 2, "env_type": "deepspeed+mpu", "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
    },
}  # fmt: skip
# Losses that are means over rows, each by itself, so that micro-batches add up to the batch.
OF_ROWS = ("triplet", "cosine", "bce", "listnet", "DPO", "IPO", "SimPO", "SimPO of T5", "reward")


@pytest.mark.before_release
@pytest.mark.parametrize("name", CASES)
def test_curves_do_not_depend_on_the_layout(setting, tmp_path, run_mesh, name):
    work = partial(tune, name=name, setting=setting)
    work(None, output=tmp_path / "one")
    expected = curve(tmp_path / "one")
    assert len(expected) == STEPS
    for layout, options in LAYOUTS.items():
        ranks = options.get("model_parallel_size", 1)
        stages = options.get("pipeline_parallel_size", 1)
        if stages > 1 and name == "cached":
            continue  # A schedule passes a micro-batch on once.
        if "micro-batches" in layout and name not in OF_ROWS:
            continue
        if name == "cached" and layout == "DP 2":
            # DDP cannot run the model again in the backward pass; DeepSpeed does.
            options = {**options, "env_type": "deepspeed+mpu"}
        each = partial(work, output=tmp_path / layout, **options)
        run_mesh(ranks, each, data=2 // ranks // stages, pipeline=stages)
        found = curve(tmp_path / layout)
        gap = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, expected, strict=True))
        print(f"{name:20} {layout} {STEPS} steps: {gap:.1e}")
        assert gap < 1e-4, (name, layout)
