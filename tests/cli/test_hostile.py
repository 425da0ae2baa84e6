"""Hostile and damaged inputs at the commands: each ends in one line on stderr and exit code 2, quickly.

`make test-all` visits all commands with all files; every day a part of them.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
from every_case import EVERY_CASE, by_turns
from safetensors.torch import save_file

from shardzoo.cli.main import main

DEEP = 5000
ALIASES = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
FILES = {
    "nul": b"lr: 1\0\n",
    "nested": b"a: " + b"[" * DEEP + b"]" * DEEP,
    "nested maps": b"{a: " * DEEP + b"1" + b"}" * DEEP,
    "nested known": b"lr: " + b"[" * DEEP + b"]" * DEEP,
    "nested block": "".join(" " * i + "a:\n" for i in range(1500)).encode(),
    "bomb": ALIASES.encode(),
    "bomb in lr": ALIASES.replace("a11:", "lr:").encode(),
    "recursive": b"lr: &a [*a]\n",
    "recursive map": b"&a lr: {b: *a}\n",
    "tag": b"lr: !!python/object/apply:os.system ['touch owned']\n",
    "utf8": b"lr: \xff\xfe\xfd\n",
    "tab": b"lr:\n\t- 1\n",
    "list": b"- 1\n- 2\n",
    "number": b"7\n",
    "text": b"hello\n",
    "dup": b"lr: 1\nlr: 2\n",
    "date": b"lr: 2020-01-01\n",
    "inf": b"lr: .inf\n",
    "nan": b"lr: .nan\n",
    "hugeint": b"seed: " + b"9" * 5000 + b"\n",
    "unhashable": b"? [1, 2]\n: 3\n",
    "mapkey": b"? {a: b}\n: 3\n",
    "multi": b"lr: 1\n---\nlr: 2\n",
    "control": b"lr: \x01\x1b[2J\n",
    "escaped": b'"\\e[2Jlr": 3\n',
    "escaped value": b'lr: "\\e[31mred"\n',
    "nullkey": b"~: 3\n",
    "intkey": b"3: 3\n",
    "bom16": "lr: 1\nx: 2".encode("utf-16"),
    "unclosed": b"lr: [1, 2\n",
    "alias": b"lr: *nope\n",
    "neg": b"micro_batch_size: -1\n",
    "float batch": b"micro_batch_size: 1.5\n",
    "boolstr": b"resume: maybe\n",
    "merge": b"<<: 3\n",
    "bigline": b"lr: " + b"x" * 20_000_000,
    "set": b"lr: !!set {a, b}\n",
    "binary": b"lr: !!binary aGVsbG8=\n",
    "omap": b"lr: !!omap [a: 1]\n",
    "octal": b"seed: 0o8\n",
    "wrong date": b"lr: 2020-13-45\n",
    "float overflow": b"lr: 1e999\n",
    "surrogate": b'lr: "\\ud800"\n',
    "newline in key": b'"lr\\nx": 1\n',
    "percent": b"%YAML 9.9\n---\nlr: 1\n",
    "directive": b"%FOO\n",
    "question": b"?",
    "colon": b":",
    "dash": b"-",
    "backtick": b"lr: `x`\n",
    "at": b"lr: @x\n",
    "value tag": b"lr: !foo 3\n",
    "float tag": b"lr: !!float x\n",
    "int tag": b"seed: !!int ''\n",
    "bool tag": b"resume: !!bool x\n",
    "timestamp tag": b"lr: !!timestamp x\n",
}

COMMANDS = {
    "pretrain": ["pretrain", "--output-dir", "out", "--train-steps", "1"],
    "finetune": ["finetune", "--model-name-or-path", "none"],
    "generate": ["generate", "--model", "none", "--prompt", "x"],
}
EVERY_DAY = {
    "pretrain": list(FILES)[::3],
    "finetune": list(FILES)[1::9],
    "generate": list(FILES)[2::9],
}
CASES = [(c, name) for c in COMMANDS for name in (FILES if EVERY_CASE else EVERY_DAY[c])]

HOSTFILES = {
    "option of ssh": b"-oProxyCommand=touch${IFS}owned slots=1\n",
    "option behind a user": b"a@-oProxyCommand=touch${IFS}owned slots=1\n",
    "shell": b"$(touch${IFS}owned) slots=1\n",
    "shell in a zone": b"fe80::1%$(touch${IFS}owned) slots=1\n",
    "pdsh's module": b"exec:touch slots=1\n",
    "nul": b"a\0b slots=1\n",
    "space": b"a b slots=1\n",
    "tabs": b"a\t\tb slots=1\n",
    "escape": b"a\x1b[2J slots=1\n",
    "escape alone": b"\x1b[2J\xe2\x80\xae\n",
    "utf8": b"\xff\xfe slots=1\n",
    "utf16": "a slots=1\n".encode("utf-16"),
    "twice": b"a slots=1\na slots=1\n",
    "0 slots": b"a slots=0\n",
    "-1 slots": b"a slots=-1\n",
    "1e9 slots": b"a slots=1e9\n",
    "many slots": b"a slots=999999999\n",
    "digits": b"a slots=" + b"9" * 5000 + b"\n",
    "arabic slots": "a slots=\u0663\n".encode(),
    "fraction": b"a slots=1.5\n",
    "no slots": b"a\n",
    "two slots": b"a slots=1 slots=2\n",
    "empty": b"",
    "comments": b"# none\n",
    "long": b"a" * 1_000_000 + b"\n",
    "long name": b"-" + b"a" * 1_000_000 + b" slots=1\n",
}
LAUNCHES = {  # accepted with an empty output folder and a good hostfile
    "pretrain": ["pretrain", "--output-dir", "out", "--train-steps", "1", "--data", "text.txt", "--dry-run"],
    "finetune": [
        "finetune", "--model-name-or-path", "none", "--train-file", "text.txt", "--output-dir", "out", "--dry-run"
    ],
}  # fmt: skip


def refused(capsys, *words: str) -> str:
    """The one line with which a command ends."""
    started = time.monotonic()
    try:
        code = main(list(words))
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    assert code == 2, shown.err
    lines = [line for line in shown.err.splitlines() if line.strip()]
    assert len(lines) == 1, shown.err
    assert len(lines[0]) < 1500
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]|Traceback", shown.err + shown.out)
    assert time.monotonic() - started < 20
    return lines[0]


def accepted(*arguments: object) -> None:
    raise AssertionError("the arguments are accepted")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_hostile_file_of_arguments(tmp_path, monkeypatch, capsys, command, name):
    monkeypatch.chdir(tmp_path)
    Path("arguments.yaml").write_bytes(FILES[name])
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("shardzoo.cli.pretrain.choose_inputs", accepted)
    refused(capsys, *COMMANDS[command], "--config", "arguments.yaml")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_are_read_from_regular_files_alone(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    for name in ("pipe", "/dev/zero", "/dev/null", "loop", ".", "missing", "a\0b", "x" * 300):
        assert "--config" in refused(capsys, *COMMANDS[command], "--config", name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", by_turns(LAUNCHES, 2))
def test_a_hostile_hostfile(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("w1 w2 w3 w4\n" * 50)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    before = sorted([*tmp_path.rglob("*"), tmp_path / "hosts"])
    for name, content in HOSTFILES.items():
        Path("hosts").write_bytes(content)
        said = refused(capsys, *LAUNCHES[command], "--hostfile", "hosts", "--num-nodes", "1")
        assert "hosts" in said, name
        assert sorted(tmp_path.rglob("*")) == before, name
    for path in (
        "pipe",
        "/dev/zero",
        "/dev/null",
        "loop",
        ".",
        "missing",
        "a\0b",
        "x" * 300,
        "a\x1b[2J",
    ):
        refused(capsys, *LAUNCHES[command], "--hostfile", path)
        assert sorted(tmp_path.rglob("*")) == before, path


def test_a_tensor_cannot_control_the_terminal(tmp_path, capsys):
    name = "\x1b]0;owned\x07\x1b[2J\u202ebias"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        '{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}'
    )
    save_file({name: torch.ones(2)}, model / "model.safetensors")
    said = refused(capsys, "convert", "split", str(model), str(tmp_path / "out"), "--tp", "2")
    assert r"\x1b[2J" in said
    main(["convert", "inspect", str(model)])
    shown = capsys.readouterr()
    assert not set("\x1b\x07\u202e") & set(shown.out + shown.err)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["empty", "link out", "fifo"])
def test_a_run_resumes_with_its_own_arguments_alone(tmp_path, capsys, kind):
    run, outside = tmp_path / "run", tmp_path / "outside.yaml"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    outside.write_text("lr: 1\n")
    path = run / "arguments.yaml"
    {
        "empty": path.touch,
        "link out": lambda: path.symlink_to(outside),
        "fifo": lambda: os.mkfifo(path),
    }[kind]()
    before = sorted(tmp_path.rglob("*"))
    assert "arguments.yaml" in refused(capsys, "pretrain", "--resume", "--output-dir", str(run))
    assert sorted(tmp_path.rglob("*")) == before
