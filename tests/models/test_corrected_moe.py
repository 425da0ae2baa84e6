"""Mixtures with corrected scores: equal to transformers' over an expert axis; their files; what stays in fp32."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from corrected_scores import correct_scores
from every_case import every_day
from expert_ranks import draw_ids, run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored_models import tensor_hashes
from tiny_models import hf_model, tiny

import shardzoo
from shardzoo.convert.operations import Options, merge, split
from shardzoo.models import config_from_dict

FAMILIES = {"glm4_moe": "Glm4MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
CORRECTION = "mlp.gate.e_score_correction_bias"


def write_model(family: str, folder, dtype: torch.dtype, **changes):
    """Returns transformers' model after writing it; its corrections are fp32, and no bf16 number represents them."""
    model = hf_model(FAMILIES[family], 0.0, **changes).to(dtype)
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.data = value.data.float()
    correct_scores(model)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=list(FAMILIES))
def oracle(request, tmp_path_factory):
    """Yields a folder, and the loss, gradients and tokens of six samples in transformers, in fp64."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = write_model(request.param, folder, torch.float64)
    model.set_experts_implementation("eager")
    ids = draw_ids(6)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: value.grad for name, value in model.named_parameters()}
    tokens = model.generate(ids[:2, :5], max_new_tokens=6, do_sample=False, eos_token_id=None)
    return folder, loss.item(), grads, tokens


def name_as_in_files(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Unstacks transformers' experts, as its files have them."""
    found: dict[str, torch.Tensor] = {}
    for name, value in grads.items():
        prefix, stacked, kind = name.partition(".experts.")
        if not stacked:
            found[name] = value
            continue
        for number, matrix in enumerate(value):
            expert = f"{prefix}.experts.{number}"
            if kind == "gate_up_proj":
                gate, up = matrix.chunk(2)
                found[f"{expert}.gate_proj.weight"] = gate
                found[f"{expert}.up_proj.weight"] = up
            else:
                found[f"{expert}.down_proj.weight"] = matrix
    return found


LAYOUTS = every_day(
    [(2, 2, {"sequence_parallel": True, "recompute": "full"})],
    more=[(1, 2, {}), (1, 4, {}), (1, 3, {"recompute": "selective"})],
)


@pytest.mark.parametrize(("tensor", "expert", "mode"), LAYOUTS)
def test_loss_gradients_and_tokens_equal_those_of_transformers(
    run_ranks, oracle, tmp_path, tensor, expert, mode
):
    folder, loss, grads, tokens = oracle
    again = tmp_path / "again"
    by_rank = run_ranks(tensor * expert, run, str(folder), str(again), tensor, expert, **mode)
    expected = name_as_in_files(grads)
    norm = sum(value.square().sum().item() for value in grads.values() if value is not None) ** 0.5
    for own_loss, own_grads, own_norm, own_tokens in by_rank:
        assert own_loss == pytest.approx(loss, rel=2e-7)
        assert own_norm == pytest.approx(norm, rel=1e-6)
        assert torch.equal(own_tokens, tokens)
        corrections = {name for name in own_grads if name.endswith(CORRECTION)}
        assert corrections
        assert own_grads.keys() - corrections == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(own_grads[name], value, rtol=2e-5, atol=1e-8), name
    written = load_file(again / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


@pytest.fixture(scope="module", params=list(FAMILIES))
def bf16_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_model(request.param, folder, torch.bfloat16)
    return folder


def read_corrections(folder) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: value for name, value in tensors.items() if name.endswith(CORRECTION)}


def test_corrections_stay_in_fp32(bf16_folder, tmp_path):
    stored = read_corrections(bf16_folder)
    assert stored
    assert all(value.dtype == torch.float32 for value in stored.values())
    model = shardzoo.from_pretrained(bf16_folder)
    assert model.dtype == torch.bfloat16
    changed = [
        model,
        shardzoo.from_pretrained(bf16_folder, dtype=torch.float16),
        copy.deepcopy(model).half().bfloat16(),
        pickle.loads(pickle.dumps(model)).to(torch.bfloat16),
    ]
    for number, each in enumerate(changed):
        for block in list(each.blocks)[1:]:
            assert block.mlp.correction.value.keeps_fp32
            assert not block.mlp.correction.value.requires_grad
        each.save_pretrained(tmp_path / str(number))
        for name, value in read_corrections(tmp_path / str(number)).items():
            assert value.dtype == torch.float32
            assert torch.equal(value, stored[name])


def test_conversion_keeps_them_to_the_byte_and_casts_the_rest(bf16_folder, tmp_path):
    split(bf16_folder, tmp_path / "two", 2)
    merge(tmp_path / "two", tmp_path / "again")
    assert tensor_hashes(tmp_path / "again") == tensor_hashes(bf16_folder)
    split(bf16_folder, tmp_path / "half", 2, Options(dtype="F16"))
    merge(tmp_path / "half", tmp_path / "merged")
    stored = read_corrections(bf16_folder)
    found = read_corrections(tmp_path / "merged")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys() if name not in stored}  # noqa: SIM118
    assert kinds == {"F16"}


def test_layers_that_predict_further_tokens_are_kept_and_not_used(bf16_folder, tmp_path):
    """As in transformers, which ignores the layers behind the last one."""
    folder = tmp_path / "hf"
    folder.mkdir()
    config = json.loads((bf16_folder / "config.json").read_text())
    tensors = load_file(bf16_folder / "model.safetensors")
    last = config["num_hidden_layers"]
    tensors[f"model.layers.{last}.eh_proj.weight"] = torch.randn(32, 64, dtype=torch.bfloat16)
    tensors[f"model.layers.{last}.shared_head.norm.weight"] = torch.randn(32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    ids = draw_ids(2)
    logits = shardzoo.from_pretrained(folder)(input_ids=ids).logits
    assert torch.equal(logits, shardzoo.from_pretrained(bf16_folder)(input_ids=ids).logits)
    split(folder, tmp_path / "two", 2)
    merge(tmp_path / "two", tmp_path / "again")
    assert tensor_hashes(tmp_path / "again") == tensor_hashes(folder)
    config["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layers\.2\.eh_proj\.weight.*does not have"):
        shardzoo.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4}, "n_group=4 must divide n_routed_experts=6"),
        ({"n_group": 6, "topk_group": 2}, "groups of at least 2 experts"),
        ({"topk_group": 4}, "topk_group=4 must be at most n_group=3"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most 4"),
    ],
)
def test_routers_that_cannot_choose_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(tiny("glm4_moe", **changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_routers_scores_are_those_of_transformers(family, tmp_path):
    theirs = write_model(family, tmp_path, torch.float32)
    ids = draw_ids(2)
    expected = theirs(input_ids=ids, output_router_logits=True).router_logits
    ours = shardzoo.from_pretrained(tmp_path, config=None)
    found = ours(input_ids=ids, labels=ids, output_router_logits=True)
    assert len(found.router_logits) == len(expected) == 1
    torch.testing.assert_close(found.router_logits[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found.loss == ours(input_ids=ids, labels=ids).loss
