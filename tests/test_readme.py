"""Every command of the README runs as it stands; a configuration file shortens the training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
# What this very run of the tests is, or what .ci/run calls beside it.
RUN_ELSEWHERE = {"make setup", "make test", "make lint"}


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


@pytest.mark.parametrize("command", [c for c in readme_commands() if c not in RUN_ELSEWHERE])
def test_command(command, checkout):
    """In the README's order, since later commands use what earlier ones leave."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MAKEFLAGS")}
    short = f"--config {checkout.parent / 'short.yaml'}"
    environment = inherited | {"PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "VENV": str(VENV), "ARGS": short}
    if "pretrain.py" in command:
        command = f"{command} {short}"
    done = subprocess.run(
        command, shell=True, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
