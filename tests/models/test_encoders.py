"""The encoders beside BERT and RoBERTa: files and configurations of older transformers, and initial weights."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tiny_models import tiny

import shardzoo
from shardzoo.models import config_from_dict, family, find_config
from shardzoo.models.auto import build_on_meta

# As published, by transformers 4.48.
MODERNBERT_BASE = json.loads("""{
  "architectures": ["ModernBertForMaskedLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 50281,
  "classifier_activation": "gelu", "classifier_bias": false, "classifier_dropout": 0.0, "classifier_pooling": "mean",
  "cls_token_id": 50281, "decoder_bias": true, "deterministic_flash_attn": false, "embedding_dropout": 0.0,
  "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
  "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
  "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
  "max_position_embeddings": 8192, "mlp_bias": false, "mlp_dropout": 0.0, "model_type": "modernbert",
  "norm_bias": false, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
  "position_embedding_type": "absolute", "sep_token_id": 50282, "tie_word_embeddings": true, "vocab_size": 50368
}""")


def test_modernberts_configuration_of_transformers_4():
    assert config_from_dict(MODERNBERT_BASE) == find_config("modernbert-base")
    other = config_from_dict(
        {**MODERNBERT_BASE, "local_rope_theta": 500.0, "global_attn_every_n_layers": 2}
    )
    theirs = transformers.ModernBertConfig(
        **{**MODERNBERT_BASE, "local_rope_theta": 500.0, "global_attn_every_n_layers": 2}
    )
    assert other.rope == theirs.rope_parameters
    assert other.attention_types == theirs.layer_types
    assert config_from_dict(theirs.to_dict()).attention_types == other.attention_types
    written = other.to_dict()
    assert (written["local_rope_theta"], written["global_attn_every_n_layers"]) == (500.0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {"local": {}}},
            "rope_parameters have an object for each of full_attention, ",
        ),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters must be objects, not 3"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types lists 1 layers, but num_hidden_layers is 22",
        ),
    ],
)
def test_modernberts_that_do_not_exist(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(MODERNBERT_BASE | changes)


def test_distilbert_has_its_own_keys():
    values = {
        "model_type": "distilbert",
        "dim": 24,
        "n_heads": 3,
        "n_layers": 2,
        "hidden_dim": 40,
        "dropout": 0.2,
    }
    config = config_from_dict(values)
    assert (config.hidden_size, config.attention_heads, config.hidden_dropout_prob) == (24, 3, 0.2)
    assert values.items() <= config.to_dict().items()
    assert not {"hidden_size", "num_attention_heads", "layer_norm_eps"} & config.to_dict().keys()
    assert config.with_changes(dim=48).hidden_size == 48


def test_megatron_bert_has_one_rate_for_its_classifiers_and_the_rest():
    """transformers ignores a rate of their own, which its BERT has."""
    values = tiny("megatron-bert", 0.2, classifier_dropout=0.9)
    config = config_from_dict(values)
    assert config.classifier_dropout_prob == 0.2
    assert "classifier_dropout" not in config.to_dict()
    for head in ("SequenceClassification", "TokenClassification", "MultipleChoice"):
        model = shardzoo.from_config(values | {"architectures": [f"MegatronBertFor{head}"]})
        assert model.dropout.p == 0.2, head


def test_a_summary_that_electra_does_not_compute():
    values = tiny("electra", summary_activation="tanh")
    config_from_dict(values)  # no other head uses it
    with pytest.raises(
        ValueError, match="summary_activation must be 'first', true and 'gelu', not"
    ):
        config_from_dict({**values, "architectures": ["ElectraForMultipleChoice"]})


@pytest.mark.parametrize(
    ("name", "others"),
    [
        (
            "distilbert",
            ["embeddings.position_ids", "vocab_projector.weight", "vocab_transform.bias"],
        ),
        (
            "electra",
            [
                "electra.embeddings.position_ids",
                "generator_lm_head.weight",
                "generator_predictions.dense.bias",
            ],
        ),
        (
            "xlm-roberta",
            [
                "roberta.embeddings.position_ids",
                "roberta.pooler.dense.weight",
                "lm_head.decoder.weight",
            ],
        ),
        ("camembert", ["roberta.embeddings.position_ids", "lm_head.decoder.bias"]),
        ("modernbert", ["decoder.weight", "head.dense.weight"]),
    ],
)
def test_files_with_buffers_copies_and_another_head(name, others):
    facts = family(name)
    classifier = facts.config(architecture=facts.tasks["text-classification"])
    native = [n for n, _ in build_on_meta(classifier, None).named_parameters()]
    stored = [part for entry in facts.name_map.resolve(native) for part in entry.stored_names()]
    match = facts.name_map.match(native, dict.fromkeys([*stored, *others]))
    assert set(match.sources) == set(stored)


def test_modernbert_starts_as_that_of_transformers():
    sizes = tiny(
        "modernbert", hidden_size=96, intermediate_size=200, vocab_size=3000, local_attention=8
    )
    ours = shardzoo.from_config(sizes)
    torch.manual_seed(0)
    theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes))
    stored = dict(theirs.named_parameters())
    for entry in family("modernbert").name_map.resolve(
        [name for name, _ in ours.named_parameters()]
    ):
        mine, [name] = ours.get_parameter(entry.native).detach(), entry.stored_names()
        expected = stored[name].detach()
        if expected.std() == 0:
            assert torch.equal(mine[: len(expected)], expected), name
        elif expected.numel() > 5000:
            assert 0.93 < mine[: len(expected)].std() / expected.std() < 1.07, name
            assert mine.abs().max() <= expected.abs().max() * 1.02, name


def compute_dropped_loss(mesh) -> float:
    from shardzoo.mpu import dropout_state

    # 50 inner features do not divide into 3 ranks, and both halves of the gate are cut.
    # Large weights, with which the loss depends on each of them.
    sizes = {"intermediate_size": 50, "mlp_dropout": 0.5, "initializer_range": 0.5}
    values = tiny("modernbert", 0.0, vocab_size=64, **sizes)
    model = shardzoo.from_config(values, mesh).train()
    dropout_state.set(7, 0)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    return model(ids, labels=ids).loss.item()


def test_unequal_parts_of_a_fused_gate_drop_the_same_features(run_mesh):
    [whole] = run_mesh(1, compute_dropped_loss)
    assert run_mesh(3, compute_dropped_loss) == pytest.approx([whole] * 3, rel=1e-5)
