"""Wrong layouts, and missing or damaged experts, are refused in one line before anything starts."""

from __future__ import annotations

import json
from shutil import copytree

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import save_model

import shardzoo
from shardzoo.cli import convert, finetune, generate, pretrain
from shardzoo.convert import split

EXPERTS = {  # architecture -> a matrix of its last expert
    "MixtralForCausalLM": "model.layers.1.block_sparse_moe.experts.4.w2.weight",
    "SwitchTransformersForConditionalGeneration": (
        "encoder.block.1.layer.1.mlp.experts.expert_4.wi.weight"
    ),
}


def read_refusal(main, arguments: list[str], capsys) -> str:
    """The one line with which a command refuses arguments."""
    capsys.readouterr()
    assert main(arguments) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def lose(tensors: dict, name: str) -> None:
    del tensors[name]


def cut(tensors: dict, name: str) -> None:
    tensors[name] = tensors[name][:, :-1].contiguous()


def add(tensors: dict, name: str) -> None:
    tensors[name.replace("4", "5")] = tensors[name].clone()


DAMAGES = {lose: "lacks", cut: "shape", add: "which the model does not have"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of transformers, by architecture."""
    root = tmp_path_factory.mktemp("mixtures")
    tokenizers = dict(zip(EXPERTS, ("gpt2", "t5"), strict=True))
    return {name: save_model(root / name, name, tokenizers[name]) for name in EXPERTS}


@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_that_are_missing_or_damaged_are_refused(architecture, folders, tmp_path, capsys):
    folder = folders[architecture]
    weights = folder / "model.safetensors"
    original = weights.read_bytes()
    name = EXPERTS[architecture]
    try:
        for damage, message in DAMAGES.items():
            tensors = load_file(weights)
            damage(tensors, name)
            save_file(tensors, weights, {"format": "pt"})
            with pytest.raises(ValueError, match=message) as caught:
                shardzoo.from_pretrained(folder)
            assert "\n" not in str(caught.value)
            capsys.readouterr()
            assert convert.main(["split", str(folder), str(tmp_path / "two"), "--tp", "2"]) == 2
            [line] = capsys.readouterr().err.strip().splitlines()
            assert message in line
            weights.write_bytes(original)
    finally:
        weights.write_bytes(original)


def refuse_to_start(*_, **__):
    pytest.fail("processes were started")


def test_commands_refuse_damaged_experts_before_they_start_processes(
    folders, tmp_path, capsys, monkeypatch
):
    """Each with as many processes as no process group of this one has."""
    from shardzoo.trainer.launch import launch

    monkeypatch.setattr(launch, "start_processes", refuse_to_start)
    name = "MixtralForCausalLM"
    folder = copytree(folders[name], tmp_path / "damaged")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    lose(tensors, EXPERTS[name])
    save_file(tensors, weights, {"format": "pt"})
    (tmp_path / "text.txt").write_text("one two three\n" * 50)
    (tmp_path / "labels.jsonl").write_text('{"s": "one", "l": "a"}\n{"s": "two", "l": "b"}\n')
    run = ["--output-dir", str(tmp_path / "run")]
    labels = ["--train-file", str(tmp_path / "labels.jsonl"), "--task", "text-classification"]
    commands = [
        (generate, ["--model", str(folder), "--prompt", "one", "--ep", "2"]),
        (generate, ["--model", str(folder), "--prompt", "one", "--tp", "3"]),
        (pretrain, ["--init-from", str(folder), "--data", str(tmp_path / "text.txt"), *run, "--ep", "2"]),
        (finetune, ["--model", str(folder), *labels, *run, "--tp", "2"]),
    ]  # fmt: skip
    for command, arguments in commands:
        assert f"the checkpoint lacks {EXPERTS[name]}" in read_refusal(
            command.main, arguments, capsys
        )
    assert not (tmp_path / "run").exists()


def test_a_flipped_bit_in_the_shard_of_an_expert_is_refused(folders, tmp_path):
    split(folders["MixtralForCausalLM"], tmp_path / "two", 2)
    path = tmp_path / "two" / "rank_01.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start, _ = header["blocks.1.mlp.experts.down"]["data_offsets"]
    data[8 + length + start + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.experts\.down") as caught:
        shardzoo.from_pretrained(tmp_path / "two")
    assert "\n" not in str(caught.value)


def test_wrong_layouts_are_refused_before_anything_starts(folders, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three\n" * 50)
    data = ["--data", str(tmp_path / "text.txt"), "--save-dir", str(tmp_path / "run")]
    layout = ["--ep", "9", "--tp", "2", "--dry-run"]
    message = "8 experts of MixtralForCausalLM cannot be dealt over 9 expert-parallel ranks"
    arguments = ["--model", "mixtral-quickstart", *layout, *data]
    assert message in read_refusal(pretrain.main, arguments, capsys)
    assert not (tmp_path / "run").exists()
    gpt2 = save_model(tmp_path / "gpt2", "GPT2LMHeadModel", "gpt2")
    mixtral = folders["MixtralForCausalLM"]
    for folder, message in (
        (mixtral, "5 experts of MixtralForCausalLM cannot be dealt over 6"),
        (gpt2, "GPT2LMHeadModel has no experts to deal over 6 expert-parallel ranks"),
    ):
        arguments = ["--model", str(folder), "--prompt", "one", "--ep", "6"]
        assert message in read_refusal(generate.main, arguments, capsys)
