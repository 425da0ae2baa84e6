"""`from_pretrained`: every layout of files, any tensor-parallel size, old and awkward checkpoints, refusals."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
import transformers
from every_case import EVERY_CASE, by_turns
from parity import load_stored, randomize
from safetensors.torch import load_file, save_file

import shardzoo
import shardzoo.models
from shardzoo.checkpoint.manifest import Manifest, TensorRecord
from shardzoo.convert.operations import merge, split
from shardzoo.models import ParallelConfig, config_from_dict, family
from shardzoo.models.auto import build_on_meta
from shardzoo.models.mapping import collect_parameter_specs
from shardzoo.mpu import materialize

SIZES = {
    "gpt2": {"n_embd": 24, "n_head": 12, "n_layer": 2, "vocab_size": 101, "n_positions": 20},
    "t5": {
        "d_model": 24, "d_kv": 5, "num_heads": 12, "d_ff": 36, "vocab_size": 101, "num_layers": 2,
        "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
    "mt5": {"d_model": 24, "d_kv": 5, "num_heads": 12, "d_ff": 25, "vocab_size": 131, "num_layers": 1},
    "umt5": {"d_model": 24, "d_kv": 5, "num_heads": 12, "d_ff": 25, "vocab_size": 131, "num_layers": 2},
}  # fmt: skip
GPT2_PREFIX = "transformer."


def hf_model(model_type: str, *, tied: bool = False, **changes):
    config = transformers.AutoConfig.for_model(model_type, **SIZES[model_type], **changes)
    kind = (
        transformers.AutoModelForCausalLM
        if model_type == "gpt2"
        else transformers.AutoModelForSeq2SeqLM
    )
    model = kind.from_config(config).eval()
    if model_type not in ("gpt2", "umt5") and not tied:  # transformers calls every UMT5 tied
        model.lm_head.weight = torch.nn.Parameter(
            model.lm_head.weight.detach().clone()
        )  # v5 ties fresh models
    randomize(model, seed=11)
    return model


@pytest.fixture
def gpt2_folder(tmp_path):
    """A small GPT-2 as transformers writes it."""
    hf_model("gpt2").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change) -> None:
    """Saves the folder's tensors again after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def rewrite_config(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_as(layout: str, model, folder) -> None:
    """The model as one file or several, safetensors or pickled, new or old."""
    if layout.startswith("safetensors"):
        model.save_pretrained(folder, max_shard_size="5KB" if layout.endswith("sharded") else "1GB")
        return
    model.config.save_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.model_type == "gpt2":
        del state["lm_head.weight"]
    if layout == "bin sharded":
        names = sorted(state)
        files = {
            name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)
        }
        for file in set(files.values()):
            torch.save({name: state[name] for name in names if files[name] == file}, folder / file)
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": files})
        )
    else:
        new = layout != "bin of old torch"
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)


def expected_parameters(mesh, values: dict, stored: dict):
    """This rank's parameters, cut by `Shard` from the whole tensors."""
    model = materialize(build_on_meta(config_from_dict(values), mesh, ParallelConfig()), "cpu")
    load_stored(model, family(values["model_type"]).name_map, stored, mesh)
    return dict(model.named_parameters())


def check_loaded(mesh, cases):
    for folder, values, stored in cases:
        model = shardzoo.from_pretrained(folder, mesh)
        assert not model.training
        expected = expected_parameters(mesh, values, stored)
        found = dict(model.named_parameters())
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            assert torch.equal(parameter, expected[name]), f"{name} of {folder}"
            assert getattr(parameter, "shard", None) == getattr(expected[name], "shard", None)


