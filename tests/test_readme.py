"""Every command of the README runs as it stands; a configuration file shortens the training.

Commands of `shardzoo` run in workers that have torch loaded, but for those that are about starting; the quickstart that
they go on from is trained there too.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from commands import user_environment

ROOT = Path(__file__).parents[1]
PRETRAIN_TESTS = ROOT / "tests/cli/test_pretrain.py"
QUICKSTART = "deepspeed pretrain.py --model-parallel-size 2"  # what `make pretrain` types
LAUNCHERS = (QUICKSTART, "torchrun --nproc-per-node 2 pretrain.py --model-parallel-size 2")
SHORT = """\
hidden_size: 48
num_hidden_layers: 1
sequence_length: 32
vocab_size: 300
train_steps: 2
eval_sequences: 2
final_eval_sequences: 2
"""
# What this very run of the tests is, what .ci/run calls beside it, and what is looked at closely elsewhere.
RUN_ELSEWHERE = {"make setup", "make pretrain", "make test", "make lint", *LAUNCHERS}
STARTED = ("shardzoo doctor", "shardzoo convert verify runs/quickstart/hf --logits")


def readme_commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def test_the_readme_opens_with_two_commands_and_their_picture():
    readme = (ROOT / "README.md").read_text()
    opening = readme.split("\n## ")[0]
    assert readme_commands()[:2] == ["make setup", "make pretrain"]
    picture = re.search(r"!\[.*?\]\((.*?)\)", opening)
    assert picture
    assert (ROOT / picture[1]).read_bytes().startswith(b"\x89PNG")


def test_what_is_run_elsewhere_is_run():
    assert set(readme_commands()) >= RUN_ELSEWHERE
    tests = PRETRAIN_TESTS.read_text()
    assert all(command in tests for command in LAUNCHERS)
    assert 'run("make", "pretrain"' in tests
    assert f"/{QUICKSTART} " in (ROOT / "Makefile").read_text()


def test_links_lead_somewhere():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")]
    for page in [*pages, *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, run_ranks) -> Path:
    """A folder that looks like a checkout after `make pretrain`, with a small text and a configuration for it."""
    folder = tmp_path_factory.mktemp("readme") / "shardzoo"
    folder.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in ("runs", "build", ".git"):
            (folder / entry.name).symlink_to(entry)
    (folder.parent / "texts").mkdir()
    for i in range(8):
        (folder.parent / "texts" / f"{i}.txt").write_text("".join(f"line {i} {j} of a text\n" for j in range(200)))
    short = folder.parent / "short.yaml"
    short.write_text(SHORT + f"data: {folder.parent / 'texts'}\n")
    words = [*QUICKSTART.split()[2:], "--output-dir", "runs/quickstart", "--config", str(short)]
    assert run_ranks(2, run_here, "pretrain", words, folder, isolated=True) == [0, 0]
    return folder


def run_here(command: str, words: list[str], folder: Path) -> int:
    """Exit code of `shardzoo.cli`'s command in this process, which may be one of several ranks."""
    os.chdir(folder)
    try:
        return importlib.import_module(f"shardzoo.cli.{command}").main(words) or 0
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("command", [c for c in readme_commands() if c not in RUN_ELSEWHERE])
def test_command(command, checkout, run_ranks):
    """In the README's order, since later commands use what earlier ones leave."""
    program, *words = shlex.split(command)
    if program == "shardzoo" and not command.startswith(STARTED):
        ranks = 2 if words[0] == "generate" else 1  # with --tp 2; other commands only write for so many
        assert not any(run_ranks(ranks, run_here, "main", words, checkout, isolated=ranks > 1))
        return
    environment = user_environment()
    if "pretrain.py" in command:
        command = f"{command} --config {checkout.parent / 'short.yaml'}"
    done = subprocess.run(
        command, shell=True, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
