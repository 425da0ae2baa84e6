"""BERT and RoBERTa against transformers: every head, odd sizes, padding, at every tensor-parallel size and mode."""

from __future__ import annotations

import pytest
import torch
import transformers
from parity import MODES, assert_same, oracle, randomize, run_modes, whole

TINY = {
    "twelve heads": {
        "hidden_size": 48, "num_attention_heads": 12, "num_hidden_layers": 2, "intermediate_size": 84,
        "vocab_size": 101, "max_position_embeddings": 21, "layer_norm_eps": 1e-5,
    },
    "head size 6, three segments, tanh gelu": {
        "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 20,
        "vocab_size": 67, "max_position_embeddings": 18, "type_vocab_size": 3, "hidden_act": "gelu_new",
    },
    "six heads, relu, another padding token": {
        "hidden_size": 30, "num_attention_heads": 6, "num_hidden_layers": 3, "intermediate_size": 42,
        "vocab_size": 131, "max_position_embeddings": 24, "hidden_act": "relu", "pad_token_id": 5,
    },
}  # fmt: skip
HEADS = {
    "BertForMaskedLM": {},
    "BertForPreTraining": {},
    "BertForSequenceClassification": {"num_labels": 3},
    "RobertaForMaskedLM": {},
    "RobertaForSequenceClassification": {"num_labels": 5, "problem_type": "multi_label_classification"},
}
BATCH, LENGTH = 3, 12


def build(architecture: str, sizes: dict, **changes):
    """A model of transformers with random weights and dropout, as eager fp32."""
    family = "bert" if architecture.startswith("Bert") else "roberta"
    config = transformers.AutoConfig.for_model(family, **{**sizes, **HEADS[architecture], **changes})
    config.architectures = [architecture]
    config._attn_implementation = "eager"
    model = getattr(transformers, architecture)(config)
    randomize(model, seed=3)
    return model


def make_inputs(config, architecture: str) -> dict:
    """A batch with padding on the right, on the left, and none; labels for some positions."""
    generator = torch.Generator().manual_seed(7)
    shape = (BATCH, LENGTH)

    def integers(high, *size):
        return torch.randint(high, size, generator=generator)

    mask = torch.ones(shape, dtype=torch.long)
    mask[0, 9:], mask[1, :4] = 0, 0
    ids = integers(config.vocab_size, *shape)
    ids[ids == config.pad_token_id] = 9
    ids[mask == 0] = config.pad_token_id
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": integers(config.type_vocab_size, *shape)}
    if "Classification" in architecture:
        many = config.problem_type == "multi_label_classification"
        inputs["labels"] = integers(2, BATCH, config.num_labels).float() if many else integers(config.num_labels, BATCH)
    else:
        labels = integers(config.vocab_size, *shape)
        inputs["labels"] = labels.masked_fill(torch.rand(shape, generator=generator) < 0.5, -100)
    if architecture == "BertForPreTraining":
        inputs["next_sentence_label"] = integers(2, BATCH)
    return inputs


@pytest.fixture(scope="module")
def references():
    """For every head and size: the configuration, the stored tensors, the inputs, and what transformers computes."""
    cases = {}
    for architecture in HEADS:
        for name, sizes in TINY.items():
            model = build(architecture, sizes)
            inputs = make_inputs(model.config, architecture)
            stored = {key: value.clone() for key, value in model.state_dict().items()}
            cases[architecture, name] = (model.config.to_dict(), stored, inputs, oracle(model, inputs))
    return cases


def modes_of(architecture: str):
    """All modes for one head; for the others, which share its body, the two that differ most."""
    return MODES if architecture == "BertForMaskedLM" else ((False, "none"), (True, "full"))


def run_cases(mesh, cases):
    return [run_modes(mesh, *case) for case in cases]


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_equal_to_transformers(tp, run_mesh, references):
    keys = [key for key in references if TINY[key[1]]["num_attention_heads"] % tp == 0]
    assert {architecture for architecture, _ in keys} == set(HEADS)
    ranks = run_mesh(tp, run_cases, [(*references[key][:3], modes_of(key[0])) for key in keys])
    for i, key in enumerate(keys):
        config, _, _, expected = references[key]
        for j, mode in enumerate(modes_of(key[0])):
            try:
                assert_same(whole(config, [rank[i] for rank in ranks], j), expected)
            except AssertionError as error:
                raise AssertionError(f"{key}, sequence_parallel and recompute {mode}: {error}") from error
