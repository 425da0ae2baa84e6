"""The subcommands as a user runs them: what they print, and their exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from every_case import every_day
from safetensors.torch import load_file, save_file

from shardzoo.cli.convert import main
from shardzoo.convert.operations import split


@pytest.fixture
def run(capsys):
    """`run(*arguments)`: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def test_plan_shows_everything_and_writes_nothing(run, gpt2_folder, file_tree):
    before = file_tree(gpt2_folder.parent)
    code, text, _ = run("plan", gpt2_folder, "--tp", 4)
    assert code == 0
    assert "blocks.1.attention.qkv.weight" in text
    assert "dim 0 in blocks 16+16+16" in text
    assert "101, padded to 256" in text
    assert "unequal" not in text
    assert (
        "dim 0 in blocks 16+16+16, unequal parts" in run("plan", gpt2_folder, "--tp", 3)[1]
    )  # four heads
    planned = json.loads(run("plan", gpt2_folder, "--tp", 4, "--json")[1])
    rows = {row["name"]: row for row in planned["tensors"]}
    assert rows["blocks.0.mlp.down.weight"]["shape_per_rank"] == [16, 6]
    assert rows["blocks.0.mlp.down.weight"]["bytes_per_rank"] == 4 * 16 * 6
    assert rows["blocks.0.mlp.down.weight"]["stored"] == ["transformer.h.0.mlp.c_proj.weight"]
    assert planned["parameters"] == sum(
        tensor.numel() for tensor in load_file(gpt2_folder / "model.safetensors").values()
    )
    assert file_tree(gpt2_folder.parent) == before


def test_plan_tells_exactly_what_is_written(run, gpt2_folder, tmp_path):
    planned = json.loads(run("plan", gpt2_folder, "--tp", 2, "--json")[1])
    split(gpt2_folder, tmp_path / "two", 2)
    assert planned["bytes_to_write"] == sum(
        path.stat().st_size for path in (tmp_path / "two").glob("*.safetensors")
    )


def test_plan_of_a_merge(run, gpt2_shards):
    code, text, _ = run("plan", gpt2_shards)
    assert code == 0
    assert "Hugging Face folder" in text


def test_the_whole_way(run, gpt2_folder, tmp_path, hashes):
    code, text, _ = run("split", gpt2_folder, tmp_path / "two", "--tp", 2, "--jobs", 1)
    assert code == 0
    assert "28 tensors, " in text
    assert ", for 2 ranks, in " in text
    assert run("reshard", tmp_path / "two", tmp_path / "four", "--tp", 4)[0] == 0
    code, text, _ = run("merge", tmp_path / "four", tmp_path / "merged", "--json")
    outcome = json.loads(text)
    assert code == 0
    assert outcome["tensors"] == 28
    assert outcome["kept"] == 0
    assert hashes(tmp_path / "merged") == hashes(gpt2_folder)


def test_underscores_do_too(run, gpt2_folder, tmp_path):
    assert run("merge", gpt2_folder, tmp_path / "merged", "--max_file_gb", 0.00001)[0] == 0
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2


def test_a_merge_into_several_files_loads_with_transformers(
    run, gpt2_folder, gpt2_shards, tmp_path
):
    from transformers import GPT2LMHeadModel

    run("merge", gpt2_shards, tmp_path / "merged", "--max-file-gb", 0.00001)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(
        tensor.numel() for tensor in load_file(gpt2_folder / "model.safetensors").values()
    )
    model, report = GPT2LMHeadModel.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    original = load_file(gpt2_folder / "model.safetensors")["transformer.h.1.mlp.c_fc.weight"]
    assert torch.equal(
        model.transformer.h[1].mlp.c_fc.weight.view(torch.int32), original.view(torch.int32)
    )


def test_resharding_a_hugging_face_folder_is_refused(run, gpt2_folder, tmp_path):
    code, _, message = run("reshard", gpt2_folder, tmp_path / "four")
    assert code == 2
    assert "use `split`" in message


