"""Hostile folders of Megatron-LM: code in pickles, lies about versions, ranks and layers, links."""

from __future__ import annotations

import json
import os
import re
import shutil
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from megatron_files import Layout, bert_modules, gpt_modules, write, write_layers
from safetensors.torch import load_file
from tiny_models import save_model

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
RANK = "mp_rank_01_001"


class Calls:
    """Unpickling this calls a function."""

    def __init__(self, function, *arguments) -> None:
        self._call = function, arguments

    def __reduce__(self):
        return self._call


class Sets:
    """Unpickling this makes a Namespace with another state than a dictionary."""

    def __init__(self, state) -> None:
        self._state = state

    def __reduce__(self):
        return Namespace, (), self._state


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    place = tmp_path_factory.mktemp("gpt") / "hf"
    save_model(place, "GPT2LMHeadModel", "gpt2", seed=1, n_layer=4)
    return gpt_modules(load_file(place / "model.safetensors"), 4, 4)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    place = tmp_path_factory.mktemp("bert") / "hf"
    save_model(place, "BertForPreTraining", "bert", seed=1)
    return bert_modules(load_file(place / "model.safetensors"), 4, 2)


def changed(where, value):
    """Sets an entry of one rank's state: a path of keys."""

    def change(state):
        *path, last = where
        for key in path:
            state = state[key]
        if value is DROP:
            del state[last]
        else:
            state[last] = value(state[last]) if callable(value) else value

    return change


DROP = object()


def cyclic(state):
    model = state["model"]
    for number in range(9):
        model[f"again{number}"] = model


def deep(state):
    tree = torch.zeros(2)
    for _ in range(12):
        tree = {"a": tree}
    state["model"]["deep"] = tree


def renumber(old, new):
    def change(state):
        state["model"] = {
            name.replace(f".layers.{old}.", f".layers.{new}."): t
            for name, t in state["model"].items()
        }

    return change


def claim(**arguments):
    def change(state):
        vars(state["args"]).update(arguments)

    return change


