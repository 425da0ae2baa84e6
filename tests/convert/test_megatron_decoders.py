"""Llama, Qwen2, Qwen3 and Mistral in Megatron-LM's folders, in and out, against its rules and against megatron-core."""

from __future__ import annotations

import contextlib
import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import by_turns
from megatron_files import in_megatron_core, write_decoder_layers
from parity import randomize
from safetensors.torch import load_file, save_file
from tiny_models import hf_model

from shardzoo.cli.convert import main
from shardzoo.convert.operations import Options, merge, split
from shardzoo.models.llama.megatron import find_windows

SIZES = {"num_hidden_layers": 4, "intermediate_size": 44, "tie_word_embeddings": False}
# Six heads in groups of three; in Qwen3 a head is wider than hidden / heads.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {**SIZES, "hidden_size": 48, "num_attention_heads": 6, "rms_norm_eps": 1e-5},
    ),
    "tied": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {
            **SIZES,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        {**SIZES, "head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ),
    "mistral": ("MistralForCausalLM", {**SIZES, "sliding_window": 7}),
    "mixtral": (
        "MixtralForCausalLM",
        {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **SIZES,
            "head_dim": 16,
            "num_local_experts": 3,
            "num_experts": 3,
            "moe_intermediate_size": 20,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
}
MIXTURES = ("mixtral", "qwen3_moe")
WINDOWS = ("mistral", "qwen2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            architecture, changes = CASES[case]
            model = hf_model(architecture, 0.0, **changes)
            randomize(model, 1)
            made[case] = tmp_path_factory.mktemp(case) / "hf"
            model.save_pretrained(made[case])
        return made[case]

    return make


def part(tensor: torch.Tensor, rank: int, size: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(size, dim)[rank].clone()


def rank_state(
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    place: tuple[int, int, int, int],
    style: str,
    padding: int,
) -> dict[str, torch.Tensor]:
    """A rank's tensors after tools/checkpoint/loader_llama_mistral.py and saver_base.py of Megatron-LM.

    place: tensor-parallel rank and size, stage, stages. padding: the vocabulary is padded to a multiple for each rank.
    """
    rank, size, stage, stages = place
    groups, head = (
        config["num_key_value_heads"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    names = {
        "te": ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_", "self_attention.linear_qkv.",
               "self_attention.linear_proj.", "mlp.linear_fc1.", "mlp.linear_fc2."),
        "local": ("input_layernorm.", "pre_mlp_layernorm.", "self_attention.linear_qkv.", "self_attention.linear_proj.",
                  "mlp.linear_fc1.", "mlp.linear_fc2."),
        "legacy": ("input_norm.", "post_attention_norm.", "self_attention.query_key_value.", "self_attention.dense.",
                   "mlp.dense_h_to_4h.", "mlp.dense_4h_to_h."),
    }[style]  # fmt: skip
    stack = "language_model.encoder" if style == "legacy" else "decoder"
    root = "language_model." if style == "legacy" else ""

    def vocabulary(tensor: torch.Tensor) -> torch.Tensor:
        rows = -len(tensor) % (padding * size)
        return part(torch.cat([tensor, torch.zeros(rows, tensor.shape[1])]), rank, size)

    state: dict[str, torch.Tensor] = {}
    words = weights["model.embed_tokens.weight"]
    if stage == 0:
        state[f"{root}embedding.word_embeddings.weight"] = vocabulary(words)
    per_stage = config["num_hidden_layers"] // stages
    for local in range(per_stage):
        old, new = f"model.layers.{stage * per_stage + local}", f"{stack}.layers.{local}"
        own = {
            name.removeprefix(f"{old}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"{old}.")
        }
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in own:
                q, k, v = (own[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
                rows = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]  # for each group
                assert rows[1].shape[1] == head
                state[f"{new}.{names[2]}{kind}"] = part(
                    torch.cat(rows, 1).flatten(0, 1), rank, size
                )
        router = own.get("mlp.gate.weight", own.get("block_sparse_moe.gate.weight"))
        state |= {
            f"{new}.{names[0]}weight": own["input_layernorm.weight"],
            f"{new}.{'pre_mlp_layernorm.' if router is not None else names[1]}weight": own[
                "post_attention_layernorm.weight"
            ],
            f"{new}.{names[3]}weight": part(own["self_attn.o_proj.weight"], rank, size, 1),
        }
        matrices = {
            f"{new}.{names[4]}weight": "mlp.{}_proj",
            f"{new}.{names[5]}weight": "mlp.{}_proj",
        }
        if router is not None:
            state[f"{new}.mlp.router.weight"] = router
            is_mixtral = "mlp.gate.weight" not in own
            expert = (
                "block_sparse_moe.experts.{e}.{{}}" if is_mixtral else "mlp.experts.{e}.{{}}_proj"
            )
            matrices = {
                f"{new}.mlp.experts.linear_fc{n}.weight{e}"
                if style == "te"
                else f"{new}.mlp.experts.local_experts.{e}.linear_fc{n}.weight": expert.format(e=e)
                for e in range(len(router))
                for n in (1, 2)
            }
        for name, stored in matrices.items():
            spelled = ("w1", "w3", "w2") if "block_sparse_moe" in stored else ("gate", "up", "down")
            gate, up, down = (own[f"{stored.format(x)}.weight"] for x in spelled)
            if "linear_fc1" in name or "dense_h_to_4h" in name:
                state[name] = torch.cat([part(gate, rank, size), part(up, rank, size)])
            else:
                state[name] = part(down, rank, size, 1)
        for x in "qk":
            if f"self_attn.{x}_norm.weight" in own:
                state[f"{new}.self_attention.{x}_layernorm.weight"] = own[
                    f"self_attn.{x}_norm.weight"
                ]
    if stage == stages - 1:
        state[f"{stack}.final_{'norm' if style == 'legacy' else 'layernorm'}.weight"] = weights[
            "model.norm.weight"
        ]
        if "lm_head.weight" in weights:
            state[f"{root}output_layer.weight"] = vocabulary(weights["lm_head.weight"])
        elif stages > 1:
            state[
                "word_embeddings_for_head.weight" if style == "legacy" else "output_layer.weight"
            ] = vocabulary(words)
    return state


def write(source: Path, folder: Path, size: int, stages: int, style: str, **changes: Any) -> Path:
    """Writes the folder of a run at iteration 9, with the arguments that `tools/checkpoint` gives such a model."""
    weights, config = (
        load_file(source / "model.safetensors"),
        json.loads((source / "config.json").read_text()),
    )
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    arguments = {
        "num_layers": config["num_hidden_layers"], "hidden_size": config["hidden_size"], "swiglu": True,
        "num_attention_heads": config["num_attention_heads"], "ffn_hidden_size": config["intermediate_size"],
        "group_query_attention": config["num_key_value_heads"] != config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"], "position_embedding_type": "rope",
        "kv_channels": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "normalization": "RMSNorm", "norm_epsilon": config["rms_norm_eps"], "add_bias_linear": False,
        "rotary_base": int(rope["rope_theta"]), "rotary_percent": 1.0, "tensor_model_parallel_size": size,
        "pipeline_model_parallel_size": stages, "max_position_embeddings": config["max_position_embeddings"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "rotary_seq_len_interpolation_factor": 4 if rope.get("rope_type") == "linear" else None, "window_size": None,
    }  # fmt: skip
    if config["model_type"] == "mistral":
        arguments["window_size"] = (6, 0)  # the positions before the query's own, which is the 7th
    if config["model_type"] == "qwen2":
        arguments |= {"window_size": (4, 0), "window_attn_skip_freq": [0, 0, 1, 1]}
    if "num_local_experts" in config:
        arguments |= {
            "num_experts": config["num_local_experts"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
            "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"]),
            "moe_aux_loss_coeff": config["router_aux_loss_coef"],
        }
    arguments |= changes
    for rank in range(size):
        for stage in range(stages):
            state = rank_state(weights, config, (rank, size, stage, stages), style, 16)
            place = (
                folder
                / "iter_0000009"
                / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            )
            place.mkdir(parents=True)
            content = {
                "args": Namespace(**arguments),
                "checkpoint_version": 3.0,
                "iteration": 9,
                "model": state,
            }
            torch.save(content, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("9")
    return folder


def vocabulary_of(source: Path, place: Path) -> Options:
    """Without config.json, the padding of the vocabulary belongs to it."""
    shutil.copy(source / "config.json", place)
    return Options(config_file=place)


LAYOUTS = [
    (1, 1, "local"),
    (2, 1, "te"),
    (2, 2, "local"),
    (1, 4, "te"),
    (2, 2, "legacy"),
    (2, 4, "te"),
]


@pytest.mark.parametrize(("size", "stages", "style"), by_turns(LAYOUTS, 2))
@pytest.mark.parametrize("case", CASES)
def test_every_layout_becomes_the_original_bytes(
    case, size, stages, style, folders, hashes, tmp_path
):
    if style == "legacy" and case in MIXTURES:
        style = "local"  # There were no experts before megatron-core.
    source = write(folders(case), tmp_path / "megatron", size, stages, style)
    merge(source, tmp_path / "hf", vocabulary_of(folders(case), tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(folders(case))


@pytest.mark.parametrize(
    ("case", "size", "program"),
    [
        ("llama", 1, "neox"), ("llama", 2, "neox"), ("llama", 2, "old neox"), ("llama", 2, "deepspeed"),
        ("tied", 2, "neox"), ("tied", 4, "deepspeed"), ("mistral", 2, "neox"),
    ],
)  # fmt: skip
def test_files_of_layers(case, size, program, folders, hashes, tmp_path):
    source = write_decoder_layers(folders(case), tmp_path / "layers", size, program)
    merge(source, tmp_path / "hf", vocabulary_of(folders(case), tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(folders(case))
    merge(source, tmp_path / "inferred")
    found, wanted = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "inferred", folders(case))
    )
    for name in (
        "model_type", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "sliding_window",
        "intermediate_size",
    ):  # fmt: skip
        assert found.get(name) == wanted.get(name), name


@pytest.mark.parametrize(("program", "changes", "message"), [
    ("neox", {"rotary_pct": 0.25}, "rotary_pct=0.25, which is Megatron-LM's rotary_percent=0.25"),
    ("neox", {"pos_emb": "alibi"}, "pos_emb='alibi'"), ("neox", {"gpt_j_residual": True}, "gpt_j_residual=True"),
    ("neox", {"norm": "scalenorm"}, "norm='scalenorm'"), ("neox", {"activation": "geglu"}, "activation='geglu'"),
    ("neox", {"attention_config": ["flash", "local"] * 2}, "attention_config=('flash', 'local', 'flash', 'local')"),
    ("neox", {"num_kv_heads": 4}, "of 2 ranks with num_attention_heads=6 and num_kv_heads=4"),
    ("neox", {"num_attention_heads": 8}, "must be a matrix whose rows are 6 equal parts"),
    ("deepspeed", {"use_rotary_position_embeddings": False}, "position_embedding_type='none'"),
    ("deepspeed", {"rotary_percent": 0.5}, "rotary_percent=0.5"),
])  # fmt: skip
def test_other_files_of_layers_are_refused(program, changes, message, folders, tmp_path, capsys):
    source = write_decoder_layers(folders("llama"), tmp_path / "layers", 2, program, **changes)
    assert main(["merge", str(source), str(tmp_path / "hf")]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("size", "stages", "style"), [(1, 1, "local"), (2, 2, "te"), (2, 4, "local")]
)
@pytest.mark.parametrize("case", CASES)
def test_written_files_hold_what_megatron_would(
    case, size, stages, style, folders, hashes, tmp_path
):
    names = {"te": "transformer_engine"}.get(style, style)
    split(folders(case), tmp_path / "out", size, style="megatron", stages=stages, names=names)
    weights = load_file(folders(case) / "model.safetensors")
    config = json.loads((folders(case) / "config.json").read_text())
    for rank in range(size):
        for stage in range(stages):
            place = (
                tmp_path
                / "out"
                / "release"
                / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            )
            with torch.serialization.safe_globals([Namespace]):
                found = torch.load(place / "model_optim_rng.pt", weights_only=True)
            wanted = rank_state(weights, config, (rank, size, stage, stages), style, 128)
            assert found["model"].keys() == wanted.keys()
            assert all(torch.equal(found["model"][name], tensor) for name, tensor in wanted.items())
            mine = vars(found["args"])
            assert (mine["num_query_groups"], mine["swiglu"]) == (
                config["num_key_value_heads"],
                True,
            )
            assert mine["add_qkv_bias"] is (case == "qwen2")
            assert mine["window_size"] == {"mistral": (6, 0), "qwen2": (4, 0)}.get(case)
            assert mine.get("window_attn_skip_freq") == ([0, 0, 1, 1] if case == "qwen2" else None)
            assert mine["qk_layernorm"] is (case in ("qwen3", "qwen3_moe"))
    merge(tmp_path / "out", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(folders(case))


def test_torch_dist_is_written_and_read_back(folders, hashes, tmp_path):
    """What megatron-core makes of it is below. The layers are one tensor, so they must have one type."""
    for case in CASES:
        merge(folders(case), tmp_path / case, Options(largest_file=9_000), style="torch_dist")
        assert len(list((tmp_path / case / "release").glob("*.distcp"))) > 1
        merge(tmp_path / case, tmp_path / f"{case}-hf")
        assert hashes(tmp_path / f"{case}-hf") == hashes(folders(case))
    again = merge(
        folders("llama"),
        tmp_path / "llama",
        Options(resume=True, largest_file=9_000),
        style="torch_dist",
    )
    assert again.kept == again.nbytes
    shutil.copytree(folders("llama"), tmp_path / "mixed")
    weights = load_file(tmp_path / "mixed" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file({**weights, name: weights[name].bfloat16()}, tmp_path / "mixed" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"layers.1.self_attention.linear_proj.weight is BF16 .*choose one type"
    ):
        merge(tmp_path / "mixed", tmp_path / "out", style="torch_dist")


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", *MIXTURES])
def test_the_arguments_tell_the_configuration(case, folders, tmp_path):
    """Of all sizes; the vocabulary has its padding, and a Mistral without a window would be a Llama."""
    merge(write(folders(case), tmp_path / "megatron", 2, 2, "te"), tmp_path / "hf")
    found, wanted = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "hf", folders(case))
    )
    assert found["vocab_size"] == 128
    for name in (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings",
    ):  # fmt: skip
        assert found[name] == wanted[name], name
    for name in (
        "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef",
    ):  # fmt: skip
        assert found.get(name) == wanted.get(name), name
    assert found.get("sliding_window") == wanted.get("sliding_window") or case not in WINDOWS
    theta = (wanted.get("rope_parameters") or wanted)["rope_theta"]
    assert found["rope_theta"] == theta
    import transformers

    mine, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        for folder in (tmp_path / "hf", folders(case))
    )
    ids = torch.randint(0, 97, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            mine(ids).logits[..., :97], theirs(ids).logits, atol=1e-5, rtol=1e-5
        )


def test_llama_31s_rotation_is_kept(folders, tmp_path, hashes):
    shutil.copytree(folders("llama"), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    numbers = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = {"rope_type": "llama3", "factor": 32.0, "rope_theta": 500000.0, **numbers}
    values = json.loads(path.read_text())
    values.pop("rope_theta", None)
    path.write_text(json.dumps(values | {"rope_parameters": rope}))
    split(tmp_path / "hf", tmp_path / "out", 2, style="megatron")
    (tmp_path / "out" / "config.json").unlink()
    merge(tmp_path / "out", tmp_path / "back")
    found = json.loads((tmp_path / "back" / "config.json").read_text())
    assert found["rope_theta"] == 500000.0
    assert found["rope_scaling"] == {
        key: value for key, value in rope.items() if key != "rope_theta"
    }
    path.write_text(json.dumps(values | {"rope_parameters": rope | {"low_freq_factor": 2.0}}))
    with pytest.raises(ValueError, match=r"rotates plainly, .* but not with .*low_freq_factor=2.0"):
        split(tmp_path / "hf", tmp_path / "again", 2, style="megatron")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"position_embedding_type": "none"}, "position_embedding_type='none', but the zoo's models have 'rope'"),
    ({"normalization": "LayerNorm"}, "normalization='LayerNorm'"), ({"swiglu": False}, "swiglu=False"),
    ({"num_experts": 8}, "num_experts=8"), ({"rotary_percent": 0.5}, "rotary_percent=0.5"),
    ({"rotary_interleaved": True}, "rotary_interleaved=True"), ({"apply_layernorm_1p": True}, "apply_layernorm_1p"),
    ({"window_size": [3, 3]}, "window_size=(3, 3); a decoder's"), ({"add_bias_linear": True}, "add_bias_linear=True"),
    ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}, "scale the rotation twice"),
    ({"num_attention_heads": None}, "number of heads, are not stored"), ({"kv_channels": 6}, "qkv.weight needs"),
    ({"num_query_groups": 5}, "num_key_value_heads=5"), ({"rotary_base": "x"}, "rotary_base='x', which must"),
    ({"rotary_seq_len_interpolation_factor": "x"}, "interpolation factor='x'"),
    ({"window_size": "4"}, "window_size='4'"),
    ({"window_size": [3, 0], "window_attn_skip_freq": 2}, "some layers only (window_attn_skip_freq), but a mistral"),
    ({"window_size": [3, 0], "window_attn_skip_freq": [1]}, "window_attn_skip_freq=(1,), which must be"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_other_decoders_are_refused_with_the_reason(changes, message, folders, tmp_path, capsys):
    source = write(folders("llama"), tmp_path / "megatron", 2, 1, "te", **changes)
    assert main(["merge", str(source), str(tmp_path / "hf")]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(("changes", "message"), [
    ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size=8"),
    ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax=True, but the zoo's models have False"),
    ({"moe_layer_freq": [1, 0, 1, 0]}, "moe_layer_freq"), ({"moe_router_topk": 4}, "num_experts_per_tok=4"),
])  # fmt: skip
def test_other_mixtures_are_refused_with_the_reason(changes, message, folders, tmp_path):
    source = write(folders("mixtral"), tmp_path / "megatron", 1, 1, "te", **changes)
    with pytest.raises(ValueError, match=message):
        merge(source, tmp_path / "hf")


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("qwen3_moe", {"decoder_sparse_step": 2}, "experts in every layer, but this model has single MLPs"),
    ("llama", {"attention_bias": True}, "no biases behind attention"), ("llama", {"hidden_act": "gelu"}, "SwiGLU"),
])  # fmt: skip
def test_models_that_megatron_does_not_have(case, changes, message, tmp_path):
    architecture, settings = CASES[case]
    hf_model(architecture, 0.0, **{**settings, **changes}).save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match=message):
        split(tmp_path / "hf", tmp_path / "out", 2, style="megatron")


def test_layers_without_a_window():
    """A number counts the layers from 1, as megatron-core's `is_layer_window_attention` does."""
    arguments = {"window_size": (4, 0), "window_attn_skip_freq": 3}
    assert find_windows(arguments, 4) == (5, 5, None, 5)
    assert find_windows({"window_size": (-1, 0)}, 2) == (None, None)


def test_a_window_that_config_json_does_not_have(folders, tmp_path):
    source = write(folders("mistral"), tmp_path / "megatron", 1, 1, "te", window_size=(7, 0))
    options = vocabulary_of(folders("mistral"), tmp_path / "c.json")
    with pytest.raises(ValueError, match=r"layer 0 has a sliding window of 7 .* but of 8 in its"):
        merge(source, tmp_path / "hf", options)


def test_ranks_that_do_not_divide_the_groups(folders, tmp_path):
    with pytest.raises(ValueError, match=r"attention\.qkv\.weight"):
        split(folders("llama"), tmp_path / "out", 4, style="megatron")


def core_decoder(arguments: Namespace) -> Any:
    """megatron-core's GPT of local layers, as the arguments describe it, on a CPU."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig, dot_product_attention
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
    nothing = Namespace(fork=contextlib.nullcontext)
    tensor_parallel.get_cuda_rng_tracker = (
        dot_product_attention.tensor_parallel.get_cuda_rng_tracker
    ) = lambda: nothing
    ones = torch.ones
    torch.ones = lambda *size, device=None, **options: ones(*size, **options)  # of a window's mask
    moe_utils.te_general_gemm = None  # which it defines beside Transformer Engine alone, and reads
    given = arguments
    experts = {}
    if getattr(given, "num_experts", None):
        experts = {
            "num_moe_experts": given.num_experts, "moe_router_topk": given.moe_router_topk,
            "moe_router_pre_softmax": given.moe_router_pre_softmax, "moe_ffn_hidden_size": given.moe_ffn_hidden_size,
            "moe_router_load_balancing_type": given.moe_router_load_balancing_type,
            "moe_aux_loss_coeff": given.moe_aux_loss_coeff, "moe_token_dispatcher_type": "allgather",
            "sequence_parallel": False,
        }  # fmt: skip
    sizes = TransformerConfig(
        num_layers=given.num_layers, hidden_size=given.hidden_size, num_attention_heads=given.num_attention_heads,
        num_query_groups=given.num_query_groups, kv_channels=given.kv_channels, ffn_hidden_size=given.ffn_hidden_size,
        tensor_model_parallel_size=2, use_cpu_initialization=True, params_dtype=torch.float32, hidden_dropout=0.0,
        attention_dropout=0.0, layernorm_epsilon=given.norm_epsilon, normalization=given.normalization,
        activation_func=torch.nn.functional.silu, gated_linear_unit=given.swiglu, add_bias_linear=given.add_bias_linear,
        add_qkv_bias=given.add_qkv_bias, qk_layernorm=given.qk_layernorm, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        apply_rope_fusion=False, window_size=given.window_size,
        window_attn_skip_freq=getattr(given, "window_attn_skip_freq", None), **experts,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=experts.get("num_moe_experts"), moe_grouped_gemm=False, normalization=given.normalization,
        qk_layernorm=given.qk_layernorm,
    )  # fmt: skip
    return GPTModel(
        sizes, spec, given.padded_vocab_size, given.max_position_embeddings, parallel_output=False,
        share_embeddings_and_output_weights=not given.untie_embeddings_and_output_weights,
        position_embedding_type=given.position_embedding_type, rotary_base=given.rotary_base,
        rotary_percent=given.rotary_percent, rope_scaling=given.use_rope_scaling,
        seq_len_interpolation_factor=given.rotary_seq_len_interpolation_factor,
    )  # fmt: skip


RUN = ("mistral", "llama", "qwen2", "tied", "mixtral", "qwen3", "qwen3_moe")
IDS = torch.randint(90, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run_by_core(folders, run_ranks, tmp_path_factory) -> dict[str, tuple[torch.Tensor, Path]]:
    """The logits and the checkpoint of each case, from processes that import megatron-core once."""
    written, places = tmp_path_factory.mktemp("megatron"), tmp_path_factory.mktemp("dist")
    for case in RUN:
        split(folders(case), written / case, 2, style="megatron", names="local")
        merge(folders(case), written / f"{case}.dist", style="torch_dist")
    pairs = [(written / case, places / case) for case in RUN]
    logits = run_ranks(2, in_megatron_core, core_decoder, pairs, IDS, isolated=True, timeout=500)[0]
    return {case: (found, places / case) for case, found in zip(RUN, logits, strict=True)}


@pytest.mark.before_release
@pytest.mark.parametrize("case", by_turns(RUN, 2))
def test_megatron_core_runs_what_is_written_and_its_checkpoints_are_read(
    case, folders, run_by_core, hashes, tmp_path
):
    import transformers

    logits, place = run_by_core[case]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders(case), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        wanted = model(IDS).logits
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(logits[..., : wanted.shape[-1]], wanted, rtol=1e-5, atol=1e-5)
    merge(place, tmp_path / "hf", vocabulary_of(folders(case), tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(folders(case))
