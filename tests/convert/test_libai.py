"""LiBai's own checkpoints of mT5, in the three forms of OneFlow's files, written here by hand."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import OrderedDict
from types import ModuleType

import pytest
import torch
import transformers
from tiny_models import hf_model

from shardzoo.checkpoint.formats.oneflow import read_oneflow
from shardzoo.cli.main import main

HEADS, SIZE = 3, 5
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]])


class Tensor:
    """Stands for OneFlow's class, whose pickled state is this."""

    def __init__(self, state):
        self.state = state

    def __getstate__(self):
        return self.state


@pytest.fixture
def tensor_class(monkeypatch):
    """The class under OneFlow's name, while a test writes a pickle."""
    module = ModuleType("oneflow")
    module.Tensor = Tensor
    monkeypatch.setitem(sys.modules, "oneflow", module)
    monkeypatch.setattr(Tensor, "__module__", "oneflow")


@pytest.fixture(scope="module")
def model():
    return hf_model(
        "MT5ForConditionalGeneration", 0.0, num_heads=HEADS, d_kv=SIZE, d_model=14, vocab_size=40,
        num_decoder_layers=3, tie_word_embeddings=False,
    ).eval()  # fmt: skip


def libai_state(model):
    """LiBai's names and layout of a transformers model: LiBai's loader of Hugging Face weights, in few lines."""
    theirs = model.state_dict()
    state = OrderedDict()

    def stack(*names):
        parts = torch.stack([theirs[name].view(HEADS, SIZE, -1) for name in names], 1)
        return parts.reshape(len(names) * HEADS * SIZE, -1)

    state["mt5_model.embedding.word_embeddings.weight"] = theirs["shared.weight"]
    state["mt5_model.lm_head.weight"] = theirs["lm_head.weight"]
    for side in ("encoder", "decoder"):
        state[f"mt5_model.{side}.final_layernorm.weight"] = theirs[
            f"{side}.final_layer_norm.weight"
        ]
        for i in range(3):
            ours, block = f"mt5_model.{side}.layers.{i}.", f"{side}.block.{i}.layer."
            own = f"{block}0.SelfAttention."
            state[f"{ours}self_attention.query_key_value.weight"] = stack(
                *(f"{own}{part}.weight" for part in "qkv")
            )
            state[f"{ours}self_attention.dense.weight"] = theirs[f"{own}o.weight"]
            if i == 0:
                bias = "relative_attention_bias.weight"
                state[f"{ours}self_attention.{bias}"] = theirs[f"{own}{bias}"]
            norms = ["input_layernorm", "post_attention_layernorm"]
            if side == "decoder":
                norms.append("post_cross_attention_layernorm")
                cross = f"{block}1.EncDecAttention."
                state[f"{ours}cross_attention.query.weight"] = theirs[f"{cross}q.weight"]
                state[f"{ours}cross_attention.key_value.weight"] = stack(
                    f"{cross}k.weight", f"{cross}v.weight"
                )
                state[f"{ours}cross_attention.dense.weight"] = theirs[f"{cross}o.weight"]
            for number, norm in enumerate(norms):
                state[f"{ours}{norm}.weight"] = theirs[f"{block}{number}.layer_norm.weight"]
            for part in ("wi_0", "wi_1", "wo"):
                state[f"{ours}mlp.{part}.weight"] = theirs[
                    f"{block}{len(norms) - 1}.DenseReluDense.{part}.weight"
                ]
    return state


def write_folder(folder, tensor):
    folder.mkdir(parents=True)
    sizes = "".join(f"  dim: {size}\n" for size in tensor.shape)
    (folder / "meta").write_text(f"shape {{\n{sizes}}}\ndata_type: kFloat\n")
    (folder / "out").write_bytes(tensor.numpy().tobytes())


