"""`pretrain.py` from the command line: what it leaves, that it goes on, and what it says to mistakes."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from importlib import import_module
from pathlib import Path

import pytest
from commands import user_environment, warm_environment
from documents import commands
from every_case import every_day

ROOT = Path(__file__).parents[2]
PRETRAIN = str(ROOT / "pretrain.py")
QUICKSTART = Path("runs", "quickstart")
TINY = """\
hidden_size: 48
num_hidden_layers: 1
sequence_length: 32
vocab_size: 300
micro_batch_size: 4
train_steps: 6
warmup_steps: 2
save_interval: 3
eval_sequences: 4
final_eval_sequences: 8
held_out_fraction: 0.3
"""


def run(
    *command: str, cwd: Path, seconds: int = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user would, away from the variables of this test's own processes."""
    of_make = dict.fromkeys(("MAKEFLAGS", "ARGS", "MODEL"))  # what `make test ARGS=…` passes on
    variables = warm_environment(COLUMNS="200", **{**of_make, **environment})
    return subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=seconds
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A folder with a small corpus and a configuration for it."""
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "texts").mkdir()
    for i in range(12):
        lines = [f"def function_{i}_{j}(value):\n    return value + {j}\n\n" for j in range(40)]
        (folder / "texts" / f"{i}.txt").write_text("".join(lines))
    (folder / "tiny.yaml").write_text(TINY + f"data: {folder / 'texts'}\n")
    for name in (
        "Makefile",
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "pretrain.py",
        "recipes",
    ):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def finished(workspace) -> subprocess.CompletedProcess[str]:
    """The README's own command, on a tiny model: `deepspeed pretrain.py --model-parallel-size 2`, as make has it."""
    environment = Path(warm_environment()["PATH"].partition(":")[0]).parent
    installed = ("-o", f"{environment}/.complete")  # whatever has changed since
    arguments = {"VENV": str(environment), "ARGS": "--config tiny.yaml --eval_interval 3"}
    return run("make", "pretrain", *installed, cwd=workspace, **arguments)


def metrics(folder: Path, name: str) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def test_a_run_starts_what_is_missing_and_ends_well(finished):
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (
        "--model-parallel-size 2 needs 2 processes; starting them on this machine"
        in finished.stdout
    )
    assert "Traceback" not in finished.stdout + finished.stderr


def test_a_run_leaves_what_it_promises(finished, workspace):
    folder = workspace / QUICKSTART
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step-000003",
        "step-000006",
    ]
    checkpoint = folder / "checkpoints" / "step-000006"
    assert {
        "config.json",
        "manifest.json",
        "rank_00.safetensors",
        "rank_01.safetensors",
        "trainer_state.json",
    } <= {p.name for p in checkpoint.iterdir()}
    assert len(metrics(folder, "train/loss")) == 6
    assert "held-out loss" in finished.stdout
    assert "the exported model wrote the parts in [[ ]]" in finished.stdout


def test_transformers_loads_the_export_and_agrees(finished, workspace):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = workspace / QUICKSTART / "hf"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def function_1_2(value):\n    return value"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))

    from shardzoo.data import GPTDataset, IndexedDataset
    from shardzoo.pretraining.corpora import held_out_samples

    samples = held_out_samples(
        GPTDataset(IndexedDataset(workspace / QUICKSTART / "data" / "valid"), 32, seed=0), 8
    )
    (native,) = metrics(workspace / QUICKSTART, "final/loss")
    losses = [
        model(**{name: value[None] for name, value in samples[i].items()}).loss.item()
        for i in range(8)
    ]
    assert sum(losses) / 8 == pytest.approx(native, abs=1e-5)


def test_a_second_run_does_not_touch_the_first(finished, workspace):
    before = (workspace / QUICKSTART / "metrics.jsonl").read_bytes()
    again = run(
        "python", PRETRAIN, "--config", "tiny.yaml", "--output-dir", str(QUICKSTART), cwd=workspace
    )
    assert again.returncode == 2
    assert "holds another run (saved at step 6); resume it with --resume" in again.stderr
    assert "Traceback" not in again.stdout + again.stderr
    assert (workspace / QUICKSTART / "metrics.jsonl").read_bytes() == before


