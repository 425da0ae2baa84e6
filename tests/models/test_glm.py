"""The original GLM against numbers of the reference implementation, and against its definition written out."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from parity import MODES, Run, assert_same, load_stored, run_modes, whole
from safetensors import safe_open
from torch import Tensor

from shardzoo.models import config_from_dict, family, from_config
from shardzoo.models.auto import build_on_meta
from shardzoo.models.glm.presets import PRESETS
from shardzoo.mpu import gather_from_tp, materialize

GOLDEN = Path(__file__).parents[1] / "golden" / "glm_tiny.safetensors"


@dataclass
class Golden:
    """The reference's configuration, weights, inputs and results."""

    config: dict
    weights: dict[str, Tensor]
    inputs: dict[str, Tensor]
    result: Run

    def model(self, mesh=None, **changes):
        config = config_from_dict(self.config).with_changes(**changes)
        model = materialize(build_on_meta(config, mesh), "cpu")
        load_stored(model, family("glm").name_map, self.weights, mesh)
        return model.eval()


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        config = json.loads(file.metadata()["config"])
    assert config.pop("gelu") == "tanh"
    assert config.pop("layernorm_eps") == 1e-5
    inputs = {
        "input_ids": tensors["input_ids"],
        "position_ids": tensors["position_ids"],
        "attention_mask": tensors["sep"],
        "labels": tensors["targets"].masked_fill(tensors["loss_mask"] == 0, -100),
    }
    weights = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("param.")}
    grads = {name[5:]: tensor for name, tensor in tensors.items() if name.startswith("grad.")}
    result = Run(tensors["logits"], tensors["loss"].item(), grads)
    return Golden({"model_type": "glm", **config}, weights, inputs, result)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_golden_numbers(tp, run_mesh, golden):
    modes = [mode for mode in MODES if not mode[0] or golden.inputs["input_ids"].shape[1] % tp == 0]
    ranks = run_mesh(tp, run_modes, golden.config, golden.weights, golden.inputs, modes)
    for i in range(len(modes)):
        assert_same(whole(golden.config, ranks, i), golden.result)