def write_checkpoint(folder, state, form):
    path = folder / "model"
    folder.mkdir()
    if form == "snapshot":
        for name, tensor in state.items():
            write_folder(path / name, tensor)
        (path / "snapshot_done").touch()
        return
    data = OrderedDict()
    for number, (name, tensor) in enumerate(state.items()):
        if form == "folders":
            write_folder(path / f"global_tensor_{number}", tensor)
            data[name] = Tensor({"path": f"global_tensor_{number}"})
        else:
            values = tensor.contiguous().numpy()
            data[name] = Tensor(
                {"data": values, "dtype": Tensor({"name": "float32"}), "device": "cpu"}
            )
    content = pickle.dumps(
        {"protocol_version": 1, "__oneflow__": None, "data": data},
        protocol=5 if form == "file of protocol 5" else 4,  # the defaults of Python 3.14 and 3.8
    )
    (path / "pickled_data" if form == "folders" else path).write_bytes(content)


def convert(source, destination, config):
    return main(["convert", "merge", str(source), str(destination), "--config", str(config)])


@pytest.mark.parametrize(
    "form", ["file", "file of protocol 5", "file of LiBai's project T5", "folders", "snapshot"]
)
def test_transformers_computes_the_same_with_the_converted_folder(
    form, model, tensor_class, tmp_path, capsys
):
    state = libai_state(model)
    if form == "file of LiBai's project T5":
        state = OrderedDict(
            (name.replace("mt5_model.", "t5_model."), tensor) for name, tensor in state.items()
        )
    write_checkpoint(tmp_path / "model_final", state, form)
    model.config.save_pretrained(tmp_path / "config")
    assert convert(tmp_path / "model_final", tmp_path / "hf", tmp_path / "config") == 0
    again, report = transformers.MT5ForConditionalGeneration.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    with torch.no_grad():
        found = again.eval()(input_ids=IDS, decoder_input_ids=IDS).logits
        assert torch.equal(found, model(input_ids=IDS, decoder_input_ids=IDS).logits)
    assert convert(tmp_path / "model_final", tmp_path / "hf", tmp_path / "config") == 2
    assert "hf exists already; choose another folder" in capsys.readouterr().err


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_no_code_of_a_pickle_is_run(tensor_class, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in (
        Harm(),
        Tensor({"data": Harm()}),
        Tensor({"path": "../elsewhere"}),
        3,
        torch.nn.Linear,
    ):
        content = pickle.dumps({"protocol_version": 1, "__oneflow__": None, "data": {"a": value}})
        (tmp_path / "model").write_bytes(content)
        with pytest.raises(ValueError, match="model"):
            read_oneflow(tmp_path / "model")
        assert not (tmp_path / "harm").exists()
    for length in range(0, len(content), 7):
        (tmp_path / "model").write_bytes(content[:length])
        with pytest.raises(ValueError, match="model"):
            read_oneflow(tmp_path / "model")


def test_mistakes_have_one_line(model, tensor_class, tmp_path, capsys):
    state = libai_state(model)
    write_checkpoint(tmp_path / "model_final", state, "file")
    model.config.save_pretrained(tmp_path / "config")
    config = transformers.MT5Config.from_pretrained(tmp_path / "config")

    def message(command="merge", *more):
        words = ["convert", command, str(tmp_path / "model_final"), str(tmp_path / "out"), *more]
        assert main(words) == 2
        assert not (tmp_path / "out").exists()
        return " ".join(capsys.readouterr().err.split())

    assert "name Hugging Face's for this mT5 by --config" in message()
    assert "convert merge" in message("split", "--tp", "2")
    for changes, expected in (({"num_heads": 2}, "but 2 heads of 5 have 30 rows"), ({"d_ff": 50}, "50"),
                              ({"tie_word_embeddings": True}, "tie_word_embeddings false")):  # fmt: skip
        changed = transformers.MT5Config(**{**config.to_dict(), **changes})
        changed.save_pretrained(tmp_path / "wrong")
        if "tie_word_embeddings" in changes:  # transformers 5 writes true for every T5
            values = {**changed.to_dict(), "transformers_version": "4.40.0"}
            (tmp_path / "wrong" / "config.json").write_text(json.dumps(values))
        assert expected in message("merge", "--config", str(tmp_path / "wrong"))
    state["mt5_model.encoder.layers.0.adapter.weight"] = state["mt5_model.lm_head.weight"]
    (tmp_path / "model_final" / "model").unlink()
    (tmp_path / "model_final").rmdir()
    write_checkpoint(tmp_path / "model_final", state, "file")
    assert "LiBai's mT5 has no tensor" in message("merge", "--config", str(tmp_path / "config"))
