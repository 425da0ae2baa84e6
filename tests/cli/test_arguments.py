"""Arguments from the command line and from YAML files."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from shardzoo.cli.arguments import given_value, overrides_as_options, parse, read_yaml
from shardzoo.cli.console import run_and_report
from shardzoo.cli.help import HelpPage
from shardzoo.cli.rank_errors import run_and_report_once
from shardzoo.data import Share
from shardzoo.trainer.arguments.aliases import hint
from shardzoo.trainer.arguments.training_arguments import TrainingArguments
from shardzoo.trainer.launch.rank_info import RankInfo


@dataclass(frozen=True)
class Arguments:
    train_steps: int = 10
    """Steps."""
    resume: bool = False
    """Go on."""
    config: Path | None = None
    """Defaults."""


def read(*argv: str, quiet: bool = False) -> Arguments:
    return parse(Arguments, HelpPage("test", Arguments), argv, quiet=quiet)


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
    [("train_stepz: 5", "did you mean train_steps"), ("- 5", "name: value"), ("a: [", "not YAML")],
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
    options, values = overrides_as_options(argv, Parts), read_yaml(Parts, tmp_path / "run.yaml")
    return parse(Parts, HelpPage("test", Parts), options, quiet=False, values=values)


def test_parts_and_overrides(tmp_path):
    content = "model:\n  num-layers: 3\nlr: 1e-4\nprompt: x\n"
    assert read_parts(tmp_path, content) == Parts(Model(3), 1e-4, "x")
    overridden = read_parts(
        tmp_path, content, "model.num_layers=4", "--fast", "lr=2e-4", "prompt=a=b c"
    )
    assert overridden == Parts(Model(4), 2e-4, "a=b c", True)
    assert read_parts(tmp_path, content, "prompt=null").prompt is None
    assert read_parts(tmp_path, content, "--model.num-layers", "5").model.num_layers == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "model:\n  num_layer: 3\n",
            r"sets model\.num_layer, which is not an argument; did you mean model\.num_layers",
        ),
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

    assert run_and_report(fail, quiet=True) == 2
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""
    assert run_and_report(fail) == 2
    assert capsys.readouterr().err.strip() == "error: [5] heads"


@dataclass(frozen=True)
class Training:
    lr: float = 1.0
    micro_batch_size: int = 1
    precision: str = "fp32"
    recompute: str = "none"
    gradient_checkpointing: bool = False
    native: bool | None = None
    config: Path | None = None


def read_training(*argv: str) -> Training:
    return parse(Training, HelpPage("test", Training), argv, quiet=True)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--bf16"], Training(precision="bf16")),
        (["--bf16", "True"], Training(precision="bf16")),
        (["--bf16", "False"], Training()),
        (["--bf16=False", "--fp16=true"], Training(precision="fp16")),
        (["--fp16=True", "--bf16", "False"], Training(precision="fp16")),
        (["--checkpoint-activations", "--learning-rate=2"], Training(lr=2.0, recompute="full")),
        (
            ["--gradient_checkpointing", "True", "--learning_rate", "2"],
            Training(lr=2.0, gradient_checkpointing=True),
        ),
        (["--gradient-checkpointing", "--gradient-checkpointing=False"], Training()),
        (["--native"], Training(native=True)),
        (["--no-native"], Training(native=False)),
        (["--native", "None"], Training()),
    ],
)
def test_alias_options_and_booleans_with_a_value(argv, expected):
    assert read_training(*argv) == expected


def test_a_boolean_with_another_value_is_refused():
    with pytest.raises(ValueError, match="--bf16 must be True or False, not 'maybe'"):
        read_training("--bf16=maybe")


def test_aliases_in_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "learning-rate: 1e-3\nbatch_size: 4\nbf16: true\ncheckpoint_activations: false\n"
    )
    assert read_training("--config", str(file)) == Training(1e-3, 4, "bf16", config=file)
    assert read_training("--config", str(file), "--bf16", "False").precision == "fp32"
    assert (
        read_training("--config", str(file), "--fp16", "True", "--bf16", "False").precision
        == "fp16"
    )
    file.write_text("lr: 1\nlearning_rate: 2\n")
    with pytest.raises(ValueError, match=r"run\.yaml: lr and learning_rate both set lr"):
        read_training("--config", str(file))


def test_a_folder_is_no_yaml_file(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\); name a YAML file"):
        read("--config", str(tmp_path))


MISTAKE = "micro_batch_size is 0; it must be at least 1"


def number_of(makers: tuple[int, ...]) -> int:
    """One for each case, since what was told is remembered as long as the ranks live."""
    return -10 * makers[0] - len(makers)


def mistaken(makers: tuple[int, ...]) -> tuple[int, str]:
    """The exit code and message of this rank, if it is one of those that make a mistake."""
    import contextlib
    import io
    from datetime import timedelta
    from unittest import mock

    import torch.distributed as dist

    def work() -> int:
        if rank in makers:
            Share(number_of(makers))
        return 0

    rank, size = dist.get_rank(), dist.get_world_size()
    patience = mock.patch("shardzoo.cli.rank_errors.REPORT_TIMEOUT", timedelta(seconds=1))
    with contextlib.redirect_stderr(io.StringIO()) as shown, patience:
        code = run_and_report_once(work, RankInfo(rank, size, rank, size))
    return code, shown.getvalue().strip()


@pytest.mark.parametrize("makers", [(0, 1), (1,), (0,)])
def test_a_mistake_of_any_rank_is_told_once(run_ranks, makers):
    outcomes = run_ranks(2, mistaken, makers)
    assert [code for code, _ in outcomes] == [2 if rank in makers else 0 for rank in range(2)]
    assert [shown for _, shown in outcomes if shown] == [
        f"error: {MISTAKE}".replace("0", str(number_of(makers)), 1)
    ]


@pytest.mark.parametrize(("rank", "told"), [(0, True), (1, False), (2, True), (3, False)])
def test_before_the_ranks_meet_each_machine_tells_its_mistakes(rank, told, capsys, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr(
        "torch.distributed.is_initialized", lambda: False
    )  # whatever an earlier test has started
    assert run_and_report_once(lambda: Share(0), RankInfo(rank, 4, rank % 2, 2)) == 2
    assert (capsys.readouterr().err.strip() == f"error: {MISTAKE}") is told
    assert (
        bool(waits) is not told
    )  # a launcher stops the rank that reports when a silent one ends before it


def test_what_others_call_a_value_error_is_told_with_its_place(capsys):
    assert run_and_report_once(lambda: int("x"), RankInfo(0, 1, 0, 1)) == 2
    message, place, *_ = capsys.readouterr().err.splitlines()
    assert (message, place) == (
        "error: invalid literal for int() with base 10: 'x'",
        "Traceback (most recent call last):",
    )


def test_errors_that_are_no_mistakes_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_and_report_once(lambda: 1 // 0, RankInfo(0, 1, 0, 1))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["a=1"], ["--a", "1"]),
        (["--lr", "a=1"], ["--lr", "a=1"]),  # the value of an option
        (["--lr=2", "a=1"], ["--lr=2", "--a", "1"]),
        (["--gradient-checkpointing", "a=1"], ["--gradient-checkpointing", "--a", "1"]),
        (["--bf16", "a=null"], ["--bf16", "--a", "None"]),
        (["a=[x, y:0.5]", "a.b=[]"], ["--a", "x", "y:0.5", "--a.b"]),
        (["/x=1", "A=1"], ["/x=1", "A=1"]),
    ],
)
def test_overrides(argv, expected):
    assert overrides_as_options(argv, Training) == expected


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], None),
        (["--lr", "2"], "2"),
        (["--lr=2", "--lr", "3"], "3"),
        (["--lr"], "True"),
        (["--lr", "--x"], "True"),
        (["--lr-x", "2", "lr"], None),
        (["--lr_rate", "2"], None),
    ],
)
def test_the_value_of_an_option_before_parsing(argv, value):
    assert given_value(argv, "lr") == value


@pytest.mark.parametrize(
    "spelling", ["--pipeline-parallel-size", "--pp", "--pipeline_model_parallel_size"]
)
def test_pipeline_parallelism_has_several_names(spelling, tmp_path):
    page = HelpPage("test", TrainingArguments)
    found = parse(
        TrainingArguments, page, [spelling, "2", "--env-type", "deepspeed+mpu"], quiet=True
    )
    file = tmp_path / "run.yaml"
    file.write_text(f"{spelling.strip('-')}: 2\nenv_type: deepspeed+mpu\n")
    values = read_yaml(TrainingArguments, file)
    assert (
        found
        == parse(TrainingArguments, page, [], values=values, quiet=True)
        == TrainingArguments(**values)
    )
    assert found.pipeline_parallel_size == 2


@pytest.mark.parametrize("name", ["dropout", "world_size", "save_every", "virtual_pipeline_size"])
def test_another_argument_is_not_suggested(name):
    assert hint(name, [field.name for field in fields(TrainingArguments)]) == ""