def definition(golden: Golden, ids: Tensor, position_ids: Tensor, mask: Tensor, gelu) -> Tensor:
    """Logits of the whole model, as its authors define it. mask: [B, 1, S, S] of ones and zeros."""
    w = golden.weights
    heads, size = golden.config["num_attention_heads"], golden.config["hidden_size"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, (size,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    x = w["word_embeddings.weight"][ids]
    x = x + w["transformer.position_embeddings.weight"][position_ids[:, 0]]
    x = x + w["transformer.block_position_embeddings.weight"][position_ids[:, 1]]
    for i in range(golden.config["num_layers"]):
        layer = f"transformer.layers.{i}"
        qkv = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.attention.query_key_value")
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.split(size, -1))
        scores = q @ (k / math.sqrt(size // heads)).transpose(-1, -2)
        y = (scores * mask - 65504.0 * (1 - mask)).softmax(-1) @ v
        x = x + linear(y.transpose(1, 2).flatten(2), f"{layer}.attention.dense")
        inner = linear(norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.dense_h_to_4h")
        x = x + linear(gelu(inner), f"{layer}.mlp.dense_4h_to_h")
    return norm(x, "transformer.final_layernorm") @ w["word_embeddings.weight"].T


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))


def erf_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def prefix_mask(sep: Tensor, length: int) -> Tensor:
    """Ones where j < sep or j <= i: [B, 1, S, S]"""
    return torch.stack(
        [
            torch.tensor([[float(j < s or j <= i) for j in range(length)] for i in range(length)])
            for s in sep.tolist()
        ]
    )[:, None]


def close(actual: Tensor, expected: Tensor) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, f"differs by {error:.1e} of the scale"


def test_the_definition_gives_the_golden_numbers(golden):
    ids, positions, sep = (
        golden.inputs[name] for name in ("input_ids", "position_ids", "attention_mask")
    )
    close(
        definition(golden, ids, positions, prefix_mask(sep, ids.shape[1]), tanh_gelu),
        golden.result.logits,
    )


def test_the_erf_switch_gives_what_the_hub_computes(golden):
    inputs = {name: golden.inputs[name] for name in ("input_ids", "position_ids", "attention_mask")}
    mask = prefix_mask(inputs["attention_mask"], inputs["input_ids"].shape[1])
    expected = definition(golden, inputs["input_ids"], inputs["position_ids"], mask, erf_gelu)
    model = golden.model(hidden_act="gelu")
    close(model.gather_logits(model(**inputs).logits), expected)
    assert (
        1e-4 < (expected - golden.result.logits).abs().max() < 1e-2
    )  # so the switch is no matter of rounding


def test_every_kind_of_mask(golden):
    ids, positions, sep = (
        golden.inputs[name] for name in ("input_ids", "position_ids", "attention_mask")
    )
    length = ids.shape[1]
    model = golden.model()

    def logits(mask):
        return model.gather_logits(model(ids, positions, mask).logits)

    def expected(mask):
        return definition(golden, ids, positions, mask.expand(2, 1, length, length), tanh_gelu)

    causal = prefix_mask(torch.tensor([0]), length)
    close(logits(None), expected(causal))
    close(logits(torch.zeros(2)), expected(causal))
    close(logits(torch.tensor(11)), expected(prefix_mask(torch.tensor([11]), length)))
    close(logits(sep[:, None]), golden.result.logits)
    both = prefix_mask(sep, length)
    for dtype in (torch.bool, torch.int64, torch.float32):
        close(logits(both.to(dtype)), golden.result.logits)
    longer = torch.cat([torch.zeros(2, 1, length, 5), both], -1)  # of which the last columns count
    close(logits(longer), golden.result.logits)
    close(logits(both[:1]), expected(both[:1]))
    padding = torch.ones(2, length)
    padding[0, 20:] = 0
    close(logits(padding), expected(padding[:, None, None]))
    with pytest.raises(ValueError, match=r"\(2, 7\); for 2 x 32 tokens after 0 cached ones"):
        logits(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"\(3,\); for 2 x 32 tokens"):
        logits(torch.ones(3))
    with pytest.raises(ValueError, match="position_ids has shape"):
        model(ids, positions[:, 0], sep)


def decode(mesh, golden: Golden, part_a: int):
    """Logits of one sequence, in one call and with memory: part A at once, then token by token."""
    model = golden.model(mesh)
    ids, positions = golden.inputs["input_ids"][:1], golden.inputs["position_ids"][:1]
    with torch.no_grad():
        uncached = model(ids, positions, torch.tensor([part_a]), use_cache=False)
        output = model(ids[:, :part_a], positions[:, :, :part_a], torch.tensor([part_a]))
        pieces = [output.logits]
        steps = [(part_a, part_a + 1), (part_a + 1, part_a + 4)]  # several tokens at once, too
        steps += [(i, i + 1) for i in range(part_a + 4, ids.shape[1])]
        for i, (start, stop) in enumerate(steps):
            mask = None if i % 2 else torch.zeros(1)
            output = model(ids[:, start:stop], positions[:, :, start:stop], mask, mems=output.mems)
            pieces.append(output.logits)
    assert uncached.mems is None
    assert [tuple(memory.shape) for memory in output.mems] == [
        (1, ids.shape[1], model.config.hidden_size)
    ] * 4
    return gather_from_tp(torch.cat(pieces, 1), mesh), gather_from_tp(uncached.logits, mesh)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_decoding_with_mems_equals_the_full_forward(tp, run_mesh, golden):
    for cached, full in run_mesh(tp, decode, golden, 12):
        close(cached, full)


def test_mems_of_a_mask_with_memory(golden):
    """A 4-D mask covers the memory, too."""
    ids, positions = golden.inputs["input_ids"], golden.inputs["position_ids"]
    mask = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0)) < 0.7
    mask = mask.tril() | torch.eye(32, dtype=torch.bool)
    model = golden.model()
    full = model(ids, positions, mask)
    first = model(ids[:, :20], positions[..., :20], mask[:, :, :20, :20])
    second = model(ids[:, 20:], positions[..., 20:], mask[:, :, 20:], mems=first.mems)
    close(torch.cat([first.logits, second.logits], 1), full.logits)
    for cached, whole_sequence in zip(second.mems, full.mems, strict=True):
        close(cached, whole_sequence)
        assert not cached.requires_grad


def test_mems_are_returned_where_they_are_of_use(golden):
    from shardzoo.models import ParallelConfig

    model = golden.model()
    ids, positions = golden.inputs["input_ids"], golden.inputs["position_ids"]
    assert len(model(ids, positions).mems) == golden.config["num_layers"] + 1
    assert model(ids, positions, labels=ids).mems is None
    with pytest.raises(ValueError, match="pass the position_ids"):
        model(ids[:, :1], mems=model(ids, positions).mems)
    with pytest.raises(ValueError, match="mems has 3 tensors, but 3 blocks need 4"):
        model(ids[:, :1], positions[..., :1], mems=model(ids, positions).mems[1:])
    split = from_config(
        golden.config, parallel_config=ParallelConfig(sequence_parallel=True)
    ).eval()
    assert split(ids, positions).mems is None
    with pytest.raises(ValueError, match="without sequence parallelism"):
        split(ids, positions, use_cache=True)


