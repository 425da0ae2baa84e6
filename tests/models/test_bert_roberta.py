"""BERT and RoBERTa beside their logits: positions, labels, files, sizes, dropout, compilation."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from parity import load_stored, randomize
from safetensors.torch import load_file, save_file

import shardzoo
from shardzoo.models import config_from_dict, family, from_config
from shardzoo.models.auto import build_on_meta
from shardzoo.models.bert import BertConfig
from shardzoo.mpu import materialize

TINY = {
    "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 36,
    "vocab_size": 101, "max_position_embeddings": 18, "attn_implementation": "eager",
}  # fmt: skip


def reference(architecture: str, **changes):
    """A model of transformers with random weights."""
    family_name = "bert" if architecture.startswith("Bert") else "roberta"
    config = transformers.AutoConfig.for_model(family_name, **{**TINY, **changes})
    config.architectures = [architecture]
    model = getattr(transformers, architecture)(config).eval()
    randomize(model, seed=4)
    return model


def native(model):
    """The same model of the zoo."""
    config = config_from_dict(model.config.to_dict())
    ours = materialize(build_on_meta(config, None), "cpu")
    load_stored(ours, family(config.model_type).name_map, model.state_dict(), None)
    return ours.eval()


def batch(length: int = 12) -> dict:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(6, 101, (3, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


LABELS = {
    "classes": (3, None, torch.tensor([2, 0, 1])),
    "one number": (1, None, torch.tensor([0.5, -1.0, 2.0])),
    "one number for each row": (1, "regression", torch.tensor([[0.5], [-1.0], [2.0]])),
    "three numbers": (3, "regression", torch.linspace(-1, 1, 9).view(3, 3)),
    "several labels": (3, None, torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 1]])),
    "named classes": (3, "single_label_classification", torch.tensor([2, -100, 1])),
}


@pytest.mark.parametrize(
    "architecture", ["BertForSequenceClassification", "RobertaForSequenceClassification"]
)
@pytest.mark.parametrize("kind", LABELS)
def test_every_kind_of_classification_labels(architecture, kind):
    number, problem_type, labels = LABELS[kind]
    model = reference(architecture, num_labels=number, problem_type=problem_type)
    ours, inputs = native(model), batch()
    expected = model(**inputs, labels=labels)
    output = ours(**inputs, labels=labels)
    close(output.logits, expected.logits)
    assert output.loss.item() == pytest.approx(expected.loss.item(), abs=1e-6)
    targets = [ours.count_targets(part) for part in labels.split([1, 2])]
    rows = [{name: value.split([1, 2])[i] for name, value in inputs.items()} for i in range(2)]
    parts = [
        ours(**rows[i], labels=labels.split([1, 2])[i], num_items_in_batch=sum(targets)).loss.item()
        for i in range(2)
    ]
    assert sum(parts) == pytest.approx(expected.loss.item(), abs=1e-6)


def test_labels_that_do_not_fit_are_refused():
    model = native(reference("BertForSequenceClassification", num_labels=3))
    with pytest.raises(
        ValueError, match=r"multi_label_classification needs labels of shape \(3, 3\)"
    ):
        model(**batch(), labels=torch.ones(3))
    for wrong in (3, -1):
        with pytest.raises(
            ValueError, match=f"label {wrong} is no class of the model, which has 3"
        ):
            model(**batch(), labels=torch.tensor([0, wrong, -100]))


@pytest.mark.parametrize(
    "architecture", ["BertForMaskedLM", "BertForPreTraining", "RobertaForMaskedLM"]
)
def test_accumulated_loss_is_the_loss_of_the_whole_batch(architecture):
    model = native(reference(architecture))
    inputs = batch() | {
        "labels": batch()["input_ids"].masked_fill(batch()["input_ids"] % 3 > 0, -100)
    }
    totals = {"num_items_in_batch": model.count_targets(inputs["labels"])}
    if architecture == "BertForPreTraining":
        inputs["next_sentence_label"] = torch.tensor([1, 0, 1])
        totals["num_sequences_in_batch"] = 3
        with pytest.raises(ValueError, match="both num_items_in_batch and num_sequences_in_batch"):
            model(**inputs, num_items_in_batch=3)
        assert model(**batch(), labels=inputs["labels"]).loss is None  # as in transformers
    rows = [{name: value[i : i + 1] for name, value in inputs.items()} for i in range(3)]
    parts = [model(**row, **totals).loss.item() for row in rows]
    assert sum(parts) == pytest.approx(model(**inputs).loss.item(), abs=2e-6)


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_hidden_states_and_optional_inputs(architecture):
    model = reference(architecture)
    ours, ids = native(model), batch()["input_ids"]
    ids[1, :2] = 1  # RoBERTa's padding, here not masked, still counts no position
    for inputs in (
        {},
        {"position_ids": torch.arange(12).flip(0)[None]},
        {"token_type_ids": (ids > 50).long()},
    ):
        expected = model(ids, **inputs, output_hidden_states=True)
        output = ours(ids, **inputs, output_hidden_states=True)
        close(ours.gather_logits(output.logits), expected.logits)
        assert len(output.hidden_states) == len(expected.hidden_states) == 3
        for actual, state in zip(output.hidden_states, expected.hidden_states, strict=True):
            close(actual, state)
    assert ours(ids).hidden_states is None


def test_a_mask_for_each_query():
    model = reference(
        "BertForMaskedLM", attn_implementation="sdpa"
    )  # the eager form takes such a mask as numbers
    ours, ids = native(model), batch()["input_ids"]
    mask = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    expected = model(ids, attention_mask=mask).logits
    close(ours.gather_logits(ours(ids, attention_mask=mask).logits), expected)


def test_too_many_tokens_are_refused():
    ids = torch.full((1, 17), 7)
    with pytest.raises(ValueError, match="17 tokens, but the model has only 16 positions"):
        native(reference("RobertaForMaskedLM"))(ids)  # two of the eighteen serve no token
    native(reference("BertForMaskedLM"))(ids)
    with pytest.raises(ValueError, match="19 tokens, but the model has only 18 positions"):
        native(reference("BertForMaskedLM"))(torch.full((1, 19), 7))


def folder_of(model, path, change=lambda tensors: None):
    """The model as transformers saves it, after `change(tensors)`."""
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    return path


def assert_loads(path, model, **options):
    ours = shardzoo.from_pretrained(path, **options)
    close(ours.gather_logits(ours(**batch())[0]), model(**batch())[0])


def old_names(tensors):
    for name in [name for name in tensors if "LayerNorm" in name]:
        new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )
        tensors[new] = tensors.pop(name)
    assert any(name.endswith("beta") for name in tensors)


def buffer_of_positions(tensors):
    tensors["bert.embeddings.position_ids"] = torch.arange(18)[None]


def with_decoder(tensors):
    tensors["cls.predictions.decoder.weight"] = tensors[
        "bert.embeddings.word_embeddings.weight"
    ].clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()


def only_decoder_bias(tensors):
    tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")


@pytest.mark.parametrize(
    "change", [old_names, buffer_of_positions, with_decoder, only_decoder_bias]
)
def test_old_bert_files(change, tmp_path):
    model = reference("BertForMaskedLM")
    assert_loads(folder_of(model, tmp_path, change), model)


def test_old_roberta_files(tmp_path):
    model = reference("RobertaForMaskedLM")

    def change(tensors):
        tensors["lm_head.decoder.weight"] = tensors[
            "roberta.embeddings.word_embeddings.weight"
        ].clone()
        tensors["lm_head.decoder.bias"] = tensors["lm_head.bias"].clone()
        tensors["roberta.embeddings.position_ids"] = torch.arange(18)[None]
        tensors["roberta.pooler.dense.weight"], tensors["roberta.pooler.dense.bias"] = (
            torch.ones(24, 24),
            torch.ones(24),
        )

    assert_loads(folder_of(model, tmp_path, change), model)


def test_a_pretraining_checkpoint_gives_its_masked_language_model(tmp_path):
    """As released: the files have both heads, the configuration names one."""
    model = reference("BertForPreTraining")
    folder = folder_of(model, tmp_path)
    assert_loads(folder, model)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    assert type(shardzoo.from_pretrained(folder)) is family("bert").architectures["BertForMaskedLM"]
    assert_loads(folder, model)


@pytest.mark.parametrize(
    "architecture", ["BertForSequenceClassification", "RobertaForSequenceClassification"]
)
def test_classifiers_keep_their_labels(architecture, tmp_path):
    names = {0: "no", 1: "perhaps", 2: "yes"}
    model = reference(architecture, id2label=names, label2id={name: i for i, name in names.items()})
    folder = folder_of(model, tmp_path)
    assert_loads(folder, model)
    config = shardzoo.from_pretrained(folder).config
    assert config.num_labels == 3
    again = transformers.AutoConfig.for_model(**config.to_dict())
    assert (again.id2label, again.label2id, again.num_labels) == (names, model.config.label2id, 3)
    with pytest.raises(ValueError, match="id2label names 3 labels, but num_labels is 4"):
        config.with_changes(num_labels=4)
    plain = config.with_changes(num_labels=4, id2label=None, label2id=None)
    assert transformers.AutoConfig.for_model(**plain.to_dict()).num_labels == 4
    assert config_from_dict(plain.to_dict()) == plain


def tune(mesh, folder):
    """A classifier that starts from the body of a checkpoint with another head, on one rank."""
    pretrained = shardzoo.from_pretrained(folder, mesh)
    head = f"{type(pretrained).__name__.removesuffix('ForMaskedLM')}ForSequenceClassification"
    model = from_config(
        pretrained.config.with_changes(architecture=head, num_labels=3), mesh
    ).eval()
    model.encoder.load_state_dict(pretrained.encoder.state_dict())
    return model(**batch(), output_hidden_states=True).hidden_states[-1].detach()


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_a_classifier_can_start_from_a_pretrained_body(architecture, run_mesh, tmp_path):
    model = reference(architecture)
    expected = model(**batch(), output_hidden_states=True).hidden_states[-1].detach()
    for actual in run_mesh(2, tune, folder_of(model, tmp_path)):
        close(actual, expected)


def test_a_compiled_block_computes_the_same():
    block = native(reference("BertForMaskedLM")).encoder.blocks[0]
    x = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., 6:] = False

    def run(function):
        block.zero_grad()
        y = function(x, mask)
        y.square().sum().backward()
        return y.detach(), [parameter.grad.clone() for parameter in block.parameters()]

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled), run(block), rtol=1e-5, atol=1e-5)


# The releases, with the masked-language-model head, whose decoder is tied.
PRESETS = {**family("bert").presets, **family("roberta").presets}


def count(config) -> int:
    model = from_config(config, device="meta")
    return sum(math.prod(getattr(p, "shard", p).shape) for p in model.parameters())


def test_parameter_counts_of_other_heads():
    large = family("bert").presets["bert-large-uncased"]
    assert count(large.with_changes(architecture="BertForPreTraining")) == 336_226_108
    assert count(large.with_changes(architecture="BertForSequenceClassification")) == 335_143_938


@pytest.mark.parametrize("name", ["bert-base-uncased", "roberta-base"])
def test_every_head_has_transformers_parameters(name):
    config = PRESETS[name]
    for architecture in family(config.model_type).architectures:
        values = config.with_changes(architecture=architecture).to_dict()
        with torch.device("meta"):
            theirs = getattr(transformers, architecture)(
                transformers.AutoConfig.for_model(**values)
            )
        assert count(values) == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize("name", ["bert-base-uncased", "roberta-base"])
def test_initial_weights_are_those_of_transformers(name):
    config = PRESETS[name].with_changes(num_hidden_layers=1, vocab_size=1000)
    parameters = dict(from_config(config).named_parameters())
    for parameter, value in parameters.items():
        if parameter.endswith("bias"):
            assert (value == 0).all()
        elif "norm" in parameter:
            assert (value == 1).all()
        else:
            # Two segments have too few numbers to be close.
            assert value.std().item() == pytest.approx(
                0.02, rel=0.1 if value.numel() < 2000 else 0.02
            )
    assert (parameters["encoder.word_embeddings.weight"][config.pad_token_id] == 0).all()
    assert (parameters["encoder.position_embeddings.weight"][1] == 0).all() == (
        name == "roberta-base"
    )


def test_refused_configurations():
    with pytest.raises(
        ValueError, match="architecture 'BertForSpeech' is not supported; use one of"
    ):
        config_from_dict({"model_type": "bert", "architectures": ["BertForSpeech"]})
    with pytest.raises(ValueError, match="is_decoder and add_cross_attention must be false"):
        config_from_dict({"model_type": "roberta", "is_decoder": True})
    with pytest.raises(ValueError, match="position_embedding_type 'relative_key'"):
        config_from_dict({"model_type": "bert", "position_embedding_type": "relative_key"})
    with pytest.raises(ValueError, match="use num_attention_heads from"):
        config_from_dict({"model_type": "bert", "num_attention_heads": 7})
    config = BertConfig(num_labels=1, problem_type="single_label_classification")
    assert config.problem_type == "single_label_classification"  # see test_causal_bert.py