LAYOUTS = ("safetensors", "safetensors sharded", "bin", "bin sharded", "bin of old torch")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every family in every layout: folder, configuration, the tensors."""
    cases = []
    for model_type in SIZES:
        model = hf_model(model_type)
        stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if model_type == "gpt2":
            del stored["lm_head.weight"]
        for layout in LAYOUTS:
            folder = tmp_path_factory.mktemp(f"{model_type}-{layout}".replace(" ", "-"))
            save_as(layout, model, folder)
            cases.append((folder, model.config.to_dict(), stored))
    assert len(list(cases[1][0].glob("*.safetensors"))) > 3
    return cases


@pytest.mark.parametrize("tp", by_turns([3, 1, 4, 2], 4))
def test_every_layout_of_files_for_any_number_of_ranks(tp, run_mesh, folders):
    run_mesh(tp, check_loaded, folders)


def check_native(mesh, folder, values, stored):
    check_loaded(mesh, [(folder, values, stored)])


def write_native(mesh, folder, values, stored):
    """What a training run of this mesh leaves behind."""
    tensors = {
        name: parameter.detach()
        for name, parameter in expected_parameters(mesh, values, stored).items()
    }
    save_file(tensors, folder / f"rank_{mesh.tp_rank:02d}.safetensors")
    config_from_dict(values).save(folder)


def write_manifest(folder, values):
    """For the rank files that are there."""
    ranks = [load_file(path) for path in sorted(folder.glob("rank_*.safetensors"))]
    config, records = config_from_dict(values), {}
    for name, spec in collect_parameter_specs(build_on_meta(config, None)).items():
        digests = [hashlib.sha256(rank[name].numpy().tobytes()).hexdigest() for rank in ranks]
        shard = spec.shard.to_record() if spec.shard else None
        records[name] = TensorRecord(spec.shape, "float32", shard, tuple(digests))
    padded = sum(len(rank["word_embeddings.weight"]) for rank in ranks)
    Manifest(config.model_type, len(ranks), config.vocab_size, padded, records).write(folder)


@pytest.mark.parametrize("model_type", SIZES)
def test_a_shardzoo_folder_loads_under_any_other_number_of_ranks(
    model_type, run_mesh, folders, tmp_path
):
    _, values, stored = next(case for case in folders if case[1]["model_type"] == model_type)
    for written in (1, 2, 3) if EVERY_CASE else (3,):
        folder = tmp_path / str(written)
        folder.mkdir()
        run_mesh(written, write_native, folder, values, stored)
        write_manifest(folder, values)
        for read in (1, 2, 4):
            run_mesh(read, check_native, folder, values, stored)
    tensors = load_file(folder / "rank_01.safetensors")
    moved = {
        f"not.{name}" if name.endswith("final_norm.weight") else name: value
        for name, value in tensors.items()
    }
    save_file(moved, folder / "rank_01.safetensors")
    with pytest.raises(
        ValueError, match=r"rank_01\.safetensors lacks tensor .*final_norm.weight of the manifest"
    ):
        shardzoo.from_pretrained(folder)


def test_types_are_kept_or_changed(gpt2_folder):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    fp32 = shardzoo.from_pretrained(gpt2_folder)
    assert {p.dtype for p in fp32.parameters()} == {torch.float32}
    rewrite(gpt2_folder, halve)
    kept, widened = (
        shardzoo.from_pretrained(gpt2_folder),
        shardzoo.from_pretrained(gpt2_folder, dtype=torch.float64),
    )
    for a, b, c in zip(fp32.parameters(), kept.parameters(), widened.parameters(), strict=True):
        assert (b.dtype, c.dtype) == (torch.bfloat16, torch.float64)
        assert torch.equal(a.bfloat16(), b)
        assert torch.equal(b.double(), c)


def test_old_gpt2_without_prefix_and_with_mask_buffers(gpt2_folder):
    new = shardzoo.from_pretrained(gpt2_folder)

    def age(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(GPT2_PREFIX)] = tensors.pop(name)
        for i in range(2):
            tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 20, 20, dtype=torch.uint8)
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)

    rewrite(gpt2_folder, age)
    old = shardzoo.from_pretrained(gpt2_folder)
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), old.parameters(), strict=True))


def test_a_tied_gpt2_that_stores_its_head_stays_tied_and_an_untied_one_untied(gpt2_folder):
    def store_head(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()

    rewrite(gpt2_folder, store_head)
    model = shardzoo.from_pretrained(gpt2_folder)
    assert model.head.weight is model.word_embeddings.weight
    assert model.config.tie_word_embeddings

    def move_head(tensors):
        tensors["lm_head.weight"][-1, -1] += 1

    rewrite(gpt2_folder, move_head)
    model = shardzoo.from_pretrained(gpt2_folder)
    assert not model.config.tie_word_embeddings
    assert (model.head.weight - model.word_embeddings.weight)[100, 23] == 1


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)], ids=["first", "last"])
def test_a_head_is_compared_to_its_last_stored_byte(place, tmp_path):
    """The tensors have more than 1 MiB: several blocks are read. One element differs, by less than bf16 shows."""
    sizes = {**SIZES["gpt2"], "vocab_size": 12_001}
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    embedding = reference.transformer.wte.weight.detach()
    assert embedding.nbytes > 1 << 20
    embedding[place] = 1.0
    reference.save_pretrained(tmp_path)

    def store_head(tensors):
        tensors["lm_head.weight"] = embedding.clone()

    rewrite(tmp_path, store_head)
    assert shardzoo.from_pretrained(tmp_path, dtype=torch.bfloat16).config.tie_word_embeddings

    def move_head(tensors):
        tensors["lm_head.weight"][place] += 2.0**-20

    rewrite(tmp_path, move_head)
    model = shardzoo.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(model.head.weight, model.word_embeddings.weight)
    assert not model.config.tie_word_embeddings
    assert model.head.weight is not model.word_embeddings.weight


def test_a_head_that_is_announced_and_missing_is_an_error(gpt2_folder):
    rewrite_config(gpt2_folder, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        shardzoo.from_pretrained(gpt2_folder)


def logits_of(model, seed: int = 0):
    ids = torch.randint(1, 101, (2, 11), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).logits[..., :101]


@pytest.mark.parametrize("claims_to_be_tied", [True, False])
def test_t5_v1_1_is_untied_whatever_its_saved_config_claims(claims_to_be_tied, tmp_path):
    reference = hf_model("t5")
    reference.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["tie_word_embeddings"] is True  # transformers 5 says so of every T5
    if not claims_to_be_tied:
        rewrite_config(tmp_path, tie_word_embeddings=False)
    model = shardzoo.from_pretrained(tmp_path)
    assert not model.config.tie_word_embeddings
    assert not model.config.scale_decoder_outputs
    torch.testing.assert_close(logits_of(model), logits_of(reference), rtol=1e-5, atol=1e-5)


def test_a_t5_of_the_time_before_the_second_flag(tmp_path):
    """transformers 4 wrote tie_word_embeddings: false and no scale_decoder_outputs for v1.1."""
    reference = hf_model("t5")
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["scale_decoder_outputs"]
    path.write_text(
        json.dumps(values | {"tie_word_embeddings": False, "transformers_version": "4.40.0"})
    )
    model = shardzoo.from_pretrained(tmp_path)
    assert not model.config.scale_decoder_outputs
    torch.testing.assert_close(logits_of(model), logits_of(reference), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_a_tied_t5_with_all_its_copies_and_the_stale_bias(version, tmp_path):
    changes = (
        {"feed_forward_proj": "relu", "tie_word_embeddings": True} if version == "v1.0" else {}
    )
    config = transformers.T5Config(**(SIZES["t5"] | changes))
    torch.manual_seed(0)
    reference = transformers.T5ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    scaled = version == "v1.0"
    assert shardzoo.from_pretrained(tmp_path).config.tie_word_embeddings

    def add_copies(tensors):
        for name in (
            "lm_head.weight",
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
        ):
            tensors[name] = tensors["shared.weight"].clone()
        stale = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        tensors[stale] = torch.randn(32, 12)

    rewrite(tmp_path, add_copies)
    model = shardzoo.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings
    assert model.config.scale_decoder_outputs is scaled
    assert model.head.weight is model.word_embeddings.weight
    torch.testing.assert_close(logits_of(model), logits_of(reference), rtol=1e-5, atol=1e-5)

    def keep_another_copy(tensors):
        del (
            tensors["shared.weight"],
            tensors["lm_head.weight"],
            tensors["encoder.embed_tokens.weight"],
        )

    rewrite(tmp_path, keep_another_copy)
    torch.testing.assert_close(
        logits_of(shardzoo.from_pretrained(tmp_path)), logits_of(reference), rtol=1e-5, atol=1e-5
    )


def copy_differs(mesh, folder):
    with pytest.raises(ValueError, match=r"\S") as error:
        shardzoo.from_pretrained(folder, mesh)
    return str(error.value)


def test_a_copy_that_differs_from_what_it_repeats_is_an_error_on_every_rank(tmp_path, run_mesh):
    hf_model("mt5").save_pretrained(tmp_path)

    def spoil(tensors):
        copy = tensors["shared.weight"].clone()
        copy[130, 3] += 1e-3  # a row of the second rank
        tensors["encoder.embed_tokens.weight"] = copy

    rewrite(tmp_path, spoil)
    first, second = run_mesh(2, copy_differs, tmp_path)
    assert "encoder.embed_tokens.weight" in second
    assert "word_embeddings.weight" in second
    assert "another rank" in first


@pytest.mark.parametrize("model_type", SIZES)
def test_missing_extra_and_misshaped_tensors_are_named(model_type, tmp_path):
    hf_model(model_type).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    victims = [names[0], names[len(names) // 2], names[-1]]
    for name in victims:
        others = {key: value for key, value in tensors.items() if key != name}
        save_file(others, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"\S") as error:
            shardzoo.from_pretrained(tmp_path)
        assert f"lacks {name}" in str(error.value)
        deeper = name.replace(".0.", ".7.")
        for extra in {f"{name}.more", deeper} - {name}:
            save_file(tensors | {extra: torch.zeros(3)}, tmp_path / "model.safetensors")
            with pytest.raises(ValueError, match=r"\S") as error:
                shardzoo.from_pretrained(tmp_path)
            assert f"has {extra}, which the model does not have" in str(error.value)
        wrong = tensors[name][..., :-1].contiguous()
        save_file(tensors | {name: wrong}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"\S") as error:
            shardzoo.from_pretrained(tmp_path)
        assert f"tensor {name} in {tmp_path}" in str(error.value)
        assert str(list(wrong.shape)) in str(error.value)


def test_another_vocabulary_is_misshaped_not_padded(gpt2_folder):
    rewrite_config(gpt2_folder, vocab_size=99)  # both are padded to the same width
    with pytest.raises(ValueError, match=r"wte\.weight .*shape \[101, 24\].*\[99, 24\]"):
        shardzoo.from_pretrained(gpt2_folder)


def test_integers_are_no_weights(gpt2_folder):
    rewrite(
        gpt2_folder,
        lambda tensors: tensors.update({"transformer.ln_f.bias": torch.ones(24, dtype=torch.int8)}),
    )
    with pytest.raises(ValueError, match=r"ln_f\.bias .*must have a floating-point type"):
        shardzoo.from_pretrained(gpt2_folder)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def damage(name: str, folder) -> str:
    """Does it, and returns what the error must say."""
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if name == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
        return "the file is truncated or wrong"
    if name == "no weights":
        file.unlink()
        return "has no weights"
    if name == "config":
        (folder / "config.json").write_text("{")
        return "config.json is not valid JSON"
    if name == "type":
        (folder / "config.json").write_text('{"model_type": "made-up"}')
        return "no model family 'made-up'"
    if name == "code":
        file.unlink()
        torch.save({"transformer.wte.weight": Evil()}, folder / "pytorch_model.bin")
        return "pytorch_model.bin is refused: besides tensors and plain values it holds a print"
    if name == "no pickle":
        file.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"garbage")
        return "pytorch_model.bin is not in a format of torch.save"
    tensors = load_file(file)
    where = {
        "index leaves the folder": "../model.safetensors",
        "index names no file": "nowhere.safetensors",
    }
    file.rename(folder / "part.safetensors")
    weight_map = dict.fromkeys(tensors, where.get(name, "part.safetensors"))
    if name == "index names no tensor":
        weight_map["transformer.h.9.ln_1.bias"] = "part.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return {
        "index leaves the folder": "'../model.safetensors'; a model's files must be in its own folder",
        "index names no file": "nowhere.safetensors: No such file",
        "index names no tensor": "tensor transformer.h.9.ln_1.bias is in part.safetensors, which does not have it",
    }[name]


@pytest.mark.parametrize(
    "name",
    ["truncated", "no weights", "config", "type", "code", "no pickle", "index leaves the folder",
     "index names no file", "index names no tensor"],
)  # fmt: skip
def test_damaged_folders_are_refused(name, gpt2_folder, capsys):
    message = damage(name, gpt2_folder)
    with pytest.raises(ValueError, match=r"\S") as error:
        shardzoo.from_pretrained(gpt2_folder)
    assert message in str(error.value)
    assert "executed" not in capsys.readouterr().out


def test_a_name_that_is_no_folder():
    with pytest.raises(ValueError, match="is not a folder"):
        shardzoo.from_pretrained("gpt2")


@pytest.fixture
def bert_folders(tmp_path):
    """A pretrained BERT without a classifier as transformers writes it, and as shards of two ranks."""
    from shardzoo.convert.operations import split

    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 36,
    }
    model = transformers.BertForPreTraining(transformers.BertConfig(vocab_size=61, **sizes))
    randomize(model, seed=3)
    model.save_pretrained(tmp_path / "hf")
    split(tmp_path / "hf", tmp_path / "shards", 2)
    return tmp_path / "hf", tmp_path / "shards"


def classify(mesh, folder, **options) -> dict:
    """The whole logits and the classifier of a model with a head of three classes."""
    config = shardzoo.models.find_config(str(folder)).with_changes(
        architecture="BertForSequenceClassification", num_labels=3
    )
    model = shardzoo.from_pretrained(folder, mesh, config=config, **options)
    with torch.no_grad():
        logits = model(torch.arange(6)[None] + 7).logits
    return {
        "logits": logits,
        "weight": model.classifier.weight.detach(),
        "bias": model.classifier.bias.detach(),
    }


def test_a_new_head_on_a_pretrained_body(bert_folders, run_mesh):
    hf, _ = bert_folders
    reference = transformers.BertForSequenceClassification.from_pretrained(hf, num_labels=3).eval()
    drawn = classify(None, hf, new=["classifier"])
    assert 0.01 < drawn["weight"].std() < 0.03
    with torch.no_grad():
        reference.classifier.weight.copy_(drawn["weight"])
        reference.classifier.bias.copy_(drawn["bias"])
        expected = reference(torch.arange(6)[None] + 7).logits
    torch.testing.assert_close(drawn["logits"], expected, rtol=1e-5, atol=1e-5)
    for folder in bert_folders:
        for ours in run_mesh(2, classify, folder, new=["classifier"]):
            torch.testing.assert_close(ours["logits"], expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(ours["weight"], drawn["weight"])
    assert not torch.equal(
        classify(None, hf, new=["classifier"], seed=5)["weight"], drawn["weight"]
    )


def test_a_head_is_new_only_where_it_is_said(bert_folders):
    for folder in bert_folders:
        with pytest.raises(ValueError, match=r"lacks.*classifier"):
            classify(None, folder)
        with pytest.raises(
            ValueError, match="new names the module 'head', which the model does not have; it has"
        ):
            classify(None, folder, new=["head"])


@pytest.mark.parametrize(("model_type", "stem"), [("t5", "T5"), ("umt5", "UMT5")])
def test_an_encoder_is_read_from_a_whole_model_and_from_a_file_of_diffusion_models(
    model_type, stem, tmp_path
):
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    reference = hf_model(model_type)
    reference.save_pretrained(whole)
    ids = torch.randint(2, 90, (2, 9))
    expected = reference.encoder(ids).last_hidden_state
    values = json.loads((whole / "config.json").read_text()) | {
        "architectures": [f"{stem}EncoderModel"]
    }
    model = shardzoo.from_pretrained(whole, config=values)
    assert not hasattr(model, "decoder")
    torch.testing.assert_close(model(ids).last_hidden_state, expected)

    alone.mkdir()
    tensors = {
        name: tensor
        for name, tensor in load_file(whole / "model.safetensors").items()
        if "encoder." in name
    }
    tensors["encoder.embed_tokens.weight"] = (
        reference.shared.weight.detach().clone()
    )  # and no shared.weight
    save_file(tensors, alone / "model.safetensors")
    if model_type == "umt5":
        del values["model_type"]  # as in the published files
    (alone / "config.json").write_text(json.dumps(values))
    split(alone, tmp_path / "split", 3)
    merge(tmp_path / "split", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == tensors.keys()
    assert all(torch.equal(merged[name], tensors[name]) for name in tensors)
    torch.testing.assert_close(
        shardzoo.from_pretrained(tmp_path / "split")(ids).last_hidden_state, expected
    )