def test_hidden_states_and_default_positions(golden):
    ids = golden.inputs["input_ids"]
    model = golden.model()
    text = torch.arange(32)
    output = model(ids, output_hidden_states=True)
    close(output.logits, model(ids, torch.stack([text, torch.zeros_like(text)])[None]).logits)
    assert len(output.hidden_states) == golden.config["num_layers"] + 1
    logits = output.hidden_states[-1] @ golden.weights["word_embeddings.weight"].T
    close(model.gather_logits(output.logits), logits)
    with pytest.raises(ValueError, match="50 tokens, but the model has only 49 positions"):
        model(torch.zeros(1, 50, dtype=torch.long))


def dropout_run(mesh, golden):
    return run_modes(mesh, golden.config, golden.weights, golden.inputs, seed=5)


def test_dropout_does_not_depend_on_the_layout(run_mesh, golden):
    expected = whole(golden.config, run_mesh(1, dropout_run, golden), 0)
    assert abs(expected.loss - golden.result.loss) > 1e-3
    for tp in (1, 2, 4):
        ranks = run_mesh(tp, dropout_run, golden)
        for i in range(len(MODES)):
            assert_same(whole(golden.config, ranks, i), expected)


def test_a_compiled_block_computes_the_same(golden):
    block = golden.model().blocks[1].double()
    x = torch.randn(2, 9, golden.config["hidden_size"], generator=torch.Generator().manual_seed(0))
    x = x.double()
    mask = prefix_mask(torch.tensor([4, 2]), 9).bool()

    def run(function):
        block.zero_grad()
        y = function(x, mask, False)
        y.square().sum().backward()
        return y.detach(), [parameter.grad.clone() for parameter in block.parameters()]

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled), run(block), rtol=1e-10, atol=1e-10)


# Papers and releases, by (V + 2(P + 1)) h + L (12 h² + 13 h) + 2 h.
PARAMETERS = {
    "glm-base": 109_338_624,
    "glm-large": 334_688_256,
    "glm-doc": 334_688_256,
    "glm-410m": 410_265_600,
    "glm-515m": 514_632_960,
    "glm-roberta-large": 354_873_344,
    "glm-large-chinese": 355_659_776,
    "glm-2b": 1_920_122_880,
    "glm-10b": 9_880_682_496,
    "glm-10b-chinese": 9_879_633_920,
}


def test_parameter_counts():
    def count(config):
        model = from_config(config, device="meta")
        return sum(math.prod(getattr(p, "shard", p).shape) for p in model.parameters())

    assert {
        name: count(config) for name, config in PRESETS.items() if "quickstart" not in name
    } == PARAMETERS


def test_configurations():
    glm = config_from_dict(
        {"model_type": "glm", "num_layers": 2, "hidden_size": 64, "num_attention_heads": 1}
    )
    assert (glm.num_layers, glm.vocab_size) == (2, 30592)
    assert config_from_dict(glm.to_dict()) == glm
    assert glm.to_dict()["auto_map"]["AutoConfig"] == "configuration_glm.GLMConfig"
    from transformers import GlmConfig

    with pytest.raises(ValueError, match="GLM-4 line of 2024"):
        config_from_dict(GlmConfig().to_dict())
    with pytest.raises(ValueError, match="two-dimensional positions"):
        config_from_dict({**glm.to_dict(), "block_position_encoding": False})
    with pytest.raises(ValueError, match="use num_attention_heads from"):
        glm.with_changes(num_attention_heads=5)
    with pytest.raises(ValueError, match="spell_length=16"):
        glm.with_changes(spell_length=16)


def test_initial_weights_are_the_authors():
    config = PRESETS["glm-base"].with_changes(num_layers=2, vocab_size=640)
    parameters = dict(from_config(config).named_parameters())
    assert parameters["blocks.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert parameters["blocks.0.mlp.down.weight"].std().item() == pytest.approx(
        0.01, rel=0.02
    )  # 0.02 / √(2 · 2)
    assert parameters["blocks.1.attention.output.weight"].std().item() == pytest.approx(
        0.01, rel=0.02
    )
    assert parameters["block_position_embeddings.weight"].std().item() == pytest.approx(
        0.02, rel=0.02
    )
    assert all((p == 0).all() for name, p in parameters.items() if name.endswith("bias"))


def test_the_documented_code_runs(monkeypatch):
    tiny = PRESETS["glm-base"].with_changes(num_layers=2, hidden_size=64, num_attention_heads=4)
    monkeypatch.setitem(PRESETS, "glm-base", tiny)
    text = (Path(__file__).parents[2] / "docs" / "glm.md").read_text()
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
    assert names["logits"].shape == (1, 1, 30592)
    whole_call = names["model"](names["ids"], names["places"], torch.tensor([5])).logits[:, 5:6]
    close(names["logits"], names["model"].gather_logits(whole_call))
    assert names["exact"].config.hidden_act == "gelu"
    for name, parameters in PARAMETERS.items():
        assert re.search(rf"`{name}`.*\| {parameters:,} \|", text), name