@pytest.mark.before_release
def test_a_killed_run_resumes_from_the_saved_step(workspace):
    command = ["python", PRETRAIN, "--config", "tiny.yaml", "--output-dir", "killed"]
    process = subprocess.Popen(
        [sys.executable, *command[1:], "--train-steps", "100000"],
        cwd=workspace,
        stdout=subprocess.DEVNULL,
    )
    checkpoint = workspace / "killed" / "checkpoints" / "step-000003"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = max(
        int(p.name.split("-")[1]) for p in checkpoint.parent.iterdir() if not p.name.startswith(".")
    )
    resumed = run(*command, "--resume", "--train-steps", str(saved + 2), cwd=workspace)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resuming from step {saved}" in resumed.stdout
    assert len(metrics(workspace / "killed", "train/loss")) == saved + 2
    card = (workspace / "killed/hf/README.md").read_text()
    assert "--train-steps 100000\n# from step " in card
    assert f"--resume --train-steps {saved + 2}\n```" in card


ENDLESS = ("--train-steps", "100000", "--save-interval", "100000", "--output-dir", "closed")


def test_a_run_is_saved_when_its_terminal_is_closed(workspace):
    """The system sends SIGHUP to the launcher, and printing fails from then on."""
    master, terminal = os.openpty()

    def use_terminal() -> None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY)

    process = subprocess.Popen(
        ["shardzoo", "pretrain", "--tp", "2", "--config", "tiny.yaml", *ENDLESS],
        cwd=workspace,
        env=warm_environment(),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=use_terminal,
    )
    os.close(terminal)
    printed = b""
    while b"step 3/" not in printed and b"3/100000" not in printed:
        printed += os.read(master, 10_000)
    os.close(master)
    try:
        assert process.wait(timeout=60) == 128 + signal.SIGHUP
    finally:
        process.kill()
    losses = metrics(workspace / "closed", "train/loss")
    assert os.listdir(workspace / "closed" / "checkpoints") == [f"step-{len(losses):06d}"]


@pytest.mark.before_release
@pytest.mark.parametrize(
    "line",
    every_day(
        ["shardzoo pretrain --tp 2 --output-dir runs/quickstart"],
        more=[
            "deepspeed --module shardzoo.pretrain --model-parallel-size 2",
            "torchrun --nproc-per-node 2 pretrain.py --model-parallel-size 2",
            "torchrun --nproc-per-node 2 -m shardzoo.pretrain --model-parallel-size 2",
        ],
    ),
)
def test_other_ways_to_start(line, workspace):
    words = line.replace("runs/quickstart", "runs/started").split()  # beside the run of make
    done = run(*words, "--config", "tiny.yaml", cwd=workspace)
    assert done.returncode == 0, done.stdout + done.stderr


# The commands of the page, with models and lengths for a test.
# The page's command with a teacher is run by the tests of the documentation.
PAGE = [line for line in commands("docs/pretraining.md") if "pretrain.py" in line]
SHORT = [
    *(
        "--data",
        "texts",
        "hidden_size=48",
        "num_hidden_layers=1",
        "sequence_length=32",
        "micro_batch_size=2",
    ),
    *("train_steps=2", "eval_sequences=4", "final_eval_sequences=4"),
]
SMALL_LIBAI = [
    *(
        "data=docstrings.jsonl",
        "vocab_size=600",
        "hidden_size=64",
        "num_hidden_layers=1",
        "num_attention_heads=4",
    ),
    *("sequence_length=64", "target_length=24", "micro_batch_size=4", "lr=1e-3"),
    *("eval_sequences=8", "final_eval_sequences=8"),
]


