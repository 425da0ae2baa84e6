"""BERT of megatron-core, and of Megatron-LM before it with the same norms, in and out: transformers' Megatron-BERT.

What is written is run by megatron-core's own BertModel, and what that saves is read.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_case import by_turns
from megatron_files import (
    Layout,
    check_torch_dist,
    megatron_bert_modules,
    save_in_this_process,
    states,
    write,
)
from parity import randomize
from safetensors.torch import load_file

from shardzoo.cli.convert import main
from shardzoo.convert.operations import Options, merge, split
from shardzoo.models import from_config, from_pretrained

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 60,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-6, "initializer_range": 0.03,
}  # fmt: skip
# Case -> head, whether the output head is its own, changes.
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "pretraining": ("ForPreTraining", False, {}),
    "masked": ("ForMaskedLM", False, {"type_vocab_size": 3}),
    "untied": ("ForPreTraining", True, {}),
    "bf16": ("ForPreTraining", False, {}),
}
LAYOUTS = ((1, 1), (2, 1), (1, 2))  # tensor-parallel ranks, pipeline stages
_GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(1, 97, (2, 13), generator=_GENERATOR)
TYPES = torch.randint(2, (2, 13), generator=_GENERATOR)
MASK = torch.ones(2, 13, dtype=torch.long)
MASK[1, 9:] = 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            made[case] = save_bert(case, tmp_path_factory.mktemp(case) / "hf")
        return made[case]

    return make


def save_bert(case: str, folder: Path) -> Path:
    import transformers

    transformers.logging.set_verbosity_error()
    head, untied, changes = CASES[case]
    config = transformers.MegatronBertConfig(**SIZES, **changes)
    model = getattr(transformers, f"MegatronBert{head}")(config)
    if untied:
        decoder = model.cls.predictions.decoder
        decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone())
    randomize(model, 1)
    if case == "bf16":
        model.bfloat16()
    model.save_pretrained(folder)
    assert untied == ("cls.predictions.decoder.weight" in load_file(folder / "model.safetensors"))
    return folder


def run_transformers(folder: Path) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits of the masked words, and of the next sentence if the model has that head."""
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder).eval().float()
    with torch.no_grad():
        out = model(IDS, attention_mask=MASK, token_type_ids=TYPES)
    if hasattr(out, "prediction_logits"):
        return out.prediction_logits, out.seq_relationship_logits
    return out.logits, None


def with_config(folder: Path, place: Path) -> Options:
    """Without config.json, the padding of the vocabulary belongs to it."""
    place.write_text((folder / "config.json").read_text())
    return Options(config_file=place)


def modules(folder: Path) -> dict[str, Any]:
    return megatron_bert_modules(load_file(folder / "model.safetensors"), 4, 4)


# Of every style and order of rows that Megatron-LM has written.
STORED = [
    ("pretraining", Layout(2, 2, 3.0, "local")), ("masked", Layout(4, 1, 3.0, "te")),
    ("untied", Layout(2, 4, 3.0, "te")), ("pretraining", Layout(1, 2, 2.0, "legacy")),
    ("masked", Layout(2, 1, 0, "oldest")), ("pretraining", Layout(4, 2, 1.0, "oldest")),
    ("untied", Layout(1, 1, 3.0, "local")), ("bf16", Layout(2, 2, 3.0, "te")),
    ("masked", Layout(2, 2, 3.0, "local", chunks=2)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "layout"), by_turns(STORED, 3), ids=str)
