"""Embedding as a task: layouts learn alike, and SentenceTransformer loads what is exported."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from every_case import every_day
from safetensors.torch import load_file
from tiny_models import PRETRAINED, save_model, text

from shardzoo import finetuning as t2t
from shardzoo.finetuning.embedding.data import ColumnCollate
from shardzoo.finetuning.embedding.pooling import pool

SHORT = {
    "task": "embedding",
    "max_source_length": 20,
    "lr": 3e-3,
    "train_steps": 4,
    "log_interval": 1,
    "validation_split": 20,
}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Tiny models of each shape, triplets, and pairs with scores."""
    folder = tmp_path_factory.mktemp("embedding")
    for kind in ("bert", "gpt2", "t5"):
        save_model(folder / kind, PRETRAINED[kind], kind)
    triplets = [
        {"anchor": text(n, 3), "positive": text(n, 2), "negative": text(n + 100, 4)}
        for n in range(20)
    ]
    scored = [
        {"sentence1": text(n, 3), "sentence2": text(n % 7, 4), "score": (n % 5) / 4}
        for n in range(20)
    ]
    for name, records in (("triplets", triplets), ("scored", scored)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def losses(folder) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def tune(mesh, setting, output, kind, file, **arguments):
    trainer = t2t.Trainer(
        model_name_or_path=str(setting / kind),
        train_file=str(setting / f"{file}.jsonl"),
        output_dir=str(output),
        mesh=mesh,
        **{**SHORT, **arguments},
    )
    values = trainer.train()
    trainer.save_model()
    return values


@pytest.mark.parametrize(
    ("kind", "file"), every_day([("bert", "triplets")], more=[("t5", "scored")])
)
def test_layouts_learn_alike(setting, tmp_path, run_mesh, kind, file):
    """With dropout: one process, in small pieces (GradCache), over two tensor-parallel ranks, and over two replicas."""
    work = partial(tune, setting=setting, kind=kind, file=file, dropout_rate=0.1)
    expected = work(None, output=tmp_path / "one", micro_batch_size=4)
    curve = losses(tmp_path / "one")
    assert len(curve) == 4
    assert ("ndcg@10" if file == "triplets" else "spearmanr") in expected
    pieces = work(None, output=tmp_path / "pieces", micro_batch_size=4, embedding_mini_batch=3)
    assert losses(tmp_path / "pieces") == pytest.approx(curve, rel=1e-5)
    assert pieces == pytest.approx(expected, rel=1e-4)

    split = {"model_parallel_size": 2, "micro_batch_size": 4}
    values, _ = run_mesh(2, partial(work, output=tmp_path / "split", **split))
    assert losses(tmp_path / "split") == pytest.approx(curve, rel=1e-4)
    assert values == pytest.approx(expected, rel=1e-3)
    replicas = {"micro_batch_size": 2, "eval_batch_size": 4, "env_type": "pytorchDDP"}
    values, _ = run_mesh(1, partial(work, output=tmp_path / "replicas", **replicas), data=2)
    assert losses(tmp_path / "replicas") == pytest.approx(curve, rel=1e-4)
    assert values == pytest.approx(expected, rel=1e-3)


def test_sentence_transformers_loads_the_export(setting, tmp_path):
    """Its embeddings, loss and gradients are ours, with prompts and each pooling."""
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    cases = [
        ("bert", "mean", True),
        ("gpt2", "last", False),
        ("t5", "weighted_mean", False),
        ("bert", "cls", False),
    ]
    for number, (kind, pooling, normalize) in enumerate(cases):
        output = tmp_path / str(number)
        prompts = {"query_prompt": "red ", "document_prompt": "blue "}
        tune(
            None, setting, output, kind, "triplets", pooling=pooling, normalize=normalize, train_steps=1,
            micro_batch_size=4, **prompts,
        )  # fmt: skip
        loaded = library.SentenceTransformer(str(output / "hf"), device="cpu")
        # What it exports trains on as it is: no option names pooling, length and prompts again.
        trainer = t2t.Trainer(
            model_name_or_path=str(output / "hf"),
            train_file=str(setting / "triplets.jsonl"),
            task="embedding",
            max_source_length=20,
            dropout_rate=0.0,
        )
        settings = trainer._data.embedding
        assert (settings.pooling, settings.normalize) == (pooling, normalize)
        records = trainer._data.train(False)
        samples = trainer._data.samples(records)
        batch = trainer._collate()([samples[row] for row in range(5)])
        model = trainer.model.train()
        embeddings = trainer.objective.embed(batch["input_ids"], batch["attention_mask"], model)
        texts = list(zip(*(records[row].texts for row in range(5)), strict=True))
        for column, (found, prompt) in enumerate(
            zip(texts, ("red ", "blue ", "blue "), strict=True)
        ):
            name = "query" if column == 0 else "document"
            wanted = loaded.encode(list(found), prompt_name=name, convert_to_tensor=True)
            torch.testing.assert_close(embeddings[:, column], wanted, rtol=1e-5, atol=1e-6)
            assert loaded.prompts[name] == prompt

        loss = trainer.objective(batch, model)["loss"]
        loss.backward()
        for module in loaded.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        loaded.train()
        prompted = [
            [p + t for t in found]
            for found, p in zip(texts, ("red ", "blue ", "blue "), strict=True)
        ]
        features = [loaded.preprocess(found) for found in prompted]
        expected = MultipleNegativesRankingLoss(loaded)(features, None)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        expected.backward()
        theirs = {
            name: p.grad
            for name, p in loaded[0].auto_model.named_parameters()
            if p.grad is not None
        }
        norms = torch.stack([grad.norm() for grad in theirs.values()]).norm()
        ours = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close(torch.stack(ours).norm(), norms, rtol=1e-5, atol=1e-6)


# Of these encoder-decoders the encoder alone is trained -> its class, the form of the tokenizer.
ENCODERS = {
    "bart": ("BartForConditionalGeneration", "BartEncoder", "bart"),
    "mbart": ("MBartForConditionalGeneration", "MBartEncoder", "bart"),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Encoder", "bart"),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusEncoder", "bart"),
    "marian": ("MarianMTModel", "MarianEncoder", "bart"),
    "mt5": ("MT5ForConditionalGeneration", "MT5EncoderModel", "t5"),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5EncoderModel", "t5"),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersEncoderModel", "t5",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", every_day(["bart"], more=[kind for kind in ENCODERS if kind != "bart"])
)
def test_sentence_transformers_loads_encoders_of_encoder_decoders(setting, tmp_path, kind):
    """From a folder of the whole model to one of its encoder, and from that to the same embeddings."""
    library = pytest.importorskip("sentence_transformers")
    whole, encoder, tokenizer = ENCODERS[kind]
    save_model(tmp_path / "whole", whole, tokenizer, seed=3)
    options = {"train_file": str(setting / "triplets.jsonl"), "micro_batch_size": 4}
    options |= {**SHORT, "train_steps": 1}
    trainer = t2t.Trainer(
        model_name_or_path=str(tmp_path / "whole"), output_dir=str(tmp_path / "run"), **options
    )
    trainer.train()
    folder = trainer.save_model()
    assert type(trainer.model).__name__ == encoder
    assert trainer.model_summary(no_print=True).parts.keys() == {"embeddings", "encoder"}
    with pytest.raises(ValueError, match=f"{encoder} is an encoder and has no decoder"):
        trainer.freeze(decoder=True)
    records = trainer._data.train(False)
    samples = trainer._data.samples(records)
    batch = trainer._collate()([samples[row] for row in range(5)])
    inputs = (batch["input_ids"], batch["attention_mask"])
    again = t2t.Trainer(model_name_or_path=str(folder), **options)
    with torch.no_grad():
        embeddings = trainer.objective.embed(*inputs, trainer.model.eval())
        assert torch.equal(trainer.objective.embed(*inputs, again.model.eval()), embeddings)

    loaded = library.SentenceTransformer(str(folder), device="cpu")
    for column in range(3):
        texts = [records[row].texts[column] for row in range(5)]
        wanted = loaded.encode(texts, convert_to_tensor=True)
        torch.testing.assert_close(embeddings[:, column], wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.before_release
@pytest.mark.parametrize("kind", ["bert", "t5", "gpt2"])
def test_stages_of_a_pipeline_embed_alike(setting, tmp_path, run_mesh, kind):
    """Training and its evaluation, and the folder that all stages write together."""
    options = {"kind": kind, "file": "triplets", "micro_batch_size": 4, "dropout_rate": 0.1}
    expected = tune(None, setting, tmp_path / "one", **options)
    stages = {"pipeline_parallel_size": 2, "env_type": "deepspeed+mpu"}
    if kind == "t5":
        stages["pipeline_partition"] = "parameters"  # three blocks
    work = partial(tune, setting=setting, output=tmp_path / "stages", **options, **stages)
    for values in run_mesh(1, work, pipeline=2):
        assert values == pytest.approx(expected, rel=1e-3)
    assert losses(tmp_path / "stages") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, other = (
        load_file(tmp_path / run / "hf" / "model.safetensors") for run in ("one", "stages")
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_a_text_without_tokens_is_pooled_as_sentence_transformers_does():
    """Decoders have no tokens for an empty text."""
    models = pytest.importorskip("sentence_transformers.models")
    hidden = torch.randn(3, 5, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    for name in ("mean", "last", "weighted_mean", "cls"):
        mode = {"last": "lasttoken", "weighted_mean": "weightedmean"}.get(name, name)
        features = {"token_embeddings": hidden, "attention_mask": mask}
        wanted = models.Pooling(8, pooling_mode=mode)(features)["sentence_embedding"]
        torch.testing.assert_close(pool(hidden, mask, name), wanted)
    batch = ColumnCollate(0)([{"columns": [[], []]}])
    assert batch["input_ids"].shape == (1, 2, 1)


def test_mistakes(setting, tmp_path):
    def refuse(match, kind="bert", file="triplets", **arguments):
        with pytest.raises(ValueError, match=match):
            tune(None, setting, tmp_path / "refused", kind, file, **arguments)

    refuse("needs 2 columns of texts and a score", embedding_loss="cosent")
    refuse("needs 3 columns", file="scored", embedding_loss="triplet")
    refuse("the embeddings have", matryoshka_dims=(4096,))
    (tmp_path / "nan.jsonl").write_text('{"a": "red", "b": "one", "score": NaN}\n' * 4)
    refuse("'score' must be a number", file=tmp_path / "nan")
    (tmp_path / "word.jsonl").write_text('{"a": "red", "b": "one", "score": "high"}\n' * 4)
    refuse("'score' must be a number or a list of them, not 'high'", file=tmp_path / "word")
    refuse("no key 'passage'", columns=("anchor", "passage"))
    refuse("the backward pass, which env_type", embedding_mini_batch=2, env_type="pytorchDDP")
    refuse(
        "embedding_mini_batch does not work with pipeline", embedding_mini_batch=2,
        pipeline_parallel_size=2,
    )  # fmt: skip