def run_page(lines: list[list[str]], folder: Path) -> tuple[list[str], list[str]]:
    """What commands of the page print, and with which precision they multiply matrices in training.

    They run in this process, which may be one of several ranks.
    """
    import torch

    from shardzoo.trainer import Trainer

    shown, precisions, train = [], [], Trainer.train

    def recording(self, *arguments, **keywords):
        precisions.append(torch.get_float32_matmul_precision())
        return train(self, *arguments, **keywords)

    Trainer.train = recording
    for words in lines:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code, messages = outcome(words[words.index("pretrain.py") + 1 :], folder)
        assert code == 0, messages
        shown.append(" ".join(output.getvalue().split()))
    return shown, precisions


@pytest.fixture(scope="module")
def docstrings(workspace) -> None:
    """A text for each of some functions of the standard library that have a docstring."""
    names = (
        "argparse",
        "contextlib",
        "inspect",
        "os",
        "pathlib",
        "shutil",
        "subprocess",
        "tarfile",
        "unittest.mock",
    )
    modules = map(import_module, names)
    texts = {
        inspect.getdoc(value)
        for module in modules
        for value in vars(module).values()
        if callable(value)
    }
    lines = [json.dumps({"text": text}) + "\n" for text in sorted(filter(None, texts))]
    (workspace / "docstrings.jsonl").write_text("".join(lines))