LIES = {
    "version 4": (changed(["checkpoint_version"], 4.0), "checkpoint_version 4.0; those that can be read"),
    "version as text": (changed(["checkpoint_version"], "3.0"), "checkpoint_version '3.0'"),
    "version NaN": (changed(["checkpoint_version"], float("nan")), "checkpoint_version nan"),
    "version true": (changed(["checkpoint_version"], True), "checkpoint_version True"),
    "another version on one rank": (changed(["checkpoint_version"], 2.0), "checkpoint_version 2.0, but .* 3.0"),
    "no model": (changed(["model"], DROP), "has no model; its entries are args"),
    "a list as model": (changed(["model"], [1]), "model is a list, not named tensors"),
    "a tensor as model": (changed(["model"], torch.zeros(3)), "model is a Tensor, not named tensors"),
    "a number as tensor": (changed(["model", QKV], 3), "is a int, but weights are named tensors"),
    "a sparse tensor": (changed(["model", QKV], lambda t: t.to_sparse()), "is not a dense tensor"),
    "integers": (changed(["model", QKV], lambda t: t.long()), "type I64|type int64"),
    "half of the rows": (changed(["model", QKV], lambda t: t[: len(t) // 2].clone()), "has shape"),
    "three dimensions": (changed(["model", QKV], lambda t: t[None]), "has shape"),
    "an empty tensor": (changed(["model", QKV], torch.zeros(0)), "has shape"),
    "another type on one rank": (changed(["model", QKV], lambda t: t.half()), "has type F16, but"),
    "another value on one rank": (
        changed(["model", "decoder.layers.0.input_layernorm.bias"], lambda t: t + 1), "differs from .* must be equal"
    ),
    "another head than the embedding": (changed(["model", "output_layer.weight"], lambda t: t + 1), "differs from"),
    "a tensor left out": (changed(["model", QKV], DROP), "linear_qkv.weight .* not in the files of all"),
    "an unknown tensor": (
        lambda state: state["model"].update({"decoder.extra": torch.zeros(2)}), "extra .* not in the files of all"
    ),
    "a gap in the layers": (renumber(1, 7), r"has the layers \[0, 7\]; they must be numbered from 0"),
    "a negative layer": (renumber(1, -1), "not in the files of all|must be numbered"),
    "a layer of many digits": (renumber(1, "9" * 60), "must be numbered from 0"),
    "a dictionary in itself": (cyclic, "has the dictionary .* twice"),
    "many dictionaries in one another": (deep, "more than 8 in one another"),
    "two spellings of a tensor": (
        lambda state: state["model"].update({"decoder.layers.0.self_attention.query_key_value.weight": torch.zeros(2)}),
        "query_key_value.weight .* not in the files of all",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_rank_that_lies(lie, arena, gpt):
    change, message = LIES[lie]
    source = write(
        arena.folder / "source",
        gpt,
        Layout(2, 2),
        lambda name, state: name == RANK and change(state),
    )
    assert re.search(message, arena.refused_merge(source))


UNSUPPORTED = {
    "other ranks": (claim(tensor_model_parallel_size=8), "files of 2, but .* tensor_model_parallel_size=8"),
    "other stages": (claim(pipeline_model_parallel_size=8), "files of 2, but .* pipeline_model_parallel_size=8"),
    "no heads": (claim(num_attention_heads="four"), "number of heads, are not stored"),
    "no arguments": (changed(["args"], DROP), "number of heads, are not stored"),
    "arguments of another type": (changed(["args"], ["--num-layers"]), "number of heads, are not stored"),
    "a wrong number of heads": (claim(num_attention_heads=5), "n_embd=32 is not a multiple of n_head=5"),
    "a negative number of heads": (claim(num_attention_heads=-4), "n_head must be"),
    "a huge number of heads": (claim(num_attention_heads=2**70), "n_head must be"),
    "rotary positions": (claim(position_embedding_type="rope"), "position_embedding_type='rope'"),
    "RMS norms": (claim(normalization="RMSNorm"), "normalization='RMSNorm'"),
    "SwiGLU": (claim(swiglu=True), "swiglu=True"),
    "grouped queries": (claim(group_query_attention=True), "group_query_attention=True"),
    "experts": (claim(num_experts=8), "num_experts=8"),
    "no biases": (claim(add_bias_linear=False), "add_bias_linear=False"),
    "residuals after the norms": (
        claim(apply_residual_connection_post_layernorm=True), "apply_residual_connection_post_layernorm=True"
    ),
    "an encoder-decoder": (
        lambda state: state["model"].update({"decoder.layers.0.cross_attention.linear_q.weight": torch.zeros(2)}),
        "T5 without relative positions .position_embedding_type is 'learned_absolute' or 'rope'",
    ),
    "a vision model": (
        lambda state: state.update(model={f"vit.{name}": tensor for name, tensor in state["model"].items()}),
        "of no family that Megatron-LM shares with the zoo",
    ),
    "another name for all": (
        lambda state: state["model"].update({"decoder.layers.0.mlp.dense_h_to_4h.bias": torch.zeros(64)}),
        "has decoder.layers.0.mlp.linear_fc1.bias twice",
    ),
    "an adapter": (
        lambda state: state["model"].update({"decoder.layers.0.lora": torch.zeros(2)}), "lora, which the model does not"
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", UNSUPPORTED)
def test_a_model_that_the_zoo_does_not_have(wrong, arena, gpt):
    change, message = UNSUPPORTED[wrong]
    source = write(arena.folder / "source", gpt, Layout(2, 2), lambda name, state: change(state))
    refusal = arena.refused_merge(source)
    assert re.search(message, refusal)
    assert refusal.count("\n") == 1


def test_a_bert_of_another_architecture(arena, bert):
    for style in ("local", "te"):
        source = write(arena.folder / style, bert, Layout(style=style))
        assert (
            "a BERT of megatron-core, which is transformers' megatron-bert"
            in arena.refused_merge(source)
        )
    source = write(
        arena.folder / "unsaid",
        bert,
        Layout(style="legacy"),
        lambda name, state: delattr(state["args"], "apply_residual_connection_post_layernorm"),
    )
    assert "its arguments lack apply_residual_connection_post_layernorm" in arena.refused_merge(
        source
    )
    source = write(
        arena.folder / "mixed", bert, Layout(style="legacy", arguments={"bias_gelu_fusion": True})
    )
    assert "has one activation" in arena.refused_merge(source)


def bomb(marker):
    return {
        "os.system": Calls(os.system, f"touch {marker}"),
        "eval": Calls(eval, f"open({str(marker)!r}, 'w')"),
        "getattr": Calls(getattr, "text", "upper"),
        "Namespace of a call": Namespace(a=Calls(os.system, f"touch {marker}")),
        "Namespace with a method": Sets(
            {"__setstate__": Calls(exec, f"open({str(marker)!r}, 'w')")}
        ),
    }


@pytest.mark.parametrize(
    "name", ["os.system", "eval", "getattr", "Namespace of a call", "Namespace with a method"]
)
@pytest.mark.parametrize("place", ["args", "optimizer", "model"])
def test_code_is_refused_and_not_run(name, place, arena, gpt):
    marker = arena.folder / "executed"
    found = bomb(marker)[name]

    def plant(_, state):
        if place == "model":
            state["model"] = OrderedDict(state["model"], x=found)
        else:
            state[place] = found

    source = write(arena.folder / "source", gpt, Layout(2), plant)
    assert "model_optim_rng.pt is refused" in arena.refused_merge(source)
    assert not marker.exists()


@pytest.mark.parametrize(
    "state", [3, [("a", 1)], ({"a": 1}, {"values": {"num_attention_heads": 4}}), {1: 2}]
)
def test_a_namespace_with_another_state_has_no_arguments(state, arena, gpt):
    source = write(
        arena.folder / "source", gpt, Layout(), lambda _, whole: whole.update(args=Sets(state))
    )
    assert "number of heads, are not stored" in arena.refused_merge(source)


def test_other_classes_are_refused(arena, gpt):
    source = write(
        arena.folder / "source",
        gpt,
        Layout(),
        lambda _, state: state.update(p=Path("a"), d=Calls(dict)),
    )
    assert "it holds a" in arena.refused_merge(source)


def run_folder(source):
    return source / "iter_0000500"


def link_out(source):
    shutil.move(run_folder(source) / RANK, source.parent / "elsewhere")
    (run_folder(source) / RANK).symlink_to(source.parent / "elsewhere")


def link_file(source):
    file = run_folder(source) / RANK / "model_optim_rng.pt"
    shutil.move(file, source.parent / "elsewhere.pt")
    file.symlink_to(source.parent / "elsewhere.pt")


def rename(old, new):
    return lambda source: (run_folder(source) / old).rename(run_folder(source) / new)


def track(text):
    return lambda source: (source / "latest_checkpointed_iteration.txt").write_text(text)


def truncate(source):
    file = run_folder(source) / RANK / "model_optim_rng.pt"
    os.truncate(file, file.stat().st_size // 2)


FOLDERS = {
    "a rank is missing": (
        lambda s: shutil.rmtree(run_folder(s) / RANK),
        "no file of tensor-parallel rank 1, pipeline",
    ),
    "a rank too many": (
        rename(RANK, "mp_rank_07_001"),
        "no file of tensor-parallel rank 1, pipeline stage 1",
    ),
    "a stage too many": (rename(RANK, "mp_rank_01_007"), "no file of tensor-parallel rank"),
    "experts": (rename(RANK, f"{RANK}_003"), "expert-parallel rank"),
    "a copy of another rank": (
        lambda s: shutil.copytree(
            run_folder(s) / "mp_rank_00_000", run_folder(s) / RANK, dirs_exist_ok=True
        ),
        "pipeline stage|in the files of all",
    ),
    "a link to a folder": (link_out, "is a link out of its folder"),
    "a link to a file": (link_file, "is a link out of its folder"),
    "a truncated file": (truncate, "model_optim_rng.pt"),
    "no file of torch": (
        lambda s: (run_folder(s) / RANK / "model_optim_rng.pt").write_bytes(b"PK\3\4"),
        "optim_rng.pt",
    ),
    "the tracker names a path": (track("../other"), "is not the name of a folder"),
    "the tracker names nothing": (track("600"), "names the folder '600', which does not exist"),
    "the tracker is empty": (track(""), "is not the name of a folder"),
    "the tracker is a number of many digits": (
        track("9" * 5000),
        "File name too long|which does not exist",  # to Python 3.14 such a path does not exist
    ),
}


@pytest.mark.parametrize("wrong", FOLDERS)
def test_a_wrong_folder(wrong, arena, gpt):
    change, message = FOLDERS[wrong]
    source = write(arena.folder / "source", gpt, Layout(2, 2))
    change(source)
    assert re.search(message, arena.refused_merge(source))


def test_equal_rank_files(arena, gpt):
    source = write(arena.folder / "source", gpt, Layout(2))
    shutil.copytree(
        run_folder(source) / "mp_rank_00", run_folder(source) / "mp_rank_01", dirs_exist_ok=True
    )
    assert "repeats rank 0" in arena.refused_merge(source)


def test_a_configuration_that_does_not_fit(arena, gpt):
    source = write(arena.folder / "source", gpt, Layout(2))
    (source / "config.json").write_text(
        '{"model_type": "gpt2", "n_embd": 32, "n_head": 8, "n_layer": 4, "vocab_size": 300, "n_positions": 64}'
    )
    assert "has 8 attention heads, but its arguments 4" in arena.refused_merge(source)
    (source / "config.json").write_text('{"model_type": "umt5", "vocab_size": 300}')
    assert "Megatron-LM has no umt5" in arena.refused_merge(source)
    (source / "config.json").write_text(
        '{"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 300}'
    )
    assert arena.refused_merge(source).count("\n") == 1


def at_file(name, change):
    return lambda found, state: found == name and change(state)


LAYERS = {
    "rotary positions": (lambda n, s: "args" in s and s["args"].update(pos_emb="rotary"), "pos_emb='rotary'"),
    "other ranks": (lambda n, s: "args" in s and s["args"].update(model_parallel_size=3), "model_parallel_size=3"),
    "another version": (lambda n, s: "args" in s and s.update(checkpoint_version=9), "checkpoint_version 9"),
    "a rank's tensor is missing": (
        at_file("layer_03-model_01-model_states.pt", lambda s: s.pop("mlp.dense_4h_to_h.bias")), "in the files of all"
    ),
    "an unknown module": (
        at_file("layer_07-model_00-model_states.pt", lambda s: s.update(other=torch.zeros(2))), "no part of a GPT"
    ),
    "a module without tensors": (at_file("layer_07-model_00-model_states.pt", lambda s: s.clear()), "no part of a GPT"),
    "two embeddings": (
        at_file("layer_07-model_00-model_states.pt", lambda s: s.update({"word_embeddings.weight": torch.zeros(2)})),
        "final_layernorm|word_embeddings.weight again",
    ),
    "a number as tensor": (at_file("layer_02-model_00-model_states.pt", lambda s: s.update(a=3)), "a int, but weights"),
    "code": (
        at_file("layer_02-model_00-model_states.pt", lambda s: s.update(a=Calls(os.system, "true"))), "is refused"
    ),
    "code in the arguments": (lambda n, s: "args" in s and s["args"].update(a=Calls(os.system, "true")), "is refused"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", LAYERS)
def test_files_of_layers_that_lie(wrong, arena, gpt):
    edit, message = LAYERS[wrong]
    source = write_layers(arena.folder / "source", gpt, Layout(2), "neox", edit)
    assert re.search(message, arena.refused_merge(source))


def test_a_file_of_a_layer_is_missing(arena, gpt):
    source = write_layers(arena.folder / "source", gpt, Layout(2), "deepspeed")
    (source / "global_step90" / "layer_04-model_01-model_states.pt").unlink()
    assert "no file of tensor-parallel rank 1, layer 4" in arena.refused_merge(source)
    (source / "global_step90" / "layer_04-model_00-model_states.pt").unlink()
    assert "layers" in arena.refused(
        "merge", source, arena.destination, "--config", config_of(arena, gpt)
    )


def config_of(arena, gpt) -> Path:
    path = arena.folder / "c.json"
    sizes = {
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 64,
        "vocab_size": len(gpt["words"]),
    }
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    return path
