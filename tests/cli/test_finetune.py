"""`finetune.py` and `shardzoo finetune`: the document's commands, and what is said to mistakes."""

from __future__ import annotations

import json
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import transformers
import yaml
from commands import warm_environment
from documents import ROOT, blocks, commands
from every_case import by_turns
from tiny_models import PRETRAINED, save_model, text

PAGE = "docs/finetune.md"
COMMANDS = commands(PAGE)
SHORT = {"train_steps": 2, "max_source_length": 16, "max_target_length": 6, "log_interval": 1}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the models and files that the document names."""
    folder = tmp_path_factory.mktemp("finetune")
    for family, architecture in PRETRAINED.items():
        save_model(folder / family, architecture, family)
    sources = [text(seed, 4) for seed in range(24)]
    pairs = [{"translation": {"s": source, "t": source.split()[0]}} for source in sources]
    labels = [{"s": source, "t": number % 2} for number, source in enumerate(sources)]
    words = [{"s": source.split(), "t": ["B-A", "I-A", "O", "O"]} for source in sources]
    files = {"pairs.json": pairs, "labels.json": labels, "words.json": words}
    for name, records in files.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "text.txt").write_text(text(0, 900))
    (folder / "short.yaml").write_text(
        "".join(f"{name}: {value}\n" for name, value in SHORT.items())
    )
    (folder / "finetune.py").symlink_to(ROOT / "finetune.py")
    return folder


def finetune(*arguments: str, cwd: Path, monkeypatch) -> int:
    """The command in this process."""
    from shardzoo.cli.main import main

    monkeypatch.chdir(cwd)
    return main(["finetune", *arguments])


@pytest.mark.parametrize(
    "command", by_turns((line for line in COMMANDS if not line.startswith("shardzoo")), 4)
)
def test_scripts(command, workplace):
    """Started as a user does, where that is what is tested."""
    done = subprocess.run(
        f"{command} --config short.yaml", shell=True, cwd=workplace, capture_output=True, text=True, timeout=200,
        env=warm_environment(COLUMNS="200"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [saved] = re.findall(r"^saved (\S+)$", done.stdout, re.MULTILINE)
    assert (
        transformers.AutoModelForSeq2SeqLM.from_pretrained(
            workplace / saved
        ).config.num_decoder_layers
        == 1
    )


@pytest.mark.parametrize(
    "command", by_turns([line for line in COMMANDS if line.startswith("shardzoo")], 2)
)
def test_commands(command, workplace, monkeypatch, capsys):
    words = [word.strip('"') for word in command.split()]
    assert words[:2] == ["shardzoo", "finetune"]
    assert (
        finetune(*words[2:], "--config", "short.yaml", cwd=workplace, monkeypatch=monkeypatch) == 0
    )
    out = capsys.readouterr().out
    assert re.search(r"^saved \S+hf$", out, re.MULTILINE)
    assert ("test: loss" in out) == ("--test-file" in words)


def test_the_code_of_the_document(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    first, *others = blocks(PAGE, "python")
    names: dict = {}
    exec(first.text, names)
    for block in others:
        exec(block.text, {})
    assert isinstance(names["trainer"].generate_single("one two three", max_new_tokens=4), str)


REFUSED = [
    ((), "--model-name-or-path is missing"),
    (("--model-name-or-path", "t5"), "there is nothing to do: name a --train-file"),
    (
        ("--model-name-or-path", "t5", "--train-file", "nowhere.json"),
        "--train-file nowhere.json does not exist",
    ),
    (
        ("--model-name-or-path", "t5", "--train-file", "pairs.json", "--source-id", "en"),
        "no key 'en'; the keys are",
    ),
    (
        ("--model-name-or-path", "gpt2", "--train-file", "pairs.json", "--freeze-encoder"),
        "has no encoder",
    ),
    (
        (
            "--model-name-or-path",
            "t5",
            "--train-file",
            "pairs.json",
            "--lora-rank",
            "2",
            "--lora_target",
            "query",
        ),
        "--lora-target-modules 'query' match no linear layer of the model, which has q, k, v, o, wi, wo",
    ),
    (
        ("--model-name-or-path", "t5", "--train-file", "pairs.json", "--merge-adapter"),
        "--merge-adapter merges LoRA weights, and there are none",
    ),
    (
        ("--model-name-or-path", "t5", "--train-file", "pairs.json", "--batch_size", "64"),
        "fewer than the 64",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_mistakes_end_with_code_2_and_one_message(
    arguments, message, workplace, monkeypatch, capsys
):
    short = ("--max-source-length", "16", "--max-target-length", "6")
    assert finetune(*arguments, *short, cwd=workplace, monkeypatch=monkeypatch) == 2
    captured = capsys.readouterr().err
    assert message in captured
    assert "Traceback" not in captured


def test_a_dry_run_checks_what_a_run_would_and_starts_nothing(workplace, monkeypatch, capsys):
    (workplace / "some-run/checkpoints").mkdir(parents=True)
    pairs = ("--model-name-or-path", "t5", "--train-file", "pairs.json", "--output-dir", "dry")
    for arguments, message in (
        (("--model-name-or-path", "some-run", *pairs[2:]), "some-run is a run's folder; name a"),
        ((*pairs, "--lora-rank", "2", "--lora-target-modules", "x"), "which has q, k, v, o"),
        ((*pairs, "--test-file", "no.json"), "--test-file no.json does not exist"),
        ((*pairs, "--global-batch-size", "7", "--micro-batch-size", "2"), "is not a multiple of"),
        ((*pairs, "--global-batch-size", "64"), "fewer than the 64"),
        ((*pairs[:5], "t5"), "--output-dir t5 holds files that do not belong to a run"),
    ):
        code = finetune(*arguments, "--dry-run", cwd=workplace, monkeypatch=monkeypatch)
        assert (code, capsys.readouterr().err.count(message)) == (2, 1), message
    with pytest.raises(SystemExit) as end:
        finetune(*pairs, "--batch_size", "4", "--dry-run", cwd=workplace, monkeypatch=monkeypatch)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "23 samples, 4 in a step" in shown
    assert "mesh         1 tensor-parallel x 1 data-parallel = 1 process\n" in shown
    assert "precision    fp32\nengine       pytorch\noutput_dir   dry\n" in shown
    assert not (workplace / "dry").exists()


# In training itself, or just before it.
REFUSED_LATE = [
    (("--output-dir", "t5"), "--output-dir t5 holds files that do not belong to a run"),
    (("--output-dir", "pairs.json"), "--output-dir pairs.json is a file"),
    (
        ("--output-dir", "nothing", "--resume"),
        "--resume: nothing holds no run; start one without --resume",
    ),
    (
        ("--output-dir", "again"),
        "--output-dir again holds another run (saved at step 2); resume it with --resume",
    ),
    (("--load-dir", "nowhere"), "--load-dir nowhere holds no checkpoint"),
    (
        ("--save-best", "rouge"),
        "--save-best 'rouge' is not among the validation values: loss, perplexity",
    ),
    (("--epochs", "0"), "set epochs or --train-steps"),
    (("--config", "prompt.yaml"), "prompt_list must be a list of strings, not 5"),
]


def outcome(arguments: tuple[str, ...], folder: Path) -> tuple[int, str]:
    """Exit code and messages of the command in this process, which may be one of several ranks."""
    import contextlib
    import io
    import os

    import torch.distributed as dist

    from shardzoo.cli.finetune import main

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    here = os.getcwd()
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as messages:
        try:
            code = main(["--model-name-or-path", "t5", "--train-file", "pairs.json", *arguments])
        finally:
            os.chdir(here)
    return code, messages.getvalue()


@pytest.mark.parametrize("ranks", [1, 2])
def test_mistakes_in_training_are_one_message_too(ranks, workplace, run_ranks):
    """In one process and in two; nothing is written."""
    (workplace / "again" / "checkpoints" / "step-000002").mkdir(parents=True, exist_ok=True)
    (workplace / "again" / "arguments.yaml").touch()
    (workplace / "prompt.yaml").write_text("prompt_list: 5\n")
    before = sorted(workplace.rglob("*"))
    for arguments, message in REFUSED_LATE:
        ended = run_ranks(ranks, outcome, arguments, workplace)
        assert [code for code, _ in ended] == [2] * ranks, ended
        assert ended[0][1].count("error: ") == 1
        assert message in ended[0][1]
        assert [shown for _, shown in ended[1:]] == [""] * (ranks - 1)
    assert sorted(workplace.rglob("*")) == before


def test_a_resumed_run_keeps_its_arguments(workplace, monkeypatch, capsys):
    """The command names the folder alone, or what may change; what is trained may not."""
    run = partial(finetune, cwd=workplace, monkeypatch=monkeypatch)
    begin = (
        "--model-name-or-path",
        "t5",
        "--train-file",
        "pairs.json",
        "--lr",
        "3e-3",
        "--freeze-encoder",
    )
    short = ("--config", "short.yaml", "--validation-split", "0")
    assert run(*begin, *short, "--output-dir", "goes-on") == 0
    # As an earlier release may have saved them, which ignored them.
    written = workplace / "goes-on" / "arguments.yaml"
    written.write_text(written.read_text().replace("lora_alpha: 16", "lora_alpha: 4"))
    again = ("--resume", "--output-dir", "goes-on", "--train-steps", "4")
    capsys.readouterr()
    assert run(*again) == 0
    assert capsys.readouterr().out.count("resuming from step 2 of goes-on\n") == 1
    saved = yaml.safe_load((workplace / "goes-on" / "arguments.yaml").read_text())
    assert (saved["lr"], saved["freeze_encoder"], saved["max_source_length"]) == (3e-3, True, 16)
    lines = (workplace / "goes-on" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert max(line["step"] for line in steps) == 4
    capsys.readouterr()
    for changed in (
        ("--train-file", "labels.json"),
        ("--no-freeze-encoder",),
        ("--task", "text-classification"),
    ):
        assert run(*again, *changed) == 2
        assert "which cannot change to" in capsys.readouterr().err
    assert run("--resume", "--train-steps", "4") == 2
    assert "name that folder too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metric", "blue"), "sacrebleu"),
        (("--prompt-list", "a", "--lora-rank", "2"), "use one"),
        (("--prompt-list", "a", "--pp", "2"), "--prompt-list needs the embedding on every process"),
        (("--trainfile", "pairs.json"), "--train-file"),
        (("--save-dir", "x"), "set --output-dir instead"),
    ],
)
def test_arguments_that_cannot_be_are_refused_with_those_that_can(
    arguments, message, workplace, monkeypatch, capsys
):
    with pytest.raises(SystemExit) as ended:
        finetune(*arguments, cwd=workplace, monkeypatch=monkeypatch)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert message in re.sub(r"[\s│]+", " ", shown.out + shown.err)
