"""GPT-2, T5 and mT5 against transformers: odd sizes, padding, at every tensor-parallel size and mode."""

from __future__ import annotations

import pytest
import torch
import transformers
from parity import MODES, assert_same, load_stored, oracle, randomize, run_modes, whole

GPT2 = {
    "twelve heads": {"n_embd": 48, "n_head": 12, "n_layer": 2, "vocab_size": 101, "n_positions": 21},
    "own inner width, scaled by layer": {
        "n_embd": 24, "n_head": 4, "n_layer": 3, "n_inner": 20, "vocab_size": 67, "n_positions": 12,
        "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu",
    },
    "six heads, untied, erf gelu": {
        "n_embd": 30, "n_head": 6, "n_layer": 1, "vocab_size": 131, "n_positions": 13, "n_inner": 36,
        "tie_word_embeddings": False, "activation_function": "gelu", "scale_attn_weights": False,
    },
}  # fmt: skip
T5 = {
    "v1.0, twelve heads, inner width 60": {
        "d_model": 24, "d_kv": 5, "num_heads": 12, "d_ff": 36, "vocab_size": 101, "num_layers": 3,
        "num_decoder_layers": 1,
    },
    "v1.1, four heads, few buckets": {
        "d_model": 20, "d_kv": 7, "num_heads": 4, "d_ff": 28, "vocab_size": 67, "num_layers": 1,
        "num_decoder_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
    "gated silu, tied, six heads, another start": {
        "d_model": 36, "d_kv": 4, "num_heads": 6, "d_ff": 31, "vocab_size": 131, "num_layers": 2,
        "feed_forward_proj": "gated-silu", "decoder_start_token_id": 7, "pad_token_id": 3,
    },
}  # fmt: skip
MT5 = {
    "uneven depths": {
        "d_model": 18, "d_kv": 8, "num_heads": 12, "d_ff": 50, "vocab_size": 193, "num_layers": 1,
        "num_decoder_layers": 3,
    },
    "narrow": {"d_model": 40, "d_kv": 3, "num_heads": 4, "d_ff": 5, "vocab_size": 70, "num_layers": 2},
    "ungated": {
        "d_model": 32, "d_kv": 6, "num_heads": 6, "d_ff": 24, "vocab_size": 151, "num_layers": 2,
        "feed_forward_proj": "relu", "layer_norm_epsilon": 1e-3,
    },
}  # fmt: skip
FAMILIES = {"gpt2": GPT2, "t5": T5, "mt5": MT5}
CASES = [(family, name) for family, sizes in FAMILIES.items() for name in sizes]
BATCH, LENGTH, TARGETS = 3, 24, 12


def heads_of(case) -> int:
    sizes = FAMILIES[case[0]][case[1]]
    return sizes.get("n_head") or sizes["num_heads"]


def build(case):
    """A model of transformers with random weights, as eager fp32."""
    family, name = case
    sizes = dict(FAMILIES[family][name])
    if family == "t5":
        sizes.setdefault("decoder_start_token_id", 0)
    elif family == "gpt2":
        sizes |= {"bos_token_id": 1, "eos_token_id": 1}
    config = transformers.AutoConfig.for_model(family, **sizes)
    config._attn_implementation = "eager"
    kind = transformers.AutoModelForCausalLM if family == "gpt2" else transformers.AutoModelForSeq2SeqLM
    model = kind.from_config(config)
    if family == "mt5" or (family == "t5" and not config.scale_decoder_outputs):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # v5 ties fresh models
    randomize(model, seed=3)
    return model


def make_inputs(config, family: str) -> dict:
    """A batch with padding on the right, on the left, and none; some labels are -100."""
    generator = torch.Generator().manual_seed(7)

    def integers(*size):
        return torch.randint(8, config.vocab_size, size, generator=generator)

    length = 12 if family == "gpt2" else LENGTH
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[0, length - 3 :], mask[1, :4] = 0, 0
    inputs = {"input_ids": integers(BATCH, length).masked_fill(mask == 0, 1), "attention_mask": mask}
    if family == "gpt2":
        # What padding predicts is noise, so neither it nor the first token after it is a target.
        labels = inputs["input_ids"].masked_fill(mask == 0, -100)
        labels[1, 4] = -100
        labels[2, 5:7] = -100
        if config.scale_attn_by_inverse_layer_idx:  # one case with the optional arguments
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
            inputs["token_type_ids"] = integers(BATCH, length)
        return inputs | {"labels": labels}
    labels = integers(BATCH, TARGETS)
    labels[1, 9:], labels[2, 3] = -100, -100
    decoder_mask = torch.ones(BATCH, TARGETS, dtype=torch.long)
    decoder_mask[1, 10:] = 0
    return inputs | {"labels": labels, "decoder_attention_mask": decoder_mask}


def only_attended(run, inputs):
    """A causal model's padding on the left sees nothing, and what comes out of nothing is nobody's business."""
    if "decoder_attention_mask" not in inputs:
        run.logits = run.logits * inputs["attention_mask"][..., None]
    return run


@pytest.fixture(scope="module")
def references():
    """For every case: the configuration, the stored tensors, the inputs, and what transformers computes."""
    found = {}
    for case in CASES:
        model = build(case)
        inputs = make_inputs(model.config, case[0])
        stored = {key: value.clone() for key, value in model.state_dict().items()}
        if model.config.tie_word_embeddings and torch.equal(model.lm_head.weight, model.get_input_embeddings().weight):
            stored.pop("lm_head.weight")
        found[case] = (model.config.to_dict(), stored, inputs, only_attended(oracle(model, inputs), inputs))
    return found


def run_cases(mesh, cases, seed=None):
    return [run_modes(mesh, *case, seed=seed) for case in cases]


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_equal_to_transformers(tp, run_mesh, references):
    cases = [case for case in CASES if heads_of(case) % tp == 0]
    assert {family for family, _ in cases} == set(FAMILIES)
    ranks = run_mesh(tp, run_cases, [references[case][:3] for case in cases])
    for i, case in enumerate(cases):
        config, _, inputs, expected = references[case]
        for j, mode in enumerate(MODES):
            try:
                assert_same(only_attended(whole(config, [rank[i] for rank in ranks], j), inputs), expected)
            except AssertionError as error:
                raise AssertionError(f"{case}, sequence_parallel and recompute {mode}: {error}") from error


DROPOUT = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "t5": ("dropout_rate",)}


