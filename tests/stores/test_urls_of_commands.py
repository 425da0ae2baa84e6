"""Every path that a command takes, as a URL: it is read, or one line says what works."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from object_stores import needs_s3

from shardzoo.cli.completion import list_pages
from shardzoo.cli.main import main
from shardzoo.convert.operations import Options, merge, split
from shardzoo.files.object_store import find_url, list_objects, read_object, write_object
from shardzoo.files.working_copies import name_urls

# What else names a file or folder: arguments whose values may be names of other things, too.
TEXTS = {
    "adapter", "cache_dir", "data", "deepspeed_config", "hostfile", "init_from", "load_dir", "model",
    "model_name_or_path", "output_dir", "reference_model", "save_dir", "teacher_model", "tensorboard_dir", "test_file",
    "tokenizer", "train_file", "training_script", "validation_file", "experiment_name",
}  # fmt: skip
# Arguments of a page that are no paths there, or that no test of this file needs to look at.
OTHERS = {
    ("pretrain", "model"): "a preset's name",
    ("pretrain", "save_dir"): "see output_dir",
    ("finetune", "save_dir"): "refused: see output_dir",
    ("pretrain", "training_script"): "of scripts of other programs",
    ("finetune", "training_script"): "of scripts of other programs",
}
WRITTEN = "a URL is written: see the tests of the command"
SOURCE = {
    "config": "{command} MODEL NEW --config URL",
    "adapter": "{command} MODEL NEW --adapter URL",
}
CONVERTED = {"source": "{command} URL NEW", "destination": WRITTEN, **SOURCE}
TRAINED = {
    "config": "{command} --config URL",
    "hostfile": "{command} WORDS --hostfile URL",
    "deepspeed_config": "{command} WORDS --env-type deepspeed --deepspeed-config URL",
    "tensorboard_dir": "{command} WORDS --tensorboard-dir URL",
    "experiment_name": "{command} WORDS --experiment-name URL",
    "teacher_model": "{command} WORDS --teacher-model URL",
    "load_dir": WRITTEN,
    "output_dir": WRITTEN,
}
FINETUNED = "--model MODEL --task text2text-generation --max-source-length 8 --max-target-length 8"
ARGUMENTS = {
    "board": {"runs": "{command} URL"},
    "bench kernels": {"json": "{command} --json URL", "plot": "{command} --plot URL"},
    "checkpoint verify": {"folder": "{command} URL"},
    "convert plan": {"source": "{command} URL", "config": "{command} MODEL --config URL"},
    "convert split": CONVERTED,
    "convert merge": CONVERTED,
    "convert reshard": CONVERTED,
    "convert upcycle": {
        "source": "{command} URL NEW", "destination": WRITTEN, "config": "{command} MODEL NEW --config URL",
    },
    "convert verify": {
        "first": "{command} URL", "second": "{command} MODEL URL", "config": "{command} MODEL --config URL",
    },
    "convert inspect": {"folder": "{command} URL", "config": "{command} MODEL --config URL"},
    "convert diff": {
        "first": "{command} URL MODEL", "second": "{command} MODEL URL", "config": "{command} MODEL MODEL --config URL",
    },
    "data prepare": {
        "config": "{command} --config URL",
        "input": "{command} --input URL --tokenizer MODEL --output NEW",
        "tokenizer": "{command} --input TEXT --tokenizer URL --output NEW",
        "output": WRITTEN,
    },
    "data merge": {
        "config": "{command} --config URL", "inputs": "{command} URL URL --output NEW", "output": WRITTEN,
    },
    "data inspect": {
        "config": "{command} --config URL",
        "prefix": "{command} URL",
        "tokenizer": "{command} PAIR --tokenizer URL",
    },
    "data split": {
        "config": "{command} --config URL",
        "prefix": "{command} URL --output NEW --shares 0.5 0.5 0",
        "output": WRITTEN,
    },
    "data train-tokenizer": {
        "config": "{command} --config URL", "input": "{command} --input URL --output NEW", "output": WRITTEN,
    },
    "estimate": {
        "config": "{command} MODEL --config URL",
        "model": "{command} URL",
        "teacher_model": "{command} MODEL --sequence-length 8 --teacher-model URL",
    },
    "generate": {
        "adapter": "{command} --model MODEL --prompt a --adapter URL",
        "config": "{command} --model MODEL --prompt a --config URL",
        "file": "{command} --model MODEL --file URL",
        "model": "{command} --model URL --prompt a",
        "tokenizer": "{command} --model MODEL --prompt a --tokenizer URL",
    },
    "plan": {
        "model": "{command} URL",
        "calibrate": "{command} MODEL --calibrate URL",
        "write": "{command} MODEL --write URL",
    },
    "pretrain": {
        **{name: words.replace("WORDS", "--model gpt2-quickstart") for name, words in TRAINED.items()},
        "adapter": "{command} --init-from MODEL --adapter URL",
        "data": "{command} --model gpt2-quickstart --dry-run --data URL",
        "init_from": "{command} --init-from URL",
        "tokenizer": "{command} --model gpt2-quickstart --data TEXT --tokenizer URL",
    },
    "finetune": {
        **{name: words.replace("WORDS", f"{FINETUNED} --train-file TEXT") for name, words in TRAINED.items()},
        "adapter": f"{{command}} {FINETUNED} --train-file TEXT --adapter URL",
        "cache_dir": f"{{command}} {FINETUNED} --train-file TEXT --cache-dir URL",
        "model_name_or_path": "{command} --model URL --task text2text-generation --train-file TEXT",
        "reference_model": "{command} --model MODEL --task preference --max-source-length 8 --max-target-length 8 "
        "--train-file PAIRS --reference-model URL",
        "train_file": f"{{command}} {FINETUNED} --train-file URL",
        "validation_file": f"{{command}} {FINETUNED} --train-file TEXT --validation-file URL",
        "test_file": f"{{command}} {FINETUNED} --train-file TEXT --test-file URL",
    },
}  # fmt: skip
LOCAL = {"cache_dir", "calibrate", "json", "plot", "tensorboard_dir", "write"}
CASES = [
    (command, name)
    for command, own in ARGUMENTS.items()
    for name, words in own.items()
    if words != WRITTEN
]


def find_path_arguments() -> dict[str, set[str]]:
    """The names of all arguments of all commands that name files or folders."""
    found: dict[str, set[str]] = {}
    for command, pages in list_pages().items():
        for page, own in pages.items():
            hints = get_type_hints(own.arguments)
            program = f"{command} {page}".strip()
            names = {
                field.name
                for field in fields(own.arguments)
                if "Path" in str(hints[field.name]) or field.name in TEXTS
            }
            names -= {name for other, name in OTHERS if other == program}
            if names:
                found[program] = names
    return found


def test_every_path_of_every_command_is_here():
    assert find_path_arguments() == {name: set(own) for name, own in ARGUMENTS.items()}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with a model, a text, pairs of texts and an indexed pair."""
    from tiny_models import save_model

    folder = tmp_path_factory.mktemp("workplace")
    save_model(folder / "MODEL", "GPT2LMHeadModel", "gpt2")
    (folder / "TEXT").with_suffix(".jsonl").write_text(
        "".join(f'{{"text": "words {i}", "source": "a {i}", "target": "b"}}\n' for i in range(9))
    )
    (folder / "PAIRS.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 9)
    words = ["--input", "TEXT.jsonl", "--tokenizer", "MODEL", "--output", "PAIR"]
    words[1::2] = [str(folder / name) for name in words[1::2]]
    assert main(["data", "prepare", *words]) == 0
    return folder


@pytest.mark.parametrize(("command", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_url_of_nothing_is_one_line(command, name, memory_bucket, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    before = {path.name for path in workplace.iterdir()}
    url = f"{memory_bucket}/nothing"
    words = ARGUMENTS[command][name].format(command=command)
    words = words.replace("TEXT", "TEXT.jsonl").replace("PAIRS", "PAIRS.jsonl")
    try:
        code = main(shlex.split(words.replace("URL", url)))
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr().err
    assert code == 2, shown
    [line] = shown.splitlines()
    assert line.startswith("error: ")
    assert url in line
    if name in LOCAL:
        assert "must be a path on this machine" in line
    # A folder for runs is made before all that a run reads is opened.
    assert {path.name for path in workplace.iterdir()} <= {*before, "runs"}


def test_a_store_without_a_bucket_is_no_folder(tmp_path, monkeypatch, capsys, workplace):
    monkeypatch.chdir(tmp_path)
    for name in ("memory://", "s3://", "s3:/", "s3:"):
        with pytest.raises(ValueError, match="names no bucket or folder; write"):
            find_url(Path(name))
        assert main(["convert", "split", str(workplace / "MODEL"), name]) == 2
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    assert name_urls("a (memory:/b/c), b/s3:/d, s3:/e") == "a (memory://b/c), b/s3:/d, s3://e"


FORMATS = {
    "legacy": lambda source, place: split(source, place, 2, style="legacy"),
    "megatron": lambda source, place: split(source, place, 2, style="megatron"),
    "dcp": lambda source, place: merge(source, place, style="dcp"),
    "torch_dist": lambda source, place: merge(source, place, style="torch_dist"),
}


@pytest.mark.parametrize("format_name", FORMATS)
def test_folders_of_other_programs_are_written_and_read(
    format_name, bucket, gpt2_folder, hashes, tmp_path
):
    """Also of torch.distributed.checkpoint, whose index has the name of a hidden file."""
    write = FORMATS[format_name]
    write(gpt2_folder, tmp_path / "here")
    write(gpt2_folder, f"{bucket}/there")
    local = {
        path.relative_to(tmp_path / "here").as_posix(): path.read_bytes()
        for path in (tmp_path / "here").rglob("*")
        if path.is_file()
    }
    assert list_objects(f"{bucket}/there").keys() == local.keys()
    for name, content in local.items():
        write_object(f"{bucket}/copied/{name}", content)
    for folder in ("there", "copied"):
        merge(f"{bucket}/{folder}", tmp_path / folder, Options())
        assert hashes(tmp_path / folder) == hashes(gpt2_folder)


def test_a_mixture_of_a_stored_model_is_stored(memory_bucket, zoo, tmp_path):
    from shardzoo.convert.upcycling import upcycle

    folder = zoo.make(tmp_path / "hf", "llama")
    merge(folder, f"{memory_bucket}/hf")
    upcycle(folder, tmp_path / "mixture", 4, 2)
    upcycle(f"{memory_bucket}/hf", f"{memory_bucket}/mixture", 4, 2)
    for path in (tmp_path / "mixture").iterdir():
        assert read_object(f"{memory_bucket}/mixture/{path.name}") == path.read_bytes()


def test_a_stored_model_makes_the_round_trip(memory_bucket, gpt2_folder, capsys):
    merge(gpt2_folder, f"{memory_bucket}/hf")
    before = list_objects(f"{memory_bucket}/hf")
    assert main(["convert", "verify", f"{memory_bucket}/hf", "--round-trip"]) == 0
    assert "all equal" in capsys.readouterr().out
    assert list_objects(f"{memory_bucket}/hf") == before


@needs_s3
@pytest.mark.before_release
def test_stored_models_have_the_logits_of_transformers(s3_bucket, workplace, capsys):
    merge(workplace / "MODEL", f"{s3_bucket}/hf")
    split(workplace / "MODEL", f"{s3_bucket}/split", 2)
    for name in ("hf", "split"):
        assert main(["convert", "verify", f"{s3_bucket}/{name}", "--logits"]) == 0
        assert "largest difference of native TP=2 from transformers'" in capsys.readouterr().out


def test_transformers_trains_a_stored_model(
    memory_bucket, workplace, monkeypatch, tmp_path, capsys
):
    """It reads whole files, of which the zoo reads ranges."""
    monkeypatch.chdir(tmp_path)
    merge(workplace / "MODEL", f"{memory_bucket}/hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write_object(f"{memory_bucket}/hf/{name}", (workplace / "MODEL" / name).read_bytes())
    losses = []
    for model in (workplace / "MODEL", f"{memory_bucket}/hf"):
        words = f"finetune --model {model} --task text2text-generation --train-file {workplace / 'TEXT.jsonl'} "
        words += "--source-id source --target-id target --max-source-length 8 --max-target-length 8 --no-native "
        words += f"--train-steps 2 --micro-batch-size 2 --output-dir {tmp_path / str(len(losses))}"
        assert main(shlex.split(words)) == 0
        text = (tmp_path / str(len(losses)) / "metrics.jsonl").read_text()
        losses.append([json.loads(line).get("train/loss") for line in text.splitlines()])
    assert losses[0] == losses[1]
    assert losses[0][0] is not None
    capsys.readouterr()
