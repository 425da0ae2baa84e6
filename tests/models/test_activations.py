"""The activation formulas, against what autograd saves: equal to the byte, for every family."""

from __future__ import annotations

import pytest
import torch

from shardzoo.models import ParallelConfig, family, find_config, from_config
from shardzoo.models.activations import Batch, Layout, block_bytes

SIZE, SOURCE, TARGET = 2, 16, 12
DROPOUTS = (
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate",
    "embedding_dropout_prob", "attention_dropout_prob", "output_dropout_prob",
)  # fmt: skip
FAMILIES = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_positions": 32},
    "bert-base-uncased": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 80},
    "roberta-base": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 80},
    "glm-large": {"hidden_size": 32, "num_attention_heads": 4},
    "t5-small": {"d_model": 32, "num_heads": 4, "d_kv": 16, "d_ff": 96},
    "mt5-small": {"d_model": 32, "num_heads": 4, "d_kv": 16, "d_ff": 96},
}
DEPTH = {"gpt2": "n_layer", "bert": "num_hidden_layers", "roberta": "num_hidden_layers"}
DTYPES = {4: torch.float32, 2: torch.bfloat16}


def tiny(name: str, layers: int, drops: bool):
    config = find_config(name)
    rates = {key: 0.1 if drops else 0.0 for key in DROPOUTS if hasattr(config, key)}
    depth = DEPTH.get(config.model_type, "num_layers")
    return config.with_changes(vocab_size=64, **FAMILIES[name], **{depth: layers}, **rates)


def kept_bytes(
    mesh, name: str, layers: int, drops: bool, padded: bool, itemsize: int, parallel_config: ParallelConfig
) -> int:
    """Bytes of all storages that one forward pass keeps for backward, parameters aside."""
    from shardzoo.mpu import dropout_state

    config = tiny(name, layers, drops)
    model = from_config(config, mesh, dtype=DTYPES[itemsize], parallel_config=parallel_config).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(SIZE * SOURCE).view(SIZE, SOURCE) % 37 + 5
    batch = {"input_ids": ids, "labels": ids[:, :TARGET].clone() if config.model_type in ("t5", "mt5") else ids}
    if padded:
        mask = torch.ones_like(ids)
        mask[1, SOURCE // 2 :] = 0
        batch["attention_mask"] = torch.tensor([4, 9]) if config.model_type == "glm" else mask
    dropout_state.set(0, 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    del loss
    return sum(storage.nbytes() for storage in kept.values())


def formula(name: str, drops: bool, padded: bool, layout: Layout) -> int:
    config = tiny(name, 1, drops)
    batch = Batch(SIZE, SOURCE, TARGET if config.model_type in ("t5", "mt5") else 0, padded)
    return sum(block_bytes(stack, batch, layout).kept for stack in family(config.model_type).activations(config).stacks)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_keeps_what_the_formula_says(name, drops, itemsize, padded):
    parallel_config = ParallelConfig()
    one, two = (kept_bytes(None, name, layers, drops, padded, itemsize, parallel_config) for layers in (1, 2))
    assert two - one == formula(name, drops, padded, Layout(itemsize, 1, parallel_config))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_recomputation_keeps_what_the_formula_says(name, drops, recompute):
    parallel_config = ParallelConfig(recompute=recompute)
    one, two = (kept_bytes(None, name, layers, drops, False, 4, parallel_config) for layers in (1, 2))
    assert two - one == formula(name, drops, False, Layout(4, 1, parallel_config))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_keeps_what_the_formula_says(name, sequence_parallel, run_mesh):
    parallel_config = ParallelConfig(sequence_parallel=sequence_parallel)
    one, two = (run_mesh(2, kept_bytes, name, layers, True, False, 4, parallel_config) for layers in (1, 2))
    expected = formula(name, True, False, Layout(4, 2, parallel_config))
    assert [b - a for a, b in zip(one, two, strict=True)] == [expected, expected]