@pytest.mark.before_release
def test_every_command_of_the_page(workspace, docstrings, run_ranks):
    """The benchmark's evaluation has two data-parallel ranks; the losses are the same."""
    split, mask, prefix, separate, first, resumed, evaluated = (line.split() for line in PAGE)
    rehearsals = ("--fast-dev-run", "--dry-run")
    split, mask, prefix, separate = (
        [*(word for word in words if word not in rehearsals), *SHORT]
        for words in (split, mask, prefix, separate)
    )
    first, resumed, evaluated = ([*words, *SMALL_LIBAI] for words in (first, resumed, evaluated))
    [((shown, *_), precisions)] = run_ranks(
        1, run_page, [first, mask, prefix, separate], workspace, isolated=True
    )
    assert precisions == ["high", *["highest"] * 3]  # TensorFloat-32 ends with the training
    folder = workspace / "runs" / "mt5-libai"
    curve = metrics(folder, "train/loss")
    assert len(curve) == 20
    assert curve[-1] < curve[0] - 0.5
    assert [len(metrics(folder, f"{series}/loss")) for series in ("valid", "final")] == [1, 1]
    assert re.search(r"time per step \S+ s/iter, \S+ samples/s", shown)

    [((_, _, shown), _), _] = run_ranks(
        2, run_page, [split, resumed, evaluated], workspace, isolated=True
    )
    goes_on = metrics(folder, "train/loss")
    assert len(goes_on) == 30
    assert goes_on[:20] == curve
    loss = re.search(r"held-out loss ([\d.]+) nats", shown)
    assert loss
    assert float(loss[1]) == pytest.approx(metrics(folder, "final/loss")[-1], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "--model-parallel-size 2 --output-dir runs/quickstart"),
        (
            ["MODEL=t5"],
            "--model-parallel-size 2 --model t5-quickstart --output-dir runs/t5-quickstart",
        ),
        (
            ["MODEL=glm", "ARGS=--lr=1"],
            "2 --model glm-quickstart --output-dir runs/glm-quickstart --lr=1",
        ),
    ],
)
def test_make_pretrain_of_each_family(settings, words, workspace):
    done = run(
        "make",
        "--no-print-directory",
        "-n",
        "-o",
        ".venv/.complete",
        "pretrain",
        *settings,
        cwd=workspace,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(words)


BEFORE_ANY_PROCESS = [
    (
        ["--model-parallel-size", "13"],
        "12 attention heads cannot be split 13 ways; use a model-parallel size from 1",
    ),
    (["--model-paralle-size", "2"], "did you mean --model-parallel-size?"),
    (["--sequence-length", "1000"], "256 positions"),
    (["--model", "gpt5"], "'gpt5' is neither a preset"),
    (["--objective", "t5"], "objective 't5' does not fit model gpt2-quickstart, a gpt2; use gpt"),
    (["--global-batch-size", "7"], "use a multiple of 4"),
    (["--resume"], "--output-dir"),
    (["--resume", "--output-dir", "nothing"], "holds no run"),
    (["--precision", "bf16", "--zero-stage", "0"], "use 1 or 2"),
    (["--deepspeed-config", "nothing.json"], "nothing.json cannot be read: No such file"),
]
ON_EVERY_RANK = [
    (["--data", "nowhere"], "nowhere does not exist"),
    (["--data", "empty"], "empty holds no"),
    (["--output-dir", "texts"], "texts holds files that do not belong to a run"),
    (["--output-dir", "another"], "holds another run (with nothing saved yet)"),
]


TINY_SPLIT = ["--config", "tiny.yaml", "--model-parallel-size", "2"]


def outcome(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and messages of `pretrain.py` in this process, which may be one of several ranks."""
    import torch.distributed as dist

    import shardzoo.cli.pretrain

    size = dist.get_world_size() if dist.is_initialized() else 1
    os.environ |= {
        "RANK": str(dist.get_rank() if size > 1 else 0),
        "WORLD_SIZE": str(size),
        "COLUMNS": "200",
    }
    here = os.getcwd()
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as messages:
        try:
            code = shardzoo.cli.pretrain.main(arguments)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        finally:
            os.chdir(here)
    return code, messages.getvalue()


@pytest.mark.parametrize(("arguments", "message"), BEFORE_ANY_PROCESS)
def test_a_mistake_is_one_message_with_exit_code_2(workspace, monkeypatch, arguments, message):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # restored afterwards
    before = sorted(workspace.rglob("*"))
    code, messages = outcome(["--config", "tiny.yaml", *arguments], workspace)
    assert code == 2
    assert messages.count(message) == 1
    assert sorted(workspace.rglob("*")) == before


@pytest.mark.parametrize(("arguments", "message"), ON_EVERY_RANK)
def test_a_mistake_that_one_rank_finds_ends_all(workspace, run_ranks, arguments, message):
    (workspace / "empty").mkdir(exist_ok=True)
    (workspace / "another").mkdir(exist_ok=True)
    (workspace / "another" / "arguments.yaml").touch()
    (workspace / "runs").mkdir(exist_ok=True)  # as after any run
    before = sorted(workspace.rglob("*"))
    (first, shown), (second, also_shown) = run_ranks(
        2, outcome, [*TINY_SPLIT, *arguments], workspace
    )
    assert (first, second) == (2, 2)
    assert shown.count(message) == 1
    assert also_shown == ""
    assert sorted(workspace.rglob("*")) == before


def test_a_mistake_in_a_started_job_is_one_message(workspace):
    failed = run(
        *(
            "python",
            PRETRAIN,
            "--model-parallel-size",
            "2",
            "--config",
            "tiny.yaml",
            "--data",
            "nowhere",
        ),
        cwd=workspace,
    )
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert failed.stderr.count("error:") == 1
    assert "Traceback" not in failed.stderr


def test_a_world_that_does_not_divide(workspace, run_ranks):
    outcomes = run_ranks(3, outcome, TINY_SPLIT, workspace)
    assert [code for code, _ in outcomes] == [2, 2, 2]
    assert "3 processes" in outcomes[0][1]
    assert "use tensor_parallel_size 1 or 3" in outcomes[0][1]
    assert outcomes[1][1] == outcomes[2][1] == ""


def read(*argv: str):
    from shardzoo.cli.pretrain import read_arguments

    return read_arguments(argv, quiet=True)


@pytest.mark.parametrize(
    ("argv", "name", "mask_probability"),
    [
        (["--model", "t5-v1_1-base"], "t5", 0.15),  # of its recipe
        (["--model", "t5-small"], "t5", 0.15),  # of its family
        (["--init-from", "t5-small"], "t5", 0.15),
        (["--objective.mask-probability", "0.2", "--model", "t5-small"], "t5", 0.2),
        (["--objective", "roberta", "--objective.mask-probability", "0.2"], "roberta", 0.2),
        (["--objective.mask-probability=0.2", "--lr", "1", "--objective=roberta"], "roberta", 0.2),
        (["objective.mask_probability=0.2", "objective=bert-sop"], "bert-sop", 0.2),
        (["--objective", "t5", "--objective", "roberta"], "roberta", 0.15),
        (["--config", "t5.yaml"], "t5", 0.25),
        (["--config", "t5.yaml", "--objective.mask-probability", "0.2"], "t5", 0.2),
        (["--config", "t5.yaml", "--objective", "t5"], "t5", 0.25),
        (
            ["--config", "t5.yaml", "--objective", "roberta"],
            "roberta",
            0.15,
        ),  # the file's settings are of another
        (["--config", "named.yaml"], "roberta", 0.15),
        (["--config", "default.yaml"], "glm", 0.3),
        (["--config", "default.yaml", "--objective", "t5"], "t5", 0.3),
    ],
)
def test_the_objective_and_its_settings(argv, name, mask_probability, tmp_path, monkeypatch):
    (tmp_path / "t5.yaml").write_text("objective: {name: t5, mask-probability: 0.25}\n")
    (tmp_path / "named.yaml").write_text("objective: roberta\n")
    (tmp_path / "default.yaml").write_text("model: glm-base\nobjective: {mask_probability: 0.3}\n")
    monkeypatch.chdir(tmp_path)
    objective = read(*argv).objective
    assert (objective.name, objective.mask_probability) == (name, mask_probability)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--objective", "t6"], "unknown objective 't6'; use one of bart, bert-nsp"),
        (["--objective"], "unknown objective ''; use one of"),
        (
            ["--objective=t5", "--objective.whole-words"],
            r"'t5' has no setting 'whole_words' \(a setting of bert-nsp",
        ),
        (
            ["objective.spans=3", "objective=t5"],
            "no setting 'spans'; its settings are mask_probability, mean_span_length",
        ),
        (
            ["--objective.mask-probability", "0.1"],
            r"'gpt' has no setting 'mask_probability' \(a .*; its settings are separate_documents",
        ),
        (["--config", "wrong.yaml"], r"'t5' has no setting 'whole_words' \(a setting of bert-nsp"),
        (["--config", "text.yaml"], "mask_probability must be a finite number, not 'x'"),
        (["--config", "negated.yaml"], "objective 'roberta' has no setting 'no_whole_words'"),
        (["--config", "list.yaml"], "objective must be a name, or settings with a name"),
        (["--config", "glm.yaml"], "objective.token must be a finite number, not 'x'"),
    ],
)
def test_a_wrong_objective_or_setting(argv, message, tmp_path, monkeypatch):
    (tmp_path / "wrong.yaml").write_text("objective: {name: t5, whole_words: true}\n")
    (tmp_path / "text.yaml").write_text("objective: {name: t5, mask_probability: x}\n")
    (tmp_path / "negated.yaml").write_text("objective: {name: roberta, no_whole_words: true}\n")
    (tmp_path / "list.yaml").write_text("objective: [t5]\n")
    (tmp_path / "glm.yaml").write_text("objective: {name: glm, token: x}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        read(*argv)


def test_help_shows_the_settings_of_the_objective_in_use(capsys):
    from shardzoo.cli.pretrain import read_arguments

    with pytest.raises(SystemExit):
        read_arguments(["--help-all", "--objective", "roberta"], quiet=False)
    shown = capsys.readouterr().out
    assert "--objective.whole-words" in shown
    assert "here roberta. One of bart, bert-nsp" in " ".join(shown.split())
    assert "mean-span-length" not in shown


def test_a_recipe_gives_defaults_and_a_config_replaces_it(tmp_path):
    recipe = read("--model", "bert-large-uncased", "--lr", "1e-3")
    assert (recipe.lr, recipe.warmup_steps, recipe.model_parallel_size) == (1e-3, 10000, 2)
    (tmp_path / "own.yaml").write_text("model: bert-large-uncased\n")
    own = read("--config", str(tmp_path / "own.yaml"), "--model", "bert-large-uncased")
    assert (own.warmup_steps, own.model_parallel_size) == (100, 1)
    assert read("--init-from", "gpt2").config is None
    assert read().config.name == "gpt2-quickstart.yaml"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--gradient-accumulation-steps 2", {"gradient_accumulation_steps": 2}),
        ("train.num_accumulation_steps=2", {"gradient_accumulation_steps": 2}),
        ("--warm_up 0.2", {"warmup_ratio": 0.2, "warmup_steps": None, "global_batch_size": 256}),
    ],
)
def test_an_option_replaces_the_recipes_other_way_to_say_it(words, expected):
    made = read("--model", "bert-large-uncased", *words.split())
    assert {name: getattr(made, name) for name in expected} == expected
    if "gradient_accumulation_steps" in expected:
        assert made.global_batch_size is None
    with pytest.raises(SystemExit):
        read("--global-batch-size", "8", "--gradient-accumulation-steps", "2")


def test_the_saved_arguments_of_a_run_are_read_again(tmp_path):
    import yaml

    arguments = read("--model", "glm-10b", "--data", "a:0.5", "b:0.5", "--objective.short", "0.1")
    saved = tmp_path / "arguments.yaml"
    saved.write_text(yaml.safe_dump(arguments.run_arguments()))
    again = read("--config", str(saved))
    assert again.run_arguments() == arguments.run_arguments()
    assert again.objective == arguments.objective
    assert again.data == ("a:0.5", "b:0.5")


def test_a_resumed_run_keeps_its_objective_and_settings(tmp_path):
    import yaml

    begun = read(
        "--model",
        "t5-small",
        "--objective.mask-probability",
        "0.3",
        "--lr",
        "1e-3",
        "--data",
        "a",
        "b",
    )
    (tmp_path / "arguments.yaml").write_text(yaml.safe_dump(begun.run_arguments()))
    resume = ["--resume", "--output-dir", str(tmp_path)]
    again = read(*resume, "--train-steps", "7")
    assert (again.objective, again.data, again.lr, again.train_steps) == (
        begun.objective,
        ("a", "b"),
        1e-3,
        7,
    )
    assert read(*resume, "--model", "t5-small").objective == begun.objective  # not its recipe's
    for change in (
        ["--objective", "prefix-lm"],
        ["--objective.mask-probability", "0.2"],
        ["--data", "a"],
    ):
        with pytest.raises(ValueError, match=r"--resume: the run has .*, which cannot change"):
            read(*resume, *change)
    (tmp_path / "other.yaml").write_text("lr: 2e-3\nobjective: {mean_span_length: 3.0}\n")
    with_file = read(*resume, "--config", str(tmp_path / "other.yaml"))
    assert (with_file.lr, with_file.objective) == (2e-3, begun.objective)
    (tmp_path / "other.yaml").write_text("objective: roberta\n")
    with pytest.raises(ValueError, match="--resume: the run has objective="):
        read(*resume, "--config", str(tmp_path / "other.yaml"))


def test_a_quick_run_to_find_mistakes():
    arguments = read("--fast-dev-run", "--train-steps", "100")
    assert (arguments.train_steps, arguments.eval_interval) == (20, 10)
    assert "fast_dev_run" not in arguments.run_arguments()


def test_a_folder_in_use_is_left_alone(workspace):
    """A second run is refused while the first prepares or trains, and not once that has been killed."""
    command = ("python", PRETRAIN, "--config", "tiny.yaml", "--output-dir", "runs/shared")
    variables = user_environment(COLUMNS="200")
    first = subprocess.Popen(
        [sys.executable, *command[1:], "--train-steps", "3000"],
        cwd=workspace,
        env=variables,
        stdout=subprocess.PIPE,
    )
    lock = workspace / "runs" / "shared" / ".run.lock"
    try:
        deadline = time.monotonic() + 120
        while not lock.exists():
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.05)
        second = run(*command, "--overwrite", cwd=workspace)
        assert second.returncode == 2, second.stdout + second.stderr
        assert f"runs/shared is in use by process {first.pid} on " in second.stdout + second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    again = run(*command, "--overwrite", cwd=workspace)
    assert again.returncode == 0, again.stdout + again.stderr
    assert not lock.exists()
