"""Arguments from the command line and from YAML files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardzoo.cli.arguments import exit_code_of, parse


@dataclass(frozen=True)
class Arguments:
    train_steps: int = 10
    """Steps."""
    resume: bool = False
    """Go on."""
    config: Path | None = None
    """Defaults."""


def read(*argv: str, quiet: bool = False) -> Arguments:
    return parse(Arguments, argv, program="test", description="", quiet=quiet)


@pytest.mark.parametrize("spelling", ["--train-steps", "--train_steps"])
def test_both_spellings(spelling):
    assert read(spelling, "7").train_steps == 7
    assert read(f"{spelling}=8").train_steps == 8


@pytest.mark.parametrize("spelling", ["train-steps", "train_steps"])
def test_yaml_gives_defaults_and_the_command_line_wins(tmp_path, spelling):
    file = tmp_path / "run.yaml"
    file.write_text(f"{spelling}: 5\nresume: true\n")
    assert read("--config", str(file)) == Arguments(5, True, file)
    assert read(f"--config={file}", "--train-steps", "6").train_steps == 6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train_stepz: 5", "did you mean train_steps"),
        ("- 5", "name: value"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_yaml_file_says_what_is_wrong(tmp_path, content, message):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read("--config", str(file))


@dataclass(frozen=True)
class Model:
    num_layers: int = 2
    """Layers."""


@dataclass(frozen=True)
class Parts:
    model: Model = field(default_factory=Model)
    lr: float = 1.0
    """Learning rate."""
    prompt: str | None = None
    """Text."""
    fast: bool = False
    """Quick."""
    config: Path | None = None
    """Defaults."""


def read_parts(tmp_path, content: str, *argv: str) -> Parts:
    (tmp_path / "run.yaml").write_text(content)
    return parse(
        Parts, argv, program="test", description="", quiet=False, defaults=tmp_path / "run.yaml", overrides=True
    )


def test_parts_and_overrides(tmp_path):
    content = "model:\n  num-layers: 3\nlr: 1e-4\nprompt: x\n"
    assert read_parts(tmp_path, content) == Parts(Model(3), 1e-4, "x")
    overridden = read_parts(tmp_path, content, "model.num_layers=4", "--fast", "lr=2e-4", "prompt=a=b c")
    assert overridden == Parts(Model(4), 2e-4, "a=b c", True)
    assert read_parts(tmp_path, content, "prompt=null").prompt is None
    assert read_parts(tmp_path, content, "--model.num-layers", "5").model.num_layers == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model:\n  num_layer: 3\n", r"sets model\.num_layer, which is no argument; did you mean model\.num_layers"),
        ("model: 3\n", r"model in .*run\.yaml must hold `name: value` lines, not a int"),
    ],
)
def test_a_wrong_part_says_what_is_wrong(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_parts(tmp_path, content)


def test_a_misspelt_override_exits_with_2_and_the_right_name(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        read_parts(tmp_path, "", "model.num_layer=3")
    assert exit_.value.code == 2
    shown = capsys.readouterr()
    assert "--model.num-layers" in shown.out + shown.err


def test_a_missing_yaml_file_is_named():
    with pytest.raises(ValueError, match=r"no file nowhere\.yaml"):
        read("--config", "nowhere.yaml")


def test_a_misspelt_argument_exits_with_2_and_the_right_name(capsys):
    with pytest.raises(SystemExit) as exit_:
        read("--train-step", "5")
    assert exit_.value.code == 2
    shown = capsys.readouterr()
    assert "--train-steps" in shown.out + shown.err


def test_other_ranks_keep_quiet(capsys):
    with pytest.raises(SystemExit):
        read("--train-step", "5", quiet=True)

    def fail() -> int:
        raise ValueError("[5] heads")

    assert exit_code_of(fail, quiet=True) == 2
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""
    assert exit_code_of(fail) == 2
    assert capsys.readouterr().err.strip() == "error: [5] heads"
