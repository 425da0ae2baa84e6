"""Every command and snippet of the README and of docs/ runs as it stands, in the order of its page.

Commands of `shardzoo` run in processes that have torch loaded, but for those that are about starting. The models and
files that the pages name are tiny. A page's snippets share their names.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
from commands import warm_environment
from documents import PAGES, ROOT, Block, blocks, commands
from every_case import EVERY_CASE, by_turns
from nanogpt import nanogpt_checkpoint, nanogpt_logits
from tiny_models import save_glm, save_model, text, tokenizer_like
from training import Pairs

import shardzoo
from shardzoo.cli.convert import MergeShards
from shardzoo.cli.data import Prepare
from shardzoo.cli.generate import GenerateArguments
from shardzoo.convert import split
from shardzoo.finetuning.arguments import FinetuningArguments
from shardzoo.models.lora import add_lora, lora_config
from shardzoo.pretraining.arguments import PretrainingArguments
from shardzoo.trainer import Trainer
from shardzoo.trainer.arguments.aliases import argument_aliases

QUICKSTART = "deepspeed pretrain.py --model-parallel-size 2"  # what `make pretrain` types
LAUNCHERS = (QUICKSTART, "torchrun --nproc-per-node 2 pretrain.py --model-parallel-size 2")
SIZES = "hidden_size: 48\nnum_hidden_layers: 1\nvocab_size: 300\n"
SHORT = """\
sequence_length: 64
held_out_fraction: 0.3
train_steps: 2
eval_sequences: 2
final_eval_sequences: 2
"""
# Pages whose code other tests run and look at more closely.
ELSEWHERE = {
    "docs/adding-a-model.md": "tests/models/test_adding_a_model.py",
    "docs/board.md": "tests/cli/test_board.py",
    "docs/evaluation.md": "tests/evaluation/test_harness.py",
    "docs/gpu.md": "tests/test_gpu_calls.py",
    "docs/object-storage.md": "tests/stores/test_page.py",
    "docs/finetune.md": "tests/cli/test_finetune.py",
    "docs/pretraining.md": "tests/cli/test_pretrain.py",
    "examples/README.md": "tests/examples/test_examples.py",
}
# Commands that are this very run of the tests, that .ci/run calls beside it, or that tests/cli/test_pretrain.py runs.
INSTALLED = (
    "shardzoo pretrain --tp 2 --output-dir runs/quickstart",
    "deepspeed --module shardzoo.pretrain --model-parallel-size 2",
    "torchrun --nproc-per-node 2 -m shardzoo.pretrain --model-parallel-size 2",
)  # without a checkout; "pip install shardzoo" is in tests/test_packaging.py and tests/release.py
RUN_ELSEWHERE = {
    *("make setup", "make pretrain", "make test", "make lint", "pip install shardzoo"),
    *(*LAUNCHERS, *INSTALLED),
}
STARTED = ("shardzoo doctor", "shardzoo convert verify runs/quickstart/hf --logits")
# Files of DeepSpeed, a user and nanoGPT.
OF_OTHERS = (
    "zero/stage_1_and_2.py", "bf16_optimizer.py", "script.py", "evaluate.py", "config/train_gpt2.py", "prepare.py",
)  # fmt: skip
SPLIT = (
    "README.md",
    "docs/trainer.md",
    "docs/coming-from/flagai.md",
)  # their snippets ask for two ranks
AFTER_QUICKSTART = ("README.md", "docs/index.md")  # their commands read what `make pretrain` leaves
# The same command for more families, whose recipes other tests read and whose models they train.
ALIKE = [
    f"{QUICKSTART} --model {family}-quickstart"
    for family in ("gpt2", "t5", "mt5", "bert", "roberta")
]


def test_every_block_is_code_that_is_run_or_marked_as_text():
    for page in PAGES:
        wrong = [
            block.line for block in blocks(page) if block.language not in ("bash", "python", "text")
        ]
        assert not wrong, f"{page}: mark the blocks at lines {wrong} as bash, python or text"
    for words in CHECKS:
        assert len([page for page in PAGES for block in blocks(page) if words in block.text]) == 1
    for page, tests in ELSEWHERE.items():
        assert Path(page).name in (ROOT / tests).read_text()


def test_what_does_not_run_says_what_it_needs():
    """Our commands in blocks of text begin with a comment such as `# needs 8 GPUs`; other systems' do not."""
    ours = re.compile(
        r"^(?!#|\$).*\b(shardzoo \w|(pretrain|finetune|train|benchmarks/\w+)\.py\b)", re.MULTILINE
    )
    theirs = re.compile(r"\b(tools/|config/|_gpt\.py|flagai)")
    for page in PAGES:
        for block in blocks(page, "text"):
            if ours.search(block.text) and not theirs.search(block.text):
                assert re.match(r"# (needs|takes) ", block.text), (
                    f"{page}: say what the block at {block.line} needs"
                )


