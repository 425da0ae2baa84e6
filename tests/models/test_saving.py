"""Models in memory are written as the Hugging Face folders that they were loaded from, by any layout of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from parity import randomize
from safetensors.torch import load_file
from tiny_models import hf_model, save_glm, tokenizer_like

from shardzoo.models import from_pretrained, saving
from shardzoo.models.lora import add_lora, lora_config

# Uneven heads and widths, Conv1D's transposed matrices, stacked tensors, tied and untied heads, two stacks.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 40, "n_head": 5, "n_inner": 43}),
    "llama": ("LlamaForCausalLM", {"intermediate_size": 43, "tie_word_embeddings": False}),
    "bert": ("BertForPreTraining", {}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 203}),
    "bart": ("BartForConditionalGeneration", {}),
}
LAYOUTS = {
    "one": (1, {}),
    "three": (3, {}),
    "stages": (2, {"pipeline": 2}),
    "replicas": (1, {"data": 2}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            architecture, changes = CASES[case]
            model = hf_model(architecture, 0.0, **changes)
            randomize(model, 1)
            made[case] = tmp_path_factory.mktemp(case) / "hf"
            model.to(torch.bfloat16 if case == "bart" else torch.float32).save_pretrained(
                made[case]
            )
        return made[case]

    return make


def save(mesh: Any, source: Path, folder: Path, **options: Any) -> None:
    from_pretrained(source, mesh).save_pretrained(folder, **options)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_same_weights(folder: Path, source: Path) -> None:
    mine, wanted = all_tensors(folder), all_tensors(source)
    wanted.pop("final_logits_bias", None)  # a buffer of zeros, which is no parameter
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_every_layout_writes_the_same_folder(case, layout, run_mesh, folders, tmp_path):
    size, axes = LAYOUTS[layout]
    run_mesh(size, save, folders(case), tmp_path / "saved", max_shard_size=20_000, **axes)
    assert_same_weights(tmp_path / "saved", folders(case))
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(all_tensors(tmp_path / "saved"))
    assert not list(tmp_path.rglob("*partial*"))
    stored = {
        path: json.loads((path / "config.json").read_text())["dtype"]
        for path in (tmp_path / "saved", folders(case))
    }
    assert len(set(stored.values())) == 1


def save_in_small_blocks(mesh: Any, source: Path, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "BLOCK_BYTES", 400)  # bytes
        save(mesh, source, folder)


@pytest.mark.parametrize("layout", ["one", "three"])
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_tensors_of_several_blocks(case, layout, run_mesh, folders, tmp_path):
    """Parameters are copied from the device in blocks; three ranks split some by rows and others by columns."""
    size, axes = LAYOUTS[layout]
    run_mesh(size, save_in_small_blocks, folders(case), tmp_path / "saved", **axes)
    assert_same_weights(tmp_path / "saved", folders(case))
    stored = all_tensors(folders(case)).values()
    assert sum(tensor.nbytes > 3 * size * 400 for tensor in stored) > 4


def test_transformers_loads_it(folders, tmp_path):
    from transformers import AutoModelForCausalLM

    save(None, folders("llama"), tmp_path / "saved")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    reference = AutoModelForCausalLM.from_pretrained(folders("llama"))
    assert not any(report.values())
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(ids).logits, reference(ids).logits)
    card = (tmp_path / "saved" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- shardzoo\n- llama\n---\n")
    assert f"| parameters | {sum(p.numel() for p in reference.parameters()):,} |" in card
    assert "LlamaForCausalLM.from_pretrained" in card


def test_glm_keeps_its_own_names(tmp_path, run_mesh):
    (tmp_path / "source").mkdir()
    tokenizer_like("bert").save_pretrained(tmp_path / "source")
    source = save_glm(tmp_path / "source", "bert")
    run_mesh(2, save, source, tmp_path / "saved")
    assert_same_weights(tmp_path / "saved", source)
    assert "library_name: shardzoo" in (tmp_path / "saved" / "README.md").read_text()


def test_old_weights_are_replaced_and_other_files_stay(folders, tmp_path):
    folder = tmp_path / "saved"
    save(None, folders("gpt2"), folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("mine")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    save(None, folders("bert"), folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (folder / "README.md").read_text() == "mine"
    assert_same_weights(folder, folders("bert"))


def save_where_others_fail(mesh: Any, source: Path, folder: Path) -> str:
    model = from_pretrained(source, mesh)
    if mesh.rank == 1:
        saving.tensor_bytes = full_disk
    try:
        model.save_pretrained(folder)
    except ValueError as error:
        return str(error)
    return ""


def full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_rank_that_fails_fails_all_and_nothing_loads(run_mesh, folders, tmp_path):
    found = run_mesh(2, save_where_others_fail, folders("llama"), tmp_path / "saved", isolated=True)
    assert found[0] == "another rank could not write its part of the model"
    assert "No space left on device" in found[1]
    assert not list((tmp_path / "saved").iterdir())
    with pytest.raises(ValueError, match=r"config\.json|no |not "):
        from_pretrained(tmp_path / "saved")
    save(None, folders("llama"), tmp_path / "saved")
    assert_same_weights(tmp_path / "saved", folders("llama"))


def test_lora_weights_are_written_as_an_adapter(folders, tmp_path):
    model = from_pretrained(folders("llama"))
    add_lora(model, lora_config(r=3, target_modules=["q_proj", "o_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    reference = hf_model("LlamaForCausalLM", 0.0, **CASES["llama"][1])
    peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()


@pytest.mark.parametrize("size", ["", "5 TB", 0, -1, 2.5])
def test_wrong_sizes(size, folders, tmp_path):
    with pytest.raises(
        ValueError, match="max_shard_size must be a number of bytes or a text such as '5GB'"
    ):
        save(None, folders("bert"), tmp_path / "saved", max_shard_size=size)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("name", ["manifest.json", "trainer_state.json"])
def test_shards_are_not_mixed_with_it(name, folders, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"holds shards or a training checkpoint \\({name}\\)"):
        save(None, folders("bert"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def push_nowhere(mesh: Any, source: Path, folder: Path) -> str:
    try:
        from_pretrained(source, mesh).push_to_hub("me/tiny", working_directory=folder / "missing")
    except ValueError as error:
        return str(error)
    return ""


def test_a_push_without_its_working_directory_fails_on_every_rank(run_mesh, folders, tmp_path):
    found = run_mesh(2, push_nowhere, folders("bert"), tmp_path)
    assert "No such file or directory" in found[0]
    assert found[1] == "another rank could not write its part of the model"


def test_only_weights_under_hugging_faces_names_are_deleted(folders, tmp_path):
    kept = [
        "model_ema.safetensors", "model-best.safetensors", "model-1-of-2.safetensors", "pytorch_model_ema.bin",
        "pytorch_model.bin.old", "notes.txt", "adapter_model.safetensors", "adapter_model.bin",
        "adapter_config.json",
    ]  # fmt: skip
    old = [
        "model.safetensors.index.json", "model-00001-of-00002.safetensors", "pytorch_model.bin",
        "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json",
    ]  # fmt: skip
    for name in (*kept, *old):
        (tmp_path / name).write_text("mine")
    from_pretrained(folders("gpt2")).save_pretrained(tmp_path)
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    assert [name for name in old if (tmp_path / name).exists()] == []
