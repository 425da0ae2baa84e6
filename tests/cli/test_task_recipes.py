"""The files of recipes/tasks/ run at a tiny size: embeddings, rerankers, preferences, packed bases and teachers."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from commands import warm_environment
from tiny_models import PRETRAINED, save_model, text, tiny

from shardzoo.cli.pretrain import RECIPES

FILES = sorted((RECIPES / "tasks").glob("*.yaml"))
# Of the options of a recipe, those that a tiny model on a CPU has others of.
SMALL = ["--num-gpus", "1", "--micro-batch-size", "4", "--train-steps", "3", "--precision", "fp32"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Tiny models and a file for each recipe."""
    folder = tmp_path_factory.mktemp("tasks")
    save_model(folder / "bert", PRETRAINED["bert"], "bert")
    save_model(folder / "llama", "LlamaForCausalLM", "gpt2")
    template = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    path = folder / "llama" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": template}))
    (folder / "distilbert").mkdir()
    vocabulary = json.loads((folder / "bert" / "config.json").read_text())["vocab_size"]
    (folder / "distilbert" / "config.json").write_text(
        json.dumps(tiny("distilbert", vocab_size=vocabulary))
    )
    records: dict[str, list[object]] = {"embedding": [], "reranking": [], "dpo": [], "nf4-lora": []}
    for n in range(24):
        question = [{"role": "user", "content": text(n, 3)}]
        answers = [[{"role": "assistant", "content": text(n + m, 2)}] for m in (30, 60)]
        records["embedding"].append({"anchor": text(n, 3), "positive": text(n + 30, 2)})
        pair = {"query": text(n % 5, 3), "document": text(n, 3), "label": n % 2}
        records["reranking"].append(pair)
        better, worse = answers
        records["dpo"].append({"prompt": question, "chosen": better, "rejected": worse})
        records["nf4-lora"].append({"messages": question + better})
    records["simpo"] = records["reward"] = records["dpo"]
    for name, lines in records.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in lines))
    (folder / "text.txt").write_text("\n\n".join(text(n, 200) for n in range(40)))
    return folder


def give_tiny_inputs(name: str, inputs: Path) -> list[str]:
    """The options that name models and files, and those that are too large for them."""
    if name == "distillation":
        sizes = (
            "--sequence-length 32 --global-batch-size 4 --eval-sequences 2 --final-eval-sequences 4"
        )
        models = ["--model", str(inputs / "distilbert"), "--teacher-model", str(inputs / "bert")]
        return [*models, "--data", str(inputs / "text.txt"), *sizes.split(), *SMALL]
    model = "bert" if name in ("embedding", "reranking") else "llama"
    files = ["--model-name-or-path", str(inputs / model)]
    files += ["--train-file", str(inputs / f"{name}.jsonl"), "--validation-split", "20"]
    lengths = {"nf4-lora": "--block-size 64 --max-source-length 30 --max-target-length 30"}
    lengths["nf4-lora"] += " --gradient-accumulation-steps 1 --lora-rank 4"
    lengths["dpo"] = lengths["reward"] = "--max-source-length 30 --max-target-length 30"
    lengths["simpo"] = f"{lengths['dpo']} --model-parallel-size 2 --global-batch-size 8"
    small = [*SMALL, *lengths.get(name, "--max-source-length 30").split()]
    if name == "simpo":
        small += ["--num-gpus", "2"]
    if name == "embedding":
        small += ["--embedding-mini-batch", "2"]
    return [*files, *small, "--eval-interval", "2"]


@pytest.mark.before_release
@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_a_recipe_runs(name, inputs, tmp_path):
    file = RECIPES / "tasks" / f"{name}.yaml"
    found = re.match(r"# shardzoo (\w+) --config recipes/tasks/(\S+)\.yaml ", file.read_text())
    assert found is not None
    command, stated = found.groups()
    assert stated == name
    output = tmp_path / "run"
    words = ["shardzoo", command, "--config", str(file), *give_tiny_inputs(name, inputs)]
    words += ["--output-dir", str(output)]
    done = subprocess.run(
        words, env=warm_environment(COLUMNS="200"), cwd=tmp_path, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in metrics if "train/loss" in record]
    assert losses
    assert all(0 < loss < 20 for loss in losses)
    assert (output / "hf" / "config.json").exists() or name in ("dpo", "nf4-lora")


def test_each_task_has_a_recipe_that_says_what_it_is():
    names = {file.stem for file in FILES}
    assert names == {
        "embedding", "reranking", "dpo", "simpo", "reward", "nf4-lora", "distillation",
    }  # fmt: skip
    for file in FILES:
        comment = [line for line in file.read_text().splitlines() if line.startswith("#")]
        assert any("ublished" in line or "numbers are those of" in line for line in comment)
        assert any(line.startswith("# Hardware: ") for line in comment)
