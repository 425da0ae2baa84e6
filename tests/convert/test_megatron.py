"""Megatron-LM's folders, in and out, against files that are made after its sources."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import megatron_files
import pytest
import torch
import torch.nn.functional as F
from every_case import by_turns
from megatron_files import Layout, bert_modules, gpt_modules, write, write_layers
from safetensors.torch import load_file
from tiny_models import hf_model, save_model

from shardzoo.checkpoint.safetensors_header import read_header
from shardzoo.cli.convert import main
from shardzoo.convert.operations import Options, merge, split
from shardzoo.models import from_pretrained
from shardzoo.models.auto import find_megatron_map

GPT = {"n_layer": 4, "n_embd": 24, "n_head": 4, "n_inner": 40, "n_positions": 40}
BERT = {"num_hidden_layers": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Folders of transformers with large weights, and odd sizes where the family allows them."""
    place = tmp_path_factory.mktemp("hf")
    made = {
        "gpt": save_model(place / "gpt", "GPT2LMHeadModel", "gpt2", seed=1, **GPT),
        "untied": save_model(
            place / "untied", "GPT2LMHeadModel", "gpt2", seed=2, tie_word_embeddings=False, **GPT
        ),
        "bert": save_model(place / "bert", "BertForPreTraining", "bert", seed=3, **BERT),
        "masked": save_model(place / "masked", "BertForMaskedLM", "bert", seed=4, **BERT),
    }
    assert "lm_head.weight" in load_file(made["untied"] / "model.safetensors")
    return made


def modules(folder: Path) -> dict:
    weights = load_file(folder / "model.safetensors")
    return (
        gpt_modules if any(name.startswith("transformer.") for name in weights) else bert_modules
    )(weights, 4, 4)


def true_config(folder: Path, place: Path) -> Options:
    """Without config.json, the padding of the vocabulary belongs to it."""
    place.write_text((folder / "config.json").read_text())
    return Options(config_file=place)


LAYOUTS = [
    *(Layout(tp, pp, version, "local") for tp in (1, 2, 4) for pp in (1, 2) for version in (None, 1.0, 3.0)),
    Layout(1, 1, 0, "oldest"), Layout(2, 2, 1.0, "oldest"), Layout(2, 4, 2.0, "legacy"), Layout(4, 1, 3.0, "legacy"),
    Layout(2, 2, 3.0, "te"), Layout(2, 2, 3.0, "local", chunks=2), Layout(1, 2, 2.0, "legacy", chunks=2),
]  # fmt: skip