@pytest.mark.parametrize("case", [CASES[0], CASES[3]])
def test_dropout_is_the_same_under_every_layout(case, run_mesh, references):
    config, stored, inputs, without = references[case]
    config = config | dict.fromkeys(DROPOUT[case[0]], 0.2)
    runs = {}
    for tp in (1, 2, 4):
        ranks = run_mesh(tp, run_cases, [(config, stored, inputs)], 5)
        for j, mode in enumerate(MODES):
            runs[tp, mode] = only_attended(whole(config, [rank[0] for rank in ranks], j), inputs)
    plain = runs[1, (False, "none")]
    assert abs(plain.loss - without.loss) > 1e-3
    for layout, run in runs.items():
        try:
            assert_same(run, plain)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error


def hidden_states(mesh, config, stored, inputs):
    from shardzoo.models import ParallelConfig, family
    from shardzoo.models.auto import build_on_meta, config_from_dict
    from shardzoo.mpu import materialize

    model = build_on_meta(config_from_dict(config), mesh, ParallelConfig(sequence_parallel=True))
    model = materialize(model, "cpu").eval()
    load_stored(model, family(config["model_type"]).name_map, stored, mesh)
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True)
    return {name: value for name, value in vars(output).items() if name.endswith(("states", "state"))}


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[6]])
def test_hidden_states_are_those_of_transformers(case, run_mesh, references):
    config, stored, inputs, _ = references[case]
    model = build(case).eval()
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True)
    mask = inputs["attention_mask"][..., None]
    for rank in run_mesh(2, hidden_states, config, stored, inputs):
        for name, value in rank.items():
            states, references_ = (value, expected[name]) if isinstance(value, tuple) else ([value], [expected[name]])
            assert len(states) == len(references_)
            for state, reference in zip(states, references_, strict=True):
                if case[0] == "gpt2":
                    state, reference = state * mask, reference * mask
                torch.testing.assert_close(state, reference, rtol=1e-4, atol=1e-5)