def test_megatrons_files_become_the_original_bytes(case, layout, folders, hashes, tmp_path):
    source = write(tmp_path / "megatron", modules(folders(case)), layout)
    merge(source, tmp_path / "hf", with_config(folders(case), tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(folders(case))


WRITTEN = [
    ("pretraining", 2, 2, "transformer_engine"), ("masked", 1, 4, "legacy"), ("untied", 4, 1, "local"),
    ("masked", 4, 2, "local"), ("pretraining", 1, 1, "legacy"), ("bf16", 2, 1, "transformer_engine"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "tp", "stages", "style"), by_turns(WRITTEN, 2))
def test_written_files_hold_what_megatron_would(
    case, tp, stages, style, folders, hashes, tmp_path, monkeypatch
):
    import megatron_files

    monkeypatch.setattr(megatron_files, "PADDING", 128)
    place = tmp_path / "out"
    split(folders(case), place, tp, style="megatron", stages=stages, names=style)
    layout = Layout(tp, stages, 3.0, {"transformer_engine": "te"}.get(style, style))
    for name, wanted in states(modules(folders(case)), layout):
        file = place / "release" / name / "model_optim_rng.pt"
        with torch.serialization.safe_globals([Namespace]):
            found = torch.load(file, weights_only=True)["model"]
        found, wanted = flatten(found), flatten(wanted["model"])
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            # Rows of padding are zeros here.
            rows = tensor != 7.5 if len(tensor) == 128 else torch.ones_like(tensor, dtype=bool)
            assert torch.equal(found[key][rows], tensor[rows]), key
    merge(place, tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(folders(case))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        elif value is not None:
            flat[prefix + name] = value
    return flat


def test_the_arguments_tell_the_configuration(folders, tmp_path):
    """And tell it from a BERT, whose tensors have the same names."""
    for case in ("pretraining", "masked"):
        place = tmp_path / case
        split(folders(case), place, 2, style="megatron", stages=2)
        (place / "config.json").unlink()
        merge(place, tmp_path / f"{case}-hf")
        found = json.loads((tmp_path / f"{case}-hf" / "config.json").read_text())
        wanted = json.loads((folders(case) / "config.json").read_text())
        assert found["vocab_size"] == 256
        for key in {"model_type", "architectures", "hidden_act", "type_vocab_size", *SIZES}:
            assert key == "vocab_size" or found[key] == wanted[key], (case, key)


def test_torch_dist_is_reshaped_into_ranks(folders, hashes, tmp_path):
    merge(folders("masked"), tmp_path / "dist", style="torch_dist")
    (tmp_path / "dist" / "config.json").rename(tmp_path / "c.json")
    options = Options(config_file=tmp_path / "c.json")
    split(tmp_path / "dist", tmp_path / "four", 4, options, style="megatron", stages=2)
    merge(tmp_path / "four", tmp_path / "back", options)
    assert hashes(tmp_path / "back") == hashes(folders("masked"))


def run_layers(state: dict[str, torch.Tensor], heads: int, epsilon: float) -> torch.Tensor:
    """The logits of megatron-core's BertModel, after its source: pre-norm layers, an exact GELU in the head."""
    size = state["embedding.word_embeddings.weight"].shape[1]

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x, name):
        return F.layer_norm(x, (size,), state[f"{name}.weight"], state[f"{name}.bias"], epsilon)

    x = state["embedding.word_embeddings.weight"][IDS]
    x = x + state["embedding.position_embeddings.weight"][: IDS.shape[1]]
    x = x + state["embedding.tokentype_embeddings.weight"][TYPES]
    visible = (MASK[:, None, :] > 0)[:, None]  # [B, 1, 1, S]
    for i in range(4):
        layer = f"encoder.layers.{i}"
        fused = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention.linear_qkv")
        fused = fused.unflatten(-1, (heads, 3, size // heads))
        q, k, v = (t.transpose(1, 2) for t in fused.unbind(3))  # [B, N, S, D]
        mixed = F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2).flatten(2)
        x = x + linear(mixed, f"{layer}.self_attention.linear_proj")
        y = linear(norm(x, f"{layer}.pre_mlp_layernorm"), f"{layer}.mlp.linear_fc1")
        x = x + linear(F.gelu(y), f"{layer}.mlp.linear_fc2")
    x = norm(x, "encoder.final_layernorm")
    x = norm(F.gelu(linear(x, "lm_head.dense")), "lm_head.layer_norm")
    return F.linear(x, state["embedding.word_embeddings.weight"], state["output_layer.bias"])


def test_it_is_the_model_of_megatron_cores_source(folders, tmp_path):
    split(folders("pretraining"), tmp_path / "out", 1, style="megatron", names="local")
    with torch.serialization.safe_globals([Namespace]):
        state = torch.load(
            tmp_path / "out" / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=True
        )
    logits = run_layers(state["model"], 4, state["args"].norm_epsilon)[..., :97]
    wanted, _ = run_transformers(folders("pretraining"))
    assert wanted.abs().max() > 0.5
    seen = MASK.bool()
    assert (logits - wanted)[seen].abs().max() <= 1e-5 * wanted.abs().max()
    mine = from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        out = mine(IDS, attention_mask=MASK, token_type_ids=TYPES)
    assert (out.prediction_logits - wanted)[seen].abs().max() <= 1e-5 * wanted.abs().max()


def say(**arguments: Any) -> Any:
    return lambda name, state: vars(state["args"]).update(arguments)


def drop(part: str) -> Any:
    def change(name: str, state: dict[str, Any]) -> None:
        for key in [key for key in state["model"] if part in key]:
            del state["model"][key]

    return change


# Case -> style of the names, what is changed, whether a config.json is named, a part of the message.
POST_NORM = "apply_residual_connection_post_layernorm"
REFUSED = {
    "no segments": ("local", drop("tokentype"), False, "lacks embedding.tokentype_embeddings.weight (bert_binary_head"),
    "two kinds of GELU": ("te", say(bias_gelu_fusion=True), False, "tanh approximation of GELU (bias_gelu_fusion)"),
    "rotary positions": ("local", say(position_embedding_type="rope"), True, "position_embedding_type='rope'"),
    "other norms": ("te", say(normalization="RMSNorm"), True, "normalization='RMSNorm', but"),
    "norms around 1": ("local", say(apply_layernorm_1p=True), True, "apply_layernorm_1p=True"),
    "a gated MLP": ("local", say(swiglu=True), True, "swiglu=True"),
    "grouped queries": ("local", say(group_query_attention=True), True, "group_query_attention=True"),
    "no biases": ("local", say(add_bias_linear=False), True, "add_bias_linear=False"),
    "norms of sums": ("legacy", say(**{POST_NORM: True}), True, f"{POST_NORM}=True, but the zoo's models have False"),
    "norms of sums that are not read": ("te", say(**{POST_NORM: True}), False, "its layers do not read apply_residual"),
    "norms that nobody tells of": (
        "legacy", lambda name, state: delattr(state["args"], POST_NORM), False, f"its arguments lack {POST_NORM}"
    ),
    "a head that is not read": (
        "legacy", say(untie_embeddings_and_output_weights=True), True, "untie_embeddings_and_output_weights=True"
    ),
    "no final norm": ("local", drop("final_layernorm"), True, "encoder.final_layernorm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", by_turns(REFUSED, 3))
def test_what_equals_no_megatron_bert_is_refused_with_the_reason(name, folders, tmp_path, capsys):
    style, change, has_config, message = REFUSED[name]
    layout = Layout(1, 1, 3.0, style)
    source = write(tmp_path / "megatron", modules(folders("pretraining")), layout, change)
    words = ["merge", str(source), str(tmp_path / "hf")]
    if has_config:
        words += ["--config", str(folders("pretraining") / "config.json")]
    assert main(words) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "hf").exists()


def test_what_megatron_core_does_not_read(folders, hashes, tmp_path):
    """A config.json tells what an argument of before megatron-core leaves open; its GELU is the exact one."""
    bert = modules(folders("pretraining"))
    source = write(tmp_path / "post", bert, Layout(2), say(**{POST_NORM: True}))
    merge(source, tmp_path / "hf", with_config(folders("pretraining"), tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(folders("pretraining"))
    for style, activation in (("local", "gelu"), ("legacy", "gelu_new")):
        source = write(tmp_path / style, bert, Layout(style=style), say(openai_gelu=True))
        merge(source, tmp_path / f"{style}-hf")
        config = json.loads((tmp_path / f"{style}-hf" / "config.json").read_text())
        assert config["hidden_act"] == activation


UNWRITABLE = {
    "a classifier": ({"architectures": ["MegatronBertForSequenceClassification"]}, "not that of MegatronBertForSeq"),
    "a decoder": ({"architectures": ["MegatronBertForCausalLM"], "is_decoder": True}, "not that of MegatronBertForCau"),
    "another activation": ({"hidden_act": "relu"}, "has the exact GELU, but hidden_act is relu"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNWRITABLE)
def test_models_that_megatron_does_not_have(name, folders, tmp_path):
    changes, message = UNWRITABLE[name]
    values = json.loads((folders("masked") / "config.json").read_text()) | changes
    from_config(values).save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match=message):
        split(tmp_path / "hf", tmp_path / "out", 1, style="megatron")
    with pytest.raises(ValueError, match=message):
        merge(tmp_path / "hf", tmp_path / "out", style="torch_dist")


def test_a_decoder_is_not_read_as_what_attends_to_all_tokens(folders, tmp_path):
    source = write(tmp_path / "megatron", modules(folders("masked")), Layout(1))
    values = json.loads((folders("masked") / "config.json").read_text())
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps(values | {"is_decoder": True, "architectures": ["MegatronBertForCausalLM"]})
    )
    with pytest.raises(
        ValueError, match="a language-model head, not that of MegatronBertForCausalLM"
    ):
        merge(source, tmp_path / "hf", Options(config_file=path))


def test_a_head_of_its_own_needs_megatron_core(folders, tmp_path):
    with pytest.raises(ValueError, match="head of a megatron-bert is the word embedding, but"):
        split(folders("untied"), tmp_path / "out", 1, style="megatron", names="legacy")


def build_core(given: Namespace, stage: int, stages: int) -> Any:
    """A stage of megatron-core's BERT of local layers, as the arguments describe it, on a CPU."""
    from megatron.core import tensor_parallel
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer import TransformerConfig, dot_product_attention

    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
    torch.Tensor.cuda = lambda self: self  # the copy of the embedding in the last stage
    nothing = Namespace(fork=contextlib.nullcontext)
    tensor_parallel.get_cuda_rng_tracker = (
        dot_product_attention.tensor_parallel.get_cuda_rng_tracker
    ) = lambda: nothing
    config = TransformerConfig(
        num_layers=given.num_layers, hidden_size=given.hidden_size, num_attention_heads=given.num_attention_heads,
        kv_channels=given.kv_channels, ffn_hidden_size=given.ffn_hidden_size,
        tensor_model_parallel_size=given.tensor_model_parallel_size, pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, params_dtype=torch.float32, hidden_dropout=0.0,
        attention_dropout=0.0, layernorm_epsilon=given.norm_epsilon, normalization=given.normalization,
        bias_activation_fusion=given.bias_gelu_fusion, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        apply_residual_connection_post_layernorm=given.apply_residual_connection_post_layernorm,
    )  # fmt: skip
    return BertModel(
        config, given.num_tokentypes, bert_layer_local_spec, given.padded_vocab_size, given.max_position_embeddings,
        pre_process=stage == 0, post_process=stage == stages - 1, parallel_output=False,
        share_embeddings_and_output_weights=not given.untie_embeddings_and_output_weights,
        position_embedding_type=given.position_embedding_type, add_binary_head=given.bert_binary_head,
    )  # fmt: skip


def run_in_core(jobs: list[tuple[Path, Path, int, int, Path]]) -> list[Any]:
    """Called on two ranks, once in a process, for each of our folders: loads it into megatron-core's BERT, saves that
    as `torch.save` and as `dist_checkpointing` write it, and returns the logits of the last stage.

    A job is our folder, the folder to save to, the numbers of ranks and stages, and our torch_dist folder, which is
    loaded by `dist_checkpointing` over the same model, too.
    """
    warnings.simplefilter("ignore")
    multiprocessing.current_process()._config["daemon"] = False  # megatron-core has one of its own
    from megatron.core import parallel_state

    found = []
    for written, place, size, stages, ours in jobs:
        parallel_state.initialize_model_parallel(size, stages)
        rank = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
        state = torch.load(written / "release" / name / "model_optim_rng.pt", weights_only=False)
        model = build_core(state["args"], stage, stages).eval()
        model.load_state_dict(state["model"], strict=True)
        dtype = next(iter(state["model"].values())).dtype
        check_torch_dist(model, ours / "release", rank)

        with torch.no_grad():
            if stages == 1:
                result = model(IDS, MASK, TYPES)
            else:
                states = torch.empty(13, 2, SIZES["hidden_size"])
                if stage == 0:
                    states = model(IDS, MASK, TYPES)
                group = parallel_state.get_pipeline_model_parallel_group()
                source = parallel_state.get_pipeline_model_parallel_first_rank()
                torch.distributed.broadcast(states, source, group)
                model.set_input_tensor(states)
                result = model(IDS, MASK, TYPES)
        found.append(result)

        # The logits were those of the stored weights in fp32; a run of bf16 saves bf16.
        model.to(dtype)
        if parallel_state.get_data_parallel_rank() == 0:
            folder = place / "iter" / "iter_0000050" / name
            folder.mkdir(parents=True)
            content = {**state, "model": model.state_dict(), "iteration": 50}
            torch.save(content, folder / "model_optim_rng.pt")
            (place / "iter" / "latest_checkpointed_iteration.txt").write_text("50")
        if size * stages == 2:  # a rank that repeats another one has nothing to save
            (place / "dist").mkdir(exist_ok=True, parents=True)
            torch.distributed.barrier()
            common = {"args": state["args"], "checkpoint_version": 3.0, "iteration": 50}
            save_in_this_process({**model.sharded_state_dict(prefix=""), **common}, place / "dist")
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    for child in multiprocessing.active_children():  # the writer would outlive this process
        child.terminate()
        child.join()
    return found


@pytest.fixture(scope="module")
def by_core(folders, run_ranks, tmp_path_factory) -> dict[tuple[str, int, int], tuple[Any, Path]]:
    """Logits and saved folders of each case and layout, from megatron-core."""
    root = tmp_path_factory.mktemp("core")
    jobs = {}
    for case in CASES:
        ours = root / f"{case}-ours"
        merge(folders(case), ours, style="torch_dist")
        for size, stages in LAYOUTS:
            written = root / f"{case}-{size}-{stages}"
            split(folders(case), written, size, style="megatron", stages=stages, names="local")
            jobs[case, size, stages] = (written, written.with_suffix(".core"), size, stages, ours)
    results = run_ranks(2, run_in_core, list(jobs.values()), isolated=True, timeout=500)
    # The last rank has the last stage.
    return {key: (results[1][i], job[1]) for i, (key, job) in enumerate(jobs.items())}


@pytest.mark.before_release
@pytest.mark.parametrize("case", CASES)
def test_megatron_core_computes_transformers_logits(case, folders, by_core):
    words, sentences = run_transformers(folders(case))
    assert words.abs().max() > 0.5
    seen = MASK.bool()
    for size, stages in LAYOUTS:
        (logits, binary), _ = by_core[case, size, stages]
        error = (logits[..., :97] - words)[seen].abs().max()
        assert error <= 1e-5 * words.abs().max(), (size, stages)
        assert (binary is None) == (sentences is None)
        if sentences is not None:
            error = (binary - sentences).abs().max()
            assert error <= 1e-5 * max(1, sentences.abs().max()), (size, stages)


@pytest.mark.before_release
@pytest.mark.parametrize("case", CASES)
def test_what_megatron_core_saves_becomes_the_original_bytes(
    case, folders, by_core, hashes, tmp_path
):
    options = with_config(folders(case), tmp_path / "c.json")
    for size, stages in LAYOUTS:
        place = by_core[case, size, stages][1]
        for kind in ("iter", "dist") if size * stages == 2 else ("iter",):
            back = tmp_path / f"{size}-{stages}-{kind}"
            merge(place / kind, back, options)
            assert hashes(back) == hashes(folders(case)), (kind, size, stages)
        # Another number of ranks, from what core wrote as one of two.
        four = tmp_path / f"{size}-{stages}-four"
        split(place / "iter", four, 4, options, style="megatron", stages=2, names="local")
        merge(four, tmp_path / f"{size}-{stages}-back", options)
        assert hashes(tmp_path / f"{size}-{stages}-back") == hashes(folders(case))