@pytest.mark.parametrize("layout", by_turns(LAYOUTS, 3), ids=str)
def test_gpt_of_every_layout_becomes_the_original_bytes(layout, folders, hashes, tmp_path):
    source = write(tmp_path / "megatron", modules(folders["gpt"]), layout)
    merge(source, tmp_path / "hf", true_config(folders["gpt"], tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(folders["gpt"])


@pytest.mark.parametrize(
    "layout", [Layout(2, 2, 3.0, "legacy"), Layout(4, 1, 0, "oldest"), Layout(1, 2, 1.0, "legacy")]
)
@pytest.mark.parametrize("name", ["untied", "bert", "masked"])
def test_other_models(name, layout, folders, hashes, tmp_path):
    source = write(tmp_path / "megatron", modules(folders[name]), layout)
    merge(source, tmp_path / "hf", true_config(folders[name], tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(folders[name])


@pytest.mark.parametrize("program", ["deepspeed", "neox"])
@pytest.mark.parametrize(
    ("name", "layout"), [("gpt", Layout(1)), ("gpt", Layout(4, 2)), ("untied", Layout(2))]
)
def test_files_of_layers(name, layout, program, folders, hashes, tmp_path, capsys):
    source = write_layers(tmp_path / "layers", modules(folders[name]), layout, program)
    assert main(["inspect", str(source)]) == 0
    printed = capsys.readouterr().out
    assert {"deepspeed": "Megatron-DeepSpeed", "neox": "GPT-NeoX"}[program] in printed
    assert "gpt2" in printed
    merge(source, tmp_path / "hf", true_config(folders[name], tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(folders[name])


@pytest.mark.parametrize("name", ["gpt", "untied", "bert", "masked"])
@pytest.mark.parametrize(
    ("tp", "pp", "style"),
    by_turns([(1, 1, "local"), (2, 2, "local"), (4, 1, "legacy"), (2, 4, "legacy")], 2),
)
def test_written_files_hold_what_megatron_would(
    tp, pp, style, name, folders, hashes, tmp_path, monkeypatch
):
    """Padding rows are zeros here and garbage there; all else has the same bytes, names and nesting."""
    monkeypatch.setattr(megatron_files, "PADDING", 128)
    style = "legacy" if name in ("bert", "masked") else style
    split(folders[name], tmp_path / "out", tp, style="megatron", stages=pp, names=style)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    wanted = dict(megatron_files.states(modules(folders[name]), Layout(tp, pp, 3.0, style)))
    found = {path.name: path for path in (tmp_path / "out" / "release").iterdir()}
    assert found.keys() == wanted.keys()
    vocabulary = len(modules(folders[name])["words"])
    for rank, state in wanted.items():
        with torch.serialization.safe_globals([Namespace]):
            mine = torch.load(found[rank] / "model_optim_rng.pt", weights_only=True)
        assert mine["checkpoint_version"] == 3.0
        assert vars(mine["args"]).items() >= {
            "padded_vocab_size": 128 * tp * -(-vocabulary // (128 * tp)), "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp, "num_layers": 4, "num_attention_heads": 4,
        }.items()  # fmt: skip
        same_trees(mine["model"], state["model"], vocabulary, int(rank[8:10]), tp)
    merge(tmp_path / "out", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(folders[name])
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (folders[name] / "config.json").read_text()
    )


def same_trees(mine, wanted, vocabulary, rank, tp) -> None:
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if isinstance(tensor, dict):
            same_trees(mine[name], tensor, vocabulary, rank, tp)
        else:
            if (
                "word_embeddings" in name
                or "output_layer" in name
                or (name in ("weight", "bias") and len(tensor) % 128 == 0)
            ):
                rows = max(0, vocabulary - rank * len(tensor))
                assert not mine[name][rows:].any()
                tensor = torch.cat([tensor[:rows], torch.zeros_like(tensor[rows:])])
            assert torch.equal(mine[name], tensor), name


def test_logits_are_those_of_transformers(folders, tmp_path):
    """Read by from_pretrained, without a conversion; padding of the vocabulary has logits of its own."""
    source = write(tmp_path / "megatron", modules(folders["gpt"]), Layout(2, 2, 1.0, "legacy"))
    mine = from_pretrained(source)
    theirs = hf_model("GPT2LMHeadModel", 0.0, vocab_size=mine.config.vocab_size, **GPT).eval()
    theirs = type(theirs).from_pretrained(folders["gpt"]).eval()
    ids = torch.randint(100, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = theirs(ids).logits
        found = mine(ids).logits[..., : wanted.shape[-1]]
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert mine.config.vocab_size == 16 * 2 * -(-theirs.config.vocab_size // 32)


def legacy_bert(model: dict, ids: torch.Tensor, heads: int) -> torch.Tensor:
    """The logits of Megatron-LM's legacy/model/bert_model.py with --apply-residual-connection-post-layernorm."""
    language, head = model["language_model"], model["lm_head"]
    layers, size = language["encoder"], language["embedding"]["word_embeddings"]["weight"].shape[1]

    def linear(x, name):
        return F.linear(x, layers[f"{name}.weight"], layers[f"{name}.bias"])

    def norm(x, name, where=layers):
        return F.layer_norm(x, (size,), where[f"{name}.weight"], where[f"{name}.bias"], 1e-12)

    tables = {name: table["weight"] for name, table in language["embedding"].items()}
    x = (
        tables["word_embeddings"][ids]
        + tables["position_embeddings"][: ids.shape[1]]
        + tables["tokentype_embeddings"][0]
    )
    for i in range(4):
        x = norm(x, f"layers.{i}.input_layernorm")
        fused = linear(x, f"layers.{i}.self_attention.query_key_value").unflatten(
            -1, (heads, 3, size // heads)
        )
        q, k, v = (t.transpose(1, 2) for t in fused.unbind(3))  # [B, N, S, D]
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + linear(mixed, f"layers.{i}.self_attention.dense")
        x = norm(x, f"layers.{i}.post_attention_layernorm")
        x = x + linear(
            F.gelu(linear(x, f"layers.{i}.mlp.dense_h_to_4h")), f"layers.{i}.mlp.dense_4h_to_h"
        )
    x = norm(x, "final_layernorm")
    x = norm(F.gelu(F.linear(x, head["dense.weight"], head["dense.bias"])), "layernorm", head)
    return F.linear(x, tables["word_embeddings"], head["bias"])


def test_bert_is_the_model_of_megatrons_source(folders, tmp_path):
    import transformers

    split(folders["bert"], tmp_path / "out", 1, style="megatron")
    with torch.serialization.safe_globals([Namespace]):
        state = torch.load(
            tmp_path / "out" / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=True
        )
    ids = torch.randint(5, 300, (2, 17), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForPreTraining.from_pretrained(folders["bert"]).eval()
    with torch.no_grad():
        wanted = model(ids).prediction_logits
        found = legacy_bert(state["model"], ids, 4)[..., : wanted.shape[-1]]
    assert wanted.abs().max() > 0.5
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_its_arguments_tell(folders, tmp_path):
    arguments = {
        "openai_gelu": False,
        "hidden_dropout": 0.25,
        "attention_dropout": 0,
        "norm_epsilon": 1e-6,
    }
    source = write(tmp_path / "megatron", modules(folders["gpt"]), Layout(2, arguments=arguments))
    merge(source, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["n_layer"], config["n_head"], config["n_inner"], config["n_positions"]) == (
        4,
        4,
        40,
        40,
    )
    assert (config["resid_pdrop"], config["attn_pdrop"], config["layer_norm_epsilon"]) == (
        0.25,
        0.0,
        1e-6,
    )
    assert config["activation_function"] == "gelu"


def test_the_folder_of_an_iteration_and_the_distributed_optimizer(folders, hashes, tmp_path):
    source = write(tmp_path / "megatron", modules(folders["gpt"]), Layout(2)) / "iter_0000500"
    for rank in source.iterdir():
        (rank / "model_optim_rng.pt").rename(rank / "model_rng.pt")
        (rank / "distrib_optim.pt").write_bytes(b"not read")
    merge(source, tmp_path / "hf", true_config(folders["gpt"], tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(folders["gpt"])


def test_from_shards_with_digests(folders, hashes, tmp_path):
    """A rank's rows are read in another order than that of their bytes, so their digest is checked before."""
    split(folders["gpt"], tmp_path / "shards", 4)
    split(tmp_path / "shards", tmp_path / "megatron", 2, style="megatron", stages=2)
    merge(tmp_path / "megatron", tmp_path / "hf")
    assert hashes(tmp_path / "hf") == hashes(folders["gpt"])
    path = tmp_path / "shards" / "rank_01.safetensors"
    stored = {tensor.name: tensor for tensor in read_header(path)[0]}[
        "blocks.2.attention.qkv.weight"
    ]
    with path.open("r+b") as file:
        file.seek(stored.offset + 1)
        file.write(b"\xff\xfe")
    with pytest.raises(
        ValueError,
        match=r"blocks.2.attention.qkv.weight in .*rank_01.safetensors is damaged: its sha256",
    ):
        split(tmp_path / "shards", tmp_path / "again", 2, style="megatron")


def test_commands(folders, tmp_path, capsys):
    source = write(tmp_path / "megatron", modules(folders["bert"]), Layout(2, 2, 1.0, "legacy"))
    assert main(["inspect", str(source)]) == 0
    printed = capsys.readouterr().out
    assert "Megatron-LM checkpoint, 2 x 2" in printed
    assert "bert" in printed
    assert "interleaved" in printed
    assert main(["verify", str(source)]) == 0
    assert (
        main(["reshard", str(source), str(tmp_path / "four"), "--tp", "4", "--to", "megatron"]) == 0
    )
    assert main(["verify", str(source), str(tmp_path / "four")]) == 0
    assert main(["diff", str(source), str(tmp_path / "four")]) == 0
    assert main(["verify", str(source), "--round-trip"]) == 0
    other = write(tmp_path / "other", modules(folders["bert"]), Layout(2, 2, 3.0, "legacy"))
    assert main(["diff", str(source), str(other)]) == 0  # another order of the same rows


@pytest.mark.parametrize(("changes", "message"), [
    ({"scale_attn_by_inverse_layer_idx": True}, "does not scale attention"), ({"activation_function": "relu"}, "GELU"),
])  # fmt: skip
def test_models_that_megatron_does_not_have(changes, message, folders, tmp_path):
    shutil.copytree(folders["gpt"], tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        split(tmp_path / "hf", tmp_path / "out", 2, style="megatron")


def test_families_and_layouts_that_megatron_does_not_have(zoo, folders, tmp_path):
    t5 = zoo.make(tmp_path / "t5", "t5")
    with pytest.raises(ValueError, match="has an unscaled head, but this model multiplies"):
        split(t5, tmp_path / "out", 2, style="megatron")
    with pytest.raises(ValueError, match="not that of BertForSequenceClassification"):
        split(
            zoo.make(tmp_path / "c", "bert-classification"), tmp_path / "out", 2, style="megatron"
        )
    with pytest.raises(ValueError, match=r"4 layers .* 3 pipeline stages; use one of \[1, 2, 4\]"):
        split(folders["gpt"], tmp_path / "out", 2, style="megatron", stages=3)
    with pytest.raises(ValueError, match="no tensors of the style transformer_engine; use legacy"):
        split(folders["bert"], tmp_path / "out", 2, style="megatron", names="transformer_engine")
    with pytest.raises(ValueError, match="for Megatron-LM only"):
        split(folders["gpt"], tmp_path / "out", 2, stages=2)


def test_a_t5_is_refused_by_the_argument_that_tells_it():
    names = ["decoder.layers.0.cross_attention.linear_q.weight"]
    with pytest.raises(ValueError, match="position_embedding_type is 'learned_absolute' or 'rope'"):
        find_megatron_map(names, {})


def test_a_torn_copy_resumes(folders, hashes, tmp_path):
    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        split(folders["gpt"], tmp_path / "out", 2, report=stop, style="megatron", stages=2)
    outcome = split(
        folders["gpt"], tmp_path / "out", 2, Options(resume=True), style="megatron", stages=2
    )
    assert 0 < outcome.kept <= outcome.nbytes
    again = split(
        folders["gpt"], tmp_path / "out", 2, Options(resume=True), style="megatron", stages=2
    )
    assert again.kept == again.nbytes
    merge(tmp_path / "out", tmp_path / "hf")
    assert hashes(tmp_path / "hf") == hashes(folders["gpt"])
