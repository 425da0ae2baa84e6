"""Every command of examples/README.md runs, in its order, and does what it is there to show.

Commands run as scripts in the workers of a pool, which have their place in a process group as under torchrun; one is
started by plain python, which starts its ranks itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import warm_environment
from documents import ROOT, commands
from every_case import EVERY_CASE

COMMANDS = commands("examples/README.md")
IN_PROCESSES_OF_ITS_OWN = "--env-type pytorchDDP --num-gpus 2 --batch-size 4"


def command(part: str) -> str:
    [found] = [line for line in COMMANDS if part in line]
    return found


def run_as_script(words: list[str], folder: Path) -> tuple[str, int]:
    """What `python words…` in `folder` prints, and its exit code."""
    code: Any = 0
    import torch

    kept = os.getcwd(), sys.argv, list(sys.path), torch.get_float32_matmul_precision()
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = words
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    finally:
        os.chdir(kept[0])
        sys.argv, sys.path[:] = kept[1:3]
        torch.set_float32_matmul_precision(kept[3])
    return " ".join(shown.getvalue().split()), code


def words_of(line: str) -> list[str]:
    words = shlex.split(line)
    return words[next(place for place, word in enumerate(words) if word.endswith(".py")) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the commands are given, beside the checkout's examples."""
    where = tmp_path_factory.mktemp("checkout")
    (where / "examples").symlink_to(ROOT / "examples")
    return where


