"""Every command of the README runs as it stands; a configuration file shortens the training.

Commands of `shardzoo` run in a worker that has torch loaded, but for those that are about starting.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRETRAIN_TESTS = ROOT / "tests/cli/test_pretrain.py"
LAUNCHERS = (
    "deepspeed pretrain.py --model-parallel-size 2",
    "torchrun --nproc-per-node 2 pretrain.py --model-parallel-size 2",
)
VENV = Path(sys.prefix)
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
RUN_ELSEWHERE = {"make setup", "make test", "make lint", *LAUNCHERS}
STARTED = ("shardzoo doctor", "shardzoo generate", "shardzoo convert verify runs/quickstart/hf --logits")


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
    for command in LAUNCHERS:
        assert f'run_line("{command}' in PRETRAIN_TESTS.read_text()


def test_links_lead_somewhere():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")]
    for page in [*pages, *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder that looks like a fresh checkout, with a small text and a configuration for it."""
    folder = tmp_path_factory.mktemp("readme") / "shardzoo"
    folder.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in ("runs", "build", ".git"):
            (folder / entry.name).symlink_to(entry)
    (folder.parent / "texts").mkdir()
    for i in range(8):
        (folder.parent / "texts" / f"{i}.txt").write_text("".join(f"line {i} {j} of a text\n" for j in range(200)))
    (folder.parent / "short.yaml").write_text(SHORT + f"data: {folder.parent / 'texts'}\n")
    return folder


def run_shardzoo(words: list[str], folder: Path) -> int | str | None:
    """Exit code of the console script, in this process."""
    from shardzoo.cli.main import main

    os.chdir(folder)
    try:
        return main(words)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("command", [c for c in readme_commands() if c not in RUN_ELSEWHERE])
def test_command(command, checkout, run_ranks):
    """In the README's order, since later commands use what earlier ones leave."""
    program, *words = shlex.split(command)
    if program == "shardzoo" and not command.startswith(STARTED):
        assert run_ranks(1, run_shardzoo, words, checkout)[0] in (0, None)
        return
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MAKEFLAGS")}
    short = f"--config {checkout.parent / 'short.yaml'}"
    environment = inherited | {"PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "VENV": str(VENV), "ARGS": short}
    if "pretrain.py" in command:
        command = f"{command} {short}"
    done = subprocess.run(
        command, shell=True, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