def test_the_arguments_that_replace_others_exist():
    """The second column of the tables of docs/coming-from, as options and as names with a value."""
    kinds = (PretrainingArguments, FinetuningArguments, Prepare, GenerateArguments, MergeShards)
    known = {field.name for kind in kinds for field in fields(kind)}
    known |= {
        *argument_aliases(known),
        "learning_rate",
        "config",
        "eval_only",
        "fast_dev_run",
        "resume",
    }
    for page in (page for page in PAGES if "/coming-from/" in page):
        for row in re.findall(r"^\|.*?\| (.*) \|$", (ROOT / page).read_text(), re.MULTILINE):
            for code in re.findall(r"`([^`]+)`", row):
                if example := re.match(r"examples/\w+\.py", code):
                    source = (ROOT / example[0]).read_text()
                    names = [name.replace("-", "_") for name in re.findall(r"--([\w-]+)", code)]
                    assert all(re.search(rf"\b{name}\b", source) for name in names), row
                    continue
                names = re.findall(r"--([\w-]+)", code) or re.findall(r"([\w.]+)=", code)
                unknown = [name for name in names if name.replace("-", "_") not in known]
                assert not unknown, f"{page}: {row}"


def test_the_readme_opens_with_two_commands_and_their_picture():
    opening = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert commands("README.md")[:2] == ["make setup", "make pretrain"]
    picture = re.search(r"!\[.*?\]\((.*?)\)", opening)
    assert picture
    assert (ROOT / picture[1]).read_bytes().startswith(b"\x89PNG")


def test_commands_that_are_run_elsewhere_are():
    assert set(commands("README.md")) >= RUN_ELSEWHERE
    tests = (ROOT / "tests/cli/test_pretrain.py").read_text()
    assert all(command in tests for command in (*LAUNCHERS, *INSTALLED))
    assert 'run("make", "pretrain"' in tests
    assert f"/{QUICKSTART} " in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "tests/README.md"])
def test_links_lead_somewhere(page):
    """Files and headings as a forge names them; tests/test_site.py looks at those of the site."""
    for target, heading in re.findall(
        r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", (ROOT / page).read_text()
    ):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not heading or heading in headings(path), f"{page} links to {target}#{heading}"


def headings(page: Path) -> set[str]:
    """A page's headings as a forge writes them in addresses."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def our_files() -> list[str]:
    """Without hidden folders, such as a virtual environment with tens of thousands of files."""
    rooms = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [
        f"/{path.relative_to(ROOT)}"
        for path in [*ROOT.glob("*.py"), *(p for r in rooms for p in r.rglob("*.py"))]
    ]


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "tests/README.md"])
def test_files_that_a_page_names_exist(page):
    ours = our_files()
    named = re.findall(r"`([\w/]+\.py)\b", (ROOT / page).read_text())
    missing = [
        name
        for name in named
        if name not in OF_OTHERS and not any(path.endswith(f"/{name}") for path in ours)
    ]
    missing = [
        name for name in missing if not name.startswith("models/starcoder2/")
    ]  # the family that a page adds
    assert not missing


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with small models under the names that the pages give, of the Hub and of `path/to`."""
    root = tmp_path_factory.mktemp("docs")
    folder = root / "path" / "to"
    gpt2 = save_model(root / "openai-community" / "gpt2", "GPT2LMHeadModel", "gpt2")
    folder.mkdir(parents=True)
    (folder / "gpt2").symlink_to(gpt2)
    adapted = shardzoo.from_pretrained(gpt2)
    add_lora(adapted, lora_config(r=2))
    adapted.save_pretrained(folder / "gpt2-lora")
    save_model(
        root / "openai-community" / "gpt2-xl", "GPT2LMHeadModel", "gpt2", n_embd=50, n_head=25
    )
    save_model(root / "google-bert" / "bert-base-uncased", "BertForMaskedLM", "bert")
    untied = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    t5 = save_model(root / "google" / "t5-v1_1-base", "T5ForConditionalGeneration", "t5", **untied)
    save_model(
        root / "google" / "mt5-small", "MT5ForConditionalGeneration", "t5", vocab_size=437
    )  # with the sentinels
    trainer = Trainer(env_type="pytorch", train_steps=1, batch_size=2, save_dir=str(folder / "run"))
    trainer.train(shardzoo.from_pretrained(t5), train_dataset=Pairs(2))
    tokenizer_like("bert").save_pretrained(folder / "glm-large")
    save_glm(folder / "glm-large", "bert")
    split(folder / "glm-large", folder / "glm-mp", 2, style="legacy")
    split(gpt2, folder / "megatron", 2, style="megatron")
    return root