@pytest.fixture(scope="module")
def tiny():
    """The examples' own module."""
    spec = importlib.util.spec_from_file_location("tiny", ROOT / "examples/tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(folder, run_ranks):
    """`run(line)`: what the first rank of a command prints."""

    def in_the_pool(line: str) -> str:
        sizes = re.findall(
            r"(?:num_gpus|num-gpus|model_parallel_size|model-parallel-size)[ =](\d+)", line
        )
        ranks = max(map(int, sizes), default=2 if "gpt2" in line else 1)
        ended = run_ranks(ranks, run_as_script, words_of(line), folder)
        assert all(code == 0 for _, code in ended), ended
        return ended[0][0]

    def by_itself(line: str) -> str:
        environment = warm_environment()
        done = subprocess.run(
            shlex.split(line),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join(done.stdout.split())

    return lambda line: (by_itself if IN_PROCESSES_OF_ITS_OWN in line else in_the_pool)(line)


def logged(folder: Path, name: str, value: str = "train/loss") -> dict[int, float]:
    lines = (folder / "runs/examples" / name / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record[value] for record in map(json.loads, lines) if value in record}


def test_every_command_is_run_by_a_test():
    named = re.findall(r'command\("([^"]+)"\)', Path(__file__).read_text())
    assert sorted(map(command, named)) == sorted(COMMANDS)


@pytest.mark.before_release
def test_one_script_for_every_environment(run, folder):
    """Plain python, also with ranks started by it; as under torchrun; transformers' model, and the native one split."""
    lines = {
        "pytorch": command("--env-type pytorch --batch"),
        "pytorchDDP": command("--env-type pytorchDDP --num-gpus 2 --batch"),
        "deepspeed+mpu": command("--env-type deepspeed+mpu"),
    }
    if EVERY_CASE:
        lines["deepspeed"] = command("--env-type deepspeed --num")
    shown, environments = [run(line) for line in lines.values()], tuple(lines)
    curves = [logged(folder, f"flagai-t5-{name}") for name in environments]
    held_out = [logged(folder, f"flagai-t5-{name}", "valid/loss") for name in environments]
    assert len(curves[0]) >= 10
    first, *_, before, between, last = curves[0].values()
    assert (before + between + last) / 3 < first - 0.9
    for curve, values in zip(curves, held_out, strict=True):
        assert curve == pytest.approx(curves[0], rel=1e-4)
        assert values == pytest.approx(held_out[0], rel=1e-4)
    titles = [text.partition("title:")[2] for text in shown]
    assert "ours:" in titles[0]
    assert titles == [titles[0]] * len(lines)


def record(words: list[str], folder: Path, stop_after: int = 0) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of a script, and the batches that this rank trained on; a signal stops it after some of them."""
    import transformers.models.mt5.modeling_mt5  # noqa: F401 - by all ranks at once, lest one waits for another

    from shardzoo.trainer import Trainer

    multiprocessing.current_process()._config["daemon"] = (
        False  # so that it may have workers of its own,
    )
    multiprocessing.set_start_method("fork", force=True)  # begun as those of a script are
    seen, forward_step = [], Trainer.forward_step

    def recording(self, data, model, mems):
        seen.append(
            {name: value.clone() for name, value in data.items() if hasattr(value, "clone")}
        )
        if len(seen) == stop_after:
            signal.raise_signal(signal.SIGTERM)
        return forward_step(self, data, model, mems)

    Trainer.forward_step = recording
    try:
        return run_as_script(words, folder)[1], seen
    finally:
        Trainer.forward_step = forward_step
        multiprocessing.set_start_method("forkserver", force=True)


@pytest.mark.before_release
def test_diacritics_take_each_text_once_also_when_stopped(folder, run_ranks, tiny):
    """Two ranks with two workers each are stopped, and go on with another number of workers."""
    import shardzoo.data

    words = words_of(command("diacritics"))
    stopped = run_ranks(2, record, words, folder, 7)
    assert [code for code, _ in stopped] == [143, 143]
    rest = run_ranks(2, record, [*words, "--num-workers", "1"], folder)
    assert [code for code, _ in rest] == [0, 0]
    assert [len(batches) for _, batches in (*stopped, *rest)] == [7, 7, 43, 43]

    tokenizer = shardzoo.data.load_tokenizer(folder / "runs/examples/tiny-mt5")
    expected = Counter(
        (*tokenizer.encode(text), tokenizer.eos_token_id) for text in tiny.sentences(800)
    )
    found = Counter()
    for batch in (batch for _, batches in (*stopped, *rest) for batch in batches):
        inputs, labels, mask = batch["input_ids"], batch["labels"], batch["attention_mask"].bool()
        assert (inputs >= 0).all()  # -100 is for labels alone
        assert (inputs[~mask] == tokenizer.pad_token_id).all()
        assert ((labels >= 0) | (labels == -100)).all()
        for ids in (inputs, labels):
            assert ((ids == tokenizer.eos_token_id).sum(1) == 1).all()
        found.update(tuple(row[row != -100].tolist()) for row in labels)
    assert found == expected
    curve = logged(folder, "diacritics")
    assert list(curve) == list(range(5, 51, 5))
    assert curve[50] < curve[5] - 1


@pytest.mark.before_release
def test_bert_sorts_texts(run, folder):
    shown = run(command("bert"))
    majority = 0.37
    found = re.search(r"(\d+)% of (\d+) held-out texts", shown)
    assert found
    assert int(found[1]) / 100 > majority + 0.2
    best = folder / "runs/examples/bert-pytorch/checkpoints" / "best"
    assert (
        logged(folder, "bert-pytorch", "valid/accuracy")[int(best.read_text().strip()[5:])]
        > majority + 0.2
    )


def test_glm_fills_a_blank(run, folder):
    shown = run(command("glm_blanks"))
    curve = list(logged(folder, "glm-pytorch").values())
    assert (
        sum(curve[-6:]) / 6 < curve[0] - 0.8
    )  # single ones differ by half a nat: now tokens are blank, now documents
    assert re.search(r"'generated_text': 'Return the.+of the message\.'", shown)


@pytest.mark.before_release
def test_glm_classifies_by_filling_a_blank(run, folder):
    shown = run(command("glm_cloze.py --epochs 4"))
    accuracy, majority = map(
        float,
        re.findall(r"held-out texts: (\S+); of the most frequent label alone: (\S+)", shown)[0],
    )
    assert 0.5 <= majority < 0.8
    assert accuracy > majority


@pytest.mark.before_release
def test_a_prompt_of_a_frozen_glm_learns(run, folder):
    """A frozen random model gains little by a prompt, but what it gains is the prompt's."""
    last_losses = []
    learning = command("glm_cloze.py --prompt-tokens 4")
    for line in (learning, re.sub(r"--lr \S+", "--lr 1e-12", learning)):
        shutil.rmtree(folder / "runs/examples/cloze-pytorch-prompt", ignore_errors=True)
        run(line)
        curve = logged(folder, "cloze-pytorch-prompt", "valid/loss")
        last_losses.append(curve[max(curve)])
    learned, unlearned = last_losses
    assert learned < unlearned - 0.02


@pytest.mark.before_release
def test_gpt2_split_over_two_is_the_same_in_transformers(run, folder):
    shown = run(command("gpt2"))
    split, whole = map(
        float, re.findall(r"loss split 2 ways (\S+); in transformers.*?, (\d\S+)", shown)[0]
    )
    assert split == pytest.approx(whole, rel=1e-5)
    curve = logged(folder, "gpt2-tp")
    assert curve[max(curve)] < curve[min(curve)] - 0.5
    assert "Return the" in shown
