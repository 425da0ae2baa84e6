"""The forge's files call what exists, and say the same as the package."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

import shardzoo

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def jobs(workflow: Path) -> dict:
    return yaml.safe_load(workflow.read_text())["jobs"]


def steps(workflow: Path) -> list[dict]:
    return [step for job in jobs(workflow).values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_call_what_exists(workflow):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [
        shlex.split(step["run"], comments=True) for step in steps(workflow) if "run" in step
    ]
    assert all(set(words[1:]) <= targets for words in commands if words[0] == "make")
    scripts = [word for words in commands for word in words if word.endswith(".py")]
    assert all((ROOT / script).is_file() for script in scripts)
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step["uses"])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_are_limited(workflow):
    """A workflow may only read unless a job says more; a job ends; the jobs that one needs exist."""
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    for job in jobs(workflow).values():
        assert job["timeout-minutes"] <= 360
        assert job.get("needs", next(iter(jobs(workflow)))) in jobs(workflow)


def test_all_places_name_the_same_pythons():
    tests = jobs(ROOT / ".github/workflows/ci.yml")["test"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in tests} == set(PYTHONS)
    assert (
        jobs(ROOT / ".github/workflows/wheels.yml")["try"]["strategy"]["matrix"]["python"]
        == PYTHONS
    )
    # Only those whose versions are listed: with these the tests have been run.
    tried = {row["python"] for row in tests if row["torch"] == "pinned"}
    assert re.findall(r"Python :: (3\.\d+)", PYPROJECT) == sorted(tried)
    assert re.findall(r"cp(3)(\d+)-manylinux", PYPROJECT) == [
        ("3", python[2:]) for python in PYTHONS
    ]
    assert f'requires-python = ">={PYTHONS[0]}"' in PYPROJECT


def test_the_oldest_torch_is_one():
    backend, build = ((ROOT / "csrc" / name).read_text() for name in ("backend.py", "build.py"))
    [oldest] = re.findall(r'^  "torch>=(2\.\d+)"', PYPROJECT, re.MULTILINE)
    assert f'"torch>={oldest}"' in backend
    assert f"0x{2:02x}{int(oldest[2:]):02x}000000000000" in build
    tested = jobs(ROOT / ".github/workflows/ci.yml")["test"]["strategy"]["matrix"]["include"]
    assert f"{oldest}.*" in [row["torch"] for row in tested]


def test_all_places_name_the_same_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] in (shardzoo.__version__, "Unreleased")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == shardzoo.__version__
    assert 'dynamic = ["version"]' in PYPROJECT


@pytest.mark.parametrize("page", ["SECURITY.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md"])
def test_pages_name_files_that_exist(page):
    text = (ROOT / page).read_text()
    named = [
        *re.findall(r"`((?:tests|csrc|\.github|\.ci)[\w./-]*)`", text),
        *re.findall(r"\]\(([\w./-]+)\)", text),
    ]
    assert named
    assert all((ROOT / name).exists() for name in named)


def test_hooks_run_what_make_lint_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    programs = {shlex.split(hook["entry"])[0].rpartition("/")[2] for hook in hooks}
    linters = (ROOT / "Makefile").read_text().partition("lint: setup\n")[2].partition("\n\n")[0]
    assert programs == set(re.findall(r"\$\(BIN\)/(\w+) (?:check|format|--)", linters))
