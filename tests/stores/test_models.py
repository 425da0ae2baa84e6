"""Models in object stores: converted, loaded and saved, with the bytes that are sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from object_stores import needs_s3

import shardzoo
from shardzoo.cli.main import main
from shardzoo.convert.operations import Options, merge, split
from shardzoo.files.object_store import (
    find_object,
    list_objects,
    read_object,
    remove_object,
    write_object,
)
from shardzoo.files.working_copies import INCOMPLETE, find_source, find_stand_in


def digests(url: str) -> dict[str, bytes]:
    return {name: read_object(f"{url}/{name}") for name in list_objects(url)}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def state_of(model) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def assert_equal(mine, other):
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        assert torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)), name


def test_conversions_give_the_bytes_that_they_give_on_a_disk(bucket, gpt2_folder, tmp_path):
    split(gpt2_folder, tmp_path / "split", 2)
    split(gpt2_folder, f"{bucket}/split", 2)
    assert digests(f"{bucket}/split") == files_of(tmp_path / "split")
    split(f"{bucket}/split", f"{bucket}/four", 4)
    merge(f"{bucket}/four", f"{bucket}/merged")
    merge(tmp_path / "split", tmp_path / "merged")
    assert digests(f"{bucket}/merged") == files_of(tmp_path / "merged")
    merge(f"{bucket}/four", tmp_path / "here")
    assert files_of(tmp_path / "here") == files_of(tmp_path / "merged")

    whole = state_of(shardzoo.from_pretrained(gpt2_folder))
    assert_equal(state_of(shardzoo.from_pretrained(f"{bucket}/four")), whole)
    assert_equal(state_of(shardzoo.from_pretrained(f"{bucket}/merged")), whole)


def test_columns_are_asked_for_many_rows_at_a_time(
    memory_bucket, gpt2_folder, tmp_path, monkeypatch
):
    from shardzoo.convert import copying
    from shardzoo.files import working_copies

    merge(gpt2_folder, f"{memory_bucket}/hf")
    split(gpt2_folder, tmp_path / "split", 2)
    asked: list[int] = []
    read_tile = copying._read_tile
    read_ranges = working_copies.read_ranges

    def read_narrow(tensor, descriptor, rows, columns, block_bytes):
        # Eight rows fit into a block.
        width = tensor.nbytes // tensor.shape[0]
        return read_tile(tensor, descriptor, rows, columns, 8 * width)

    def count(url, ranges):
        asked.append(len(ranges))
        return read_ranges(url, ranges)

    monkeypatch.setattr(copying, "_read_tile", read_narrow)
    monkeypatch.setattr(working_copies, "read_ranges", count)
    split(f"{memory_bucket}/hf", f"{memory_bucket}/split", 2, Options(jobs=1))
    assert digests(f"{memory_bucket}/split") == files_of(tmp_path / "split")
    assert asked
    assert max(asked) == 1  # Rows with short gaps between them are one range.


def test_a_saved_model_is_loaded(memory_bucket, gpt2_folder, tmp_path):
    model = shardzoo.from_pretrained(gpt2_folder)
    url = f"{memory_bucket}/saved"
    write_object(f"{url}/notes.md", b"mine")
    model.save_pretrained(url, max_shard_size=50_000)
    model.save_pretrained(tmp_path / "saved", max_shard_size=50_000)
    assert digests(url) == {**files_of(tmp_path / "saved"), "notes.md": b"mine"}
    assert_equal(state_of(shardzoo.from_pretrained(url)), state_of(model))
    model.save_pretrained(url)  # one file in the place of several
    assert "model.safetensors" in list_objects(url)
    assert "model.safetensors.index.json" not in list_objects(url)
    assert_equal(state_of(shardzoo.from_pretrained(url)), state_of(model))


def test_a_folder_is_read_only_when_it_is_complete(memory_bucket, gpt2_folder):
    url = f"{memory_bucket}/split"
    split(gpt2_folder, url, 2)
    assert INCOMPLETE not in list_objects(url)
    write_object(f"{url}/{INCOMPLETE}", b"")
    with pytest.raises(ValueError, match=f"{url} is not complete"):
        shardzoo.from_pretrained(url)
    remove_object(f"{url}/{INCOMPLETE}")
    remove_object(f"{url}/manifest.json")
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        shardzoo.from_pretrained(url)


def test_a_destination_is_replaced_only_on_request(memory_bucket, gpt2_folder, zoo, tmp_path):
    url = f"{memory_bucket}/split"
    split(gpt2_folder, url, 4)
    before = digests(url)
    with pytest.raises(ValueError, match=f"{url} exists; replace it with --overwrite"):
        split(gpt2_folder, url, 2)
    with pytest.raises(ValueError, match="must be two folders"):
        split(url, url, 2, Options(overwrite=True))
    assert digests(url) == before
    split(gpt2_folder, url, 2, Options(overwrite=True))
    assert {name for name in digests(url) if name.startswith("rank")} == {
        "rank_00.safetensors",
        "rank_01.safetensors",
    }
    write_object(f"{memory_bucket}/other/file", b"")
    with pytest.raises(ValueError, match="holds no model, so it is not replaced"):
        split(gpt2_folder, f"{memory_bucket}/other", 2, Options(overwrite=True))


def test_what_another_machine_left_is_replaced(memory_bucket, gpt2_folder):
    url = f"{memory_bucket}/split"
    write_object(f"{url}/{INCOMPLETE}", b"")
    write_object(f"{url}/rank_07.safetensors", b"a part")
    split(gpt2_folder, url, 2)
    assert "rank_07.safetensors" not in list_objects(url)
    shardzoo.from_pretrained(url)


def test_what_comes_meanwhile_is_kept(memory_bucket, gpt2_folder, monkeypatch):
    from shardzoo.models import saving

    url = f"{memory_bucket}/saved"
    model = shardzoo.from_pretrained(gpt2_folder)
    replace_weights = saving._replace_weights

    def come_meanwhile(*arguments):
        replace_weights(*arguments)
        write_object(f"{url}/notes.md", b"")

    monkeypatch.setattr(saving, "_replace_weights", come_meanwhile)
    model.save_pretrained(url)
    assert "notes.md" in list_objects(url)


def test_a_source_that_changes_is_refused(memory_bucket, gpt2_folder, monkeypatch):
    url = f"{memory_bucket}/hf"
    merge(gpt2_folder, url)
    from shardzoo.files import working_copies

    read = working_copies.read_range

    def replace_after_reading(address, start, stop):
        data = read(address, start, stop)
        if start > 8 and address.endswith(".safetensors"):
            write_object(address, read_object(address))
        return data

    monkeypatch.setattr(working_copies, "read_range", replace_after_reading)
    with pytest.raises(ValueError, match=r"model\.safetensors changed while it was being read"):
        split(url, f"{memory_bucket}/split", 2)
    assert list_objects(f"{memory_bucket}/split") == {}


def test_a_model_that_is_replaced_meanwhile_does_not_count_as_damaged(
    memory_bucket, gpt2_folder, monkeypatch
):
    url = f"{memory_bucket}/split"
    split(gpt2_folder, url, 2)
    from shardzoo.files import working_copies

    read = working_copies.read_range

    def replace_before_reading(address, start, stop):
        if start > 8 and address.endswith("rank_01.safetensors"):
            content = bytearray(read_object(address))
            content[-1] ^= 1
            write_object(address, bytes(content))
        return read(address, start, stop)

    monkeypatch.setattr(working_copies, "read_range", replace_before_reading)
    with pytest.raises(ValueError, match=r"rank_01\.safetensors changed while it was being read"):
        shardzoo.from_pretrained(url)


def test_a_damaged_object_is_refused(memory_bucket, gpt2_folder):
    url = f"{memory_bucket}/split"
    split(gpt2_folder, url, 2)
    content = bytearray(read_object(f"{url}/rank_01.safetensors"))
    content[-1] ^= 1
    write_object(f"{url}/rank_01.safetensors", bytes(content))
    with pytest.raises(ValueError, match=f"{url}/rank_01.safetensors is damaged"):
        shardzoo.from_pretrained(url)


def test_stand_ins_hold_nothing_that_another_reader_would_take(memory_bucket, gpt2_folder):
    from safetensors import SafetensorError, safe_open

    merge(gpt2_folder, f"{memory_bucket}/hf")
    folder = find_source(f"{memory_bucket}/hf")
    stand_in = folder / "model.safetensors"
    assert find_stand_in(stand_in) is not None
    shardzoo.from_pretrained(f"{memory_bucket}/hf")
    assert not any(stand_in.read_bytes())
    with pytest.raises(SafetensorError):
        safe_open(stand_in, "pt").__enter__()
    # A file that is written in its place is read as it is.
    stand_in.write_bytes(b"other")
    assert find_stand_in(stand_in) is None


def test_local_copies_follow_the_store(memory_bucket, gpt2_folder):
    url = f"{memory_bucket}/split"
    split(gpt2_folder, url, 4)
    shardzoo.from_pretrained(url)
    split(gpt2_folder, url, 2, Options(overwrite=True))
    folder = find_source(url)
    assert not (folder / "rank_03.safetensors").exists()
    shardzoo.from_pretrained(url)


def test_commands_take_urls(memory_bucket, gpt2_folder, capsys):
    url = f"{memory_bucket}/split"
    assert main(["convert", "split", str(gpt2_folder), url, "--tp", "2"]) == 0
    assert url in capsys.readouterr().out
    assert main(["convert", "verify", url, str(gpt2_folder)]) == 0
    assert main(["convert", "inspect", url]) == 0
    assert main(["convert", "merge", url, f"{memory_bucket}/hf"]) == 0
    assert main(["convert", "diff", f"{memory_bucket}/hf", str(gpt2_folder)]) == 0
    capsys.readouterr()
    assert main(["convert", "split", str(gpt2_folder), url, "--tp", "2"]) == 2
    assert f"error: {url} exists; replace it with --overwrite" in capsys.readouterr().err
    assert main(["convert", "verify", f"{memory_bucket}/none"]) == 2
    assert f"there is nothing at {memory_bucket}/none" in capsys.readouterr().err


@pytest.mark.before_release
@needs_s3
@pytest.mark.parametrize("source", ["shards", "huggingface"])
def test_a_rank_is_sent_its_part(source, s3, s3_bucket, zoo, tmp_path, run_mesh):
    sizes = {"heads": 8, "head_size": 32, "feed_forward": 512}
    folder = zoo.make(tmp_path / "hf", "llama", layers=2, vocabulary=2048, **sizes)
    url = f"{s3_bucket}/model"
    if source == "shards":
        split(folder, url, 4)
    else:
        merge(folder, url)
    whole = list_objects(url)
    weights = sum(entry.size for name, entry in whole.items() if name.endswith(".safetensors"))
    s3.sent.clear()
    run_mesh(4, load, url)
    share = s3.total(".safetensors") / 4 / weights
    print(f"{source}: a rank of four is sent {share:.1%} of {weights:,} bytes")
    assert share <= 0.3


def load(mesh, url: str):
    model = shardzoo.from_pretrained(url, mesh)
    return sum(parameter.numel() for parameter in model.parameters())


@needs_s3
def test_failures_of_a_store_are_one_line(s3, s3_bucket, gpt2_folder, monkeypatch, capsys):
    url = f"{s3_bucket}/split"
    assert main(["convert", "split", str(gpt2_folder), "s3://no-such-bucket/x", "--tp", "2"]) == 2
    assert "The specified bucket does not exist" in capsys.readouterr().err
    assert main(["convert", "split", str(gpt2_folder), url, "--tp", "2"]) == 0

    s3.refuse = lambda method, path: method == "PUT" and path.endswith("rank_01.safetensors")
    arguments = ["convert", "split", str(gpt2_folder), f"{url}-2", "--tp", "2"]
    capsys.readouterr()
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "rank_01.safetensors: the store refuses access" in message
    assert "continue with --resume" in message
    assert message.count("\n") == 1
    with pytest.raises(ValueError, match="is not complete"):
        shardzoo.from_pretrained(f"{url}-2")
    s3.refuse = lambda method, path: False
    assert main([*arguments, "--resume"]) == 0
    assert digests(f"{url}-2") == digests(url)
    assert find_object(f"{url}-2/{INCOMPLETE}") is None