@pytest.fixture
def workplace(models, tmp_path, monkeypatch) -> Path:
    """The current folder, with what a page's code reads."""
    monkeypatch.chdir(tmp_path)
    for folder in models.iterdir():
        Path(folder.name).symlink_to(folder)
    Path("pretrain.py").symlink_to(ROOT / "pretrain.py")
    texts = [text(seed, 300) for seed in range(60)]
    Path("corpus.jsonl").write_text("".join(f'{{"text": "{words}"}}\n' for words in texts))
    Path("questions.txt").write_text("one two\nred green blue\n")
    Path("hosts").write_text("first slots=8\nsecond slots=8\n")
    Path("texts").mkdir()
    for number, words in enumerate(texts[:8]):
        Path("texts", f"{number}.txt").write_text(words.replace(" seven ", "\n") * 4)
    short = SHORT + f"data: {tmp_path / 'texts'}\n"
    Path("short.yaml").write_text(SIZES + short)
    Path("init.yaml").write_text(short)
    Path("pairs.json").write_text(
        "".join(f'{{"s": "{words[:40]}", "t": "{words[:12]}"}}\n' for words in texts)
    )
    Path("out").mkdir()
    torch.save(nanogpt_checkpoint(), "out/ckpt.pt")
    return tmp_path


def run_here(words: list[str], folder: Path) -> int:
    """Exit code of a `shardzoo` command in this process, which may be one of several ranks."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        return importlib.import_module("shardzoo.cli.main").main(words) or 0
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        os.chdir(before)


def run_command(command: str, folder: Path, run_ranks) -> None:
    program, *words = shlex.split(command)
    if program == "shardzoo" and not command.startswith(STARTED) and ">" not in words:
        if "generate" in words and "--tp" in words:
            assert not any(
                run_ranks(
                    int(words[words.index("--tp") + 1]), run_here, words, folder, isolated=True
                )
            )
        else:
            assert run_here(words, folder) == 0
        return
    if command.startswith(f"{QUICKSTART} "):
        assert run_ranks(2, pretrain_here, words[1:], folder, isolated=True) == [0, 0]
        return
    if "pretrain.py" in words:
        command = f"{command} --config short.yaml"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=warm_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def given_names() -> dict:
    """What snippets take as given."""
    ids = torch.arange(24).view(2, 12) % 17 + 3
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :5]}
    return {"mesh": None, "samples": Pairs(16), "held_out": Pairs(4), **batch}


def run_snippet(block: Block, folder: Path, names: dict | None = None) -> dict:
    """The names after the block, in this process, which may be one of several ranks."""
    names = given_names() if names is None else names
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(compile(block.text, f"{block.page} from line {block.line}", "exec"), names)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        os.chdir(before)
    return names


def check_generation(names: dict) -> None:
    assert names["tokens"].shape[1] <= 12


def check_cache(names: dict) -> None:
    whole = names["model"](torch.cat([names["prompts"][1:], names["token"]], 1)).logits[:, -1:]
    torch.testing.assert_close(names["second"].logits, whole, rtol=1e-4, atol=1e-5)


def check_mems(names: dict) -> None:
    with torch.no_grad():
        whole = names["model"](names["ids"], names["places"], torch.tensor([5])).logits[:, 5:6]
    torch.testing.assert_close(names["logits"], whole, rtol=1e-4, atol=1e-5)


def check_nanogpt(names: dict) -> None:
    ids = torch.arange(22).view(2, 11)
    with torch.no_grad():
        logits = shardzoo.from_pretrained("gpt2-hf").eval()(ids).logits
    torch.testing.assert_close(logits[..., :40], nanogpt_logits(ids), rtol=1e-5, atol=1e-4)


def check_shard(names: dict) -> None:
    """The numbers in the comments of docs/concepts.md."""
    shard = names["shard"]
    assert shard.groups == (768, 768, 768)
    assert shard.ranges(rank=0, size=2) == [(0, 384), (768, 1152), (1536, 1920)]
    assert [shard.local_shape(rank=rank, size=5)[0] // 192 for rank in range(5)] == [3, 2, 3, 2, 2]


# What holds after the block in which these words stand.
CHECKS = {
    "num_beams=4, no_repeat": check_generation,
    "Cache(": check_cache,
    "mems=output.mems": check_mems,
    "save_file(wanted": check_nanogpt,
    "print(shard.groups)": check_shard,
}


@pytest.mark.parametrize(
    "page", by_turns([page for page in PAGES if page not in ELSEWHERE and blocks(page)], 4)
)
def test_page(page, workplace, run_ranks, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["train.py"]
    )  # a snippet is part of a script, which a launcher starts again
    names = given_names()
    if page in AFTER_QUICKSTART:
        make_quickstart(workplace, run_ranks)
    for block in blocks(page):
        if block.language == "python" and page in SPLIT:
            run_ranks(2, lambda block=block: run_snippet(block, workplace) and None)
        elif block.language == "python":
            run_snippet(block, workplace, names)
            for words, check in CHECKS.items():
                if words in block.text:
                    check(names)
        elif block.language == "bash":
            for command in block.commands():
                if command not in RUN_ELSEWHERE and (EVERY_CASE or command not in ALIKE):
                    run_command(command, workplace, run_ranks)


@pytest.mark.before_release
def test_a_run_that_needs_eight_gpus_can_be_planned(workplace):
    """The commands of the blocks `# needs 8 GPUs`, up to the start of their processes."""
    Path("recipes").symlink_to(ROOT / "recipes")
    found = []
    for page in PAGES:
        for block in blocks(page, "text"):
            if block.text.startswith("# needs 8 GPUs"):
                found += block.commands()
    assert len(found) >= 6
    for command in found:
        words = shlex.split(re.sub(r".*pretrain(\.py)?(?= )", "pretrain", command))
        assert words[0] == "pretrain", command
        if "--data" in words:  # The page makes it.
            words[words.index("--data") + 1] = "corpus.jsonl"
        if "nproc-per-node 8" in command:
            words.append("num_gpus=8")
        assert run_here([*words, "--dry-run"], workplace) == 0, command


def pretrain_here(words: list[str], folder: Path) -> int:
    """Exit code of `pretrain.py` in this process, one of the ranks, with the short configuration."""
    os.chdir(folder)
    config = (
        "init.yaml" if "--init-from" in words else "short.yaml"
    )  # weights have sizes of their own
    return importlib.import_module("shardzoo.cli.pretrain").main([*words, "--config", config]) or 0


def make_quickstart(folder: Path, run_ranks) -> None:
    """What `make pretrain` leaves, of the small text and the short configuration."""
    words = [*QUICKSTART.split()[2:], "--output-dir", "runs/quickstart"]
    assert run_ranks(2, pretrain_here, words, folder, isolated=True) == [0, 0]


@pytest.mark.before_release
def test_the_readmes_model_under_torchrun(workplace):
    """Nobody but the snippet's mesh starts the process group."""
    [block] = [block for block in blocks("README.md", "python") if "ParallelMesh" in block.text]
    given = "import torch\ninput_ids = torch.arange(24).view(2, 12)\nattention_mask = torch.ones_like(input_ids)\n"
    given += "labels = input_ids[:, :5]\n"
    Path("use.py").write_text(
        f"{given}{block.text}open(f'loss-{{mesh.rank}}', 'w').write(str(loss.item()))\n"
    )
    done = subprocess.run(
        ["torchrun", "--nproc-per-node", "2", "use.py"],
        cwd=workplace, env=warm_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(Path("loss-0").read_text()) > 0
    assert Path("loss-0").read_text() == Path("loss-1").read_text()