def test_verify_one_folder(run, gpt2_shards, tmp_path):
    assert run("verify", gpt2_shards)[0] == 0
    damaged = tmp_path / "damaged"
    shutil.copytree(gpt2_shards, damaged)
    content = bytearray((damaged / "rank_01.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "rank_01.safetensors").write_bytes(content)
    code, text, _ = run("verify", damaged)
    assert code == 1
    assert "rank_01.safetensors is damaged" in text


def test_verify_a_folder_that_records_no_digests(run, gpt2_folder, gpt2_shards):
    """Nothing is called equal that was compared with nothing."""
    code, text, _ = run("verify", gpt2_folder)
    assert (code, "all equal" in text) == (0, False)
    assert "no digests recorded: nothing was compared; name a second folder" in text
    assert "all equal" in run("verify", gpt2_shards)[1]


def test_verify_two_folders(run, gpt2_folder, gpt2_shards, zoo, tmp_path):
    assert run("verify", gpt2_shards, gpt2_folder)[0] == 0
    other = zoo.make(tmp_path / "other", "gpt2")
    tensors = load_file(other / "model.safetensors")
    tensors["transformer.h.1.attn.c_proj.weight"].view(torch.int32)[3, 5] ^= 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    code, text, _ = run("verify", gpt2_shards, other)
    assert code == 1
    assert f"transformer.h.1.attn.c_proj.weight in {other}/model.safetensors differs" in text
    assert "1 differences" in text

    # A model without the second block and with a position less.
    config = json.loads((other / "config.json").read_text())
    config |= {"n_layer": 1, "n_positions": config["n_positions"] - 1}
    (other / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in tensors.items() if ".h.1." not in name}
    kept["transformer.wpe.weight"] = kept["transformer.wpe.weight"][:-1].clone()
    save_file(kept, other / "model.safetensors", metadata={"format": "pt"})
    for pair in ((gpt2_shards, other), (other, gpt2_shards)):
        code, text, _ = run("verify", *pair)
        assert code == 1
        assert f"blocks.1.mlp.down.bias is only in {gpt2_shards}" in text
        assert ".weight has shape (" in text


@pytest.mark.parametrize("variant", ["gpt2", "bert", "t5-v1.1", "mt5-tied", "glm"])
def test_verify_the_round_trip(variant, run, zoo, tmp_path):
    source = zoo.make(tmp_path / "hf", variant)
    code, text, _ = run("verify", source, "--round-trip")
    assert (code, "all equal" in text) == (0, True)
    split(source, tmp_path / "two", 2)
    assert run("verify", tmp_path / "two", "--round-trip")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "two"]


def test_one_check_at_a_time(run, gpt2_folder):
    assert run("verify", gpt2_folder, "--round-trip", "--logits")[0] == 2


def test_inspect(run, gpt2_shards):
    code, text, _ = run("inspect", gpt2_shards)
    assert code == 0
    assert "shardzoo folder of 2 ranks" in text
    assert "101, padded to 128" in text
    found = json.loads(run("inspect", gpt2_shards, "--json")[1])
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows["word_embeddings.weight"] == {
        "name": "word_embeddings.weight",
        "dtype": "F32",
        "shape": [64, 16],
        "bytes": 4096,
        "split": "dim 0 of [101, 16]",
    }
    assert rows["final_norm.bias"]["split"] == "replicated"
    code, _, error = run("inspect", gpt2_shards / "rank_00.safetensors")
    assert (code, "rank_00.safetensors is a file: name the folder" in error) == (2, True)


def test_diff(run, gpt2_folder, gpt2_shards, zoo, tmp_path):
    assert run("diff", gpt2_folder, gpt2_folder)[0] == 0
    assert run("diff", gpt2_folder, gpt2_shards)[0] == 0  # of different formats
    other = zoo.make(tmp_path / "other", "gpt2")
    tensors = load_file(other / "model.safetensors")
    name = "transformer.ln_f.weight"
    tensors[name] = torch.zeros(16)
    save_file(tensors, other / "model.safetensors")
    second = zoo.make(tmp_path / "second", "gpt2")
    tensors[name] = torch.arange(16.0)
    del tensors["transformer.ln_f.bias"]
    save_file(tensors, second / "model.safetensors")
    code, text, _ = run("diff", other, second)
    assert code == 1
    assert "transformer.ln_f.weight: values differ in 15 elements, by up to 15" in text
    assert "transformer.ln_f.bias: only in the first" in text
    assert "2 of 28 tensors differ" in text


def test_diff_of_shards_reads_no_tensor_whose_hash_is_recorded(run, gpt2_shards, monkeypatch):
    from shardzoo.convert import inspection as difference

    monkeypatch.setattr(difference, "read_into", None)
    assert run("diff", gpt2_shards, gpt2_shards)[0] == 0


LIGHT = """
import sys
from shardzoo.cli.main import main
code = main({arguments!r})
heavy = sorted(set(sys.modules) & {{"torch", "transformers", "deepspeed"}})
print("HEAVY", *heavy, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("command", every_day(["inspect", "plan"], more=["diff"]))
def test_what_is_imported(command, gpt2_folder):
    """`inspect` and `diff` need no torch, and no command that converts needs transformers or deepspeed."""
    arguments = [
        "convert",
        command,
        str(gpt2_folder),
        *([str(gpt2_folder)] if command == "diff" else []),
    ]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(arguments=arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.split("HEAVY")[1].split() == (["torch"] if command == "plan" else [])


@pytest.mark.parametrize("arguments", [["explode"], ["split"], ["split", "a", "b", "--tp", "two"]])
def test_a_wrong_command_line(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
