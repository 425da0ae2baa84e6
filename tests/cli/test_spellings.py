"""All commands spell an option alike, and take the spellings of before."""

from __future__ import annotations

import subprocess
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest

from shardzoo.cli import estimate, generate, models
from shardzoo.cli.completion import list_options, list_pages, write_bash
from shardzoo.cli.main import COMMANDS, main
from shardzoo.cli.parsing import shorten_box
from shardzoo.cli.spellings import OLD, SHORT, name_as_typed, name_options, respell
from shardzoo.compat.spellings import FLAGAI, LIBAI, T2T_TUNER, TRANSFORMERS

# The kernels' bench names the type and the sizes of an operator's tensors.
OTHERS = {"bench"}


@pytest.fixture(scope="module")
def pages():
    return list_pages()


def test_an_option_has_one_name_in_all_commands(pages):
    assert {*pages, "lm-eval"} == set(COMMANDS)
    seen = set()
    for command, own in pages.items():
        for name, page in own.items():
            names = {field.name for field in fields(page.arguments)}
            seen |= names
            if command not in OTHERS:
                assert not names & {*OLD, *SHORT}, (command, name)
            # Two names of one thing are not in one command.
            assert not {"model", "model_name_or_path"} <= names
    assert {*OLD.values(), *SHORT.values(), "model", "optimizer", "micro_batch_size"} <= seen


def test_no_command_has_another_systems_name_of_an_option_that_one_has(pages):
    """What FlagAI, t2t-tuner, LiBai or transformers call an argument is its second name in all commands."""
    renamed = {}
    for system in (FLAGAI, T2T_TUNER, LIBAI, TRANSFORMERS):
        renamed |= system.renamed
    names = {
        (command, field.name)
        for command, own in pages.items()
        for page in own.values()
        for field in fields(page.arguments)
    }
    known = {name for _, name in names}
    seconds = {(command, name) for command, name in names if renamed.get(name) in known}
    assert seconds == {
        ("generate", "batch_size"),  # prompts at a time, in no optimizer step
        # The folder of one run; save_dir is the folder of several.
        ("pretrain", "output_dir"),
        ("finetune", "output_dir"),
    }


# Words of other names for the same: a new option is not another one's name in other words.
SYNONYMS = {
    "accum": "accumulation", "attn": "attention", "ckpt": "checkpoint", "dir": "folder", "directory": "folder",
    "eval": "validation", "evaluation": "validation", "every": "interval", "freq": "interval", "grad": "gradient",
    "iters": "steps", "iterations": "steps", "len": "length", "n": "num", "path": "folder", "period": "interval",
    "seq": "sequence", "src": "source", "tgt": "target", "tok": "tokenizer", "vocabulary": "vocab",
}  # fmt: skip


def in_common_words(name: str) -> str:
    return "_".join(SYNONYMS.get(word, word) for word in name.split("_"))


def test_no_option_is_another_one_in_other_words(pages):
    """Such as --seq-len beside --sequence-length, or --eval-every beside --eval-interval."""
    assert in_common_words("seq_len") == in_common_words("sequence_length")
    spelled: dict[str, set[str]] = {}
    for own in pages.values():
        for page in own.values():
            for field in fields(page.arguments):
                spelled.setdefault(in_common_words(field.name), set()).add(field.name)
    assert {name: found for name, found in spelled.items() if len(found) > 1} == {}


# Names of two things, each of which its command's own page explains: (name, commands).
TWO_THINGS = {
    "json": {"bench"},  # a file
    "names": {"models"},  # of presets; elsewhere of tensors
}


def test_an_option_has_one_kind_of_value_in_all_commands(pages):
    """A name is no number in one command and a folder in another."""
    kinds: dict[str, dict[str, set[str]]] = {}
    for command, own in pages.items():
        for page in own.values():
            hints = get_type_hints(page.arguments)
            for field in fields(page.arguments):
                if command not in TWO_THINGS.get(field.name, ()):
                    kind = kind_of_value(hints[field.name])
                    kinds.setdefault(field.name, {}).setdefault(kind, set()).add(command)
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def kind_of_value(hint: object) -> str:
    """What a value is: a truth value, a number, or a text (names of files and choices are texts)."""
    parts = {part for part in get_args(hint) if part is not type(None)}
    if get_origin(hint) in (Union, UnionType) and len(parts) == 1:
        return kind_of_value(parts.pop())
    if get_origin(hint) is Literal or hint in (str, Path):
        return "text"
    if get_origin(hint) is tuple:
        return "list"
    return str(hint)


def test_other_spellings_go_on(capsys):
    names = [field.name for field in fields(estimate.EstimateArguments)]
    words = ["--model", "gpt2", "--tp", "2", "--length=64", "--accumulation_steps", "4"]
    words += ["--precision", "bfloat16", "--json"]
    assert respell(words, names, positional="model") == [
        "gpt2", "--model-parallel-size", "2", "--sequence-length=64",
        "--gradient-accumulation-steps", "4", "--precision=bf16", "--json",
    ]  # fmt: skip
    assert capsys.readouterr().err.splitlines() == [
        "notice: --length is called --sequence-length now",
        "notice: --accumulation_steps is called --gradient-accumulation-steps now",
    ]
    own = [field.name for field in fields(generate.GenerateArguments)]
    assert respell(["--dtype", "float16", "--model-name-or-path=x"], own, quiet=True) == [
        "--precision=fp16",
        "--model=x",
    ]
    assert respell(["--max-length", "8"], own) == ["--max-length", "8"]
    assert respell(["--model", "x"], ["model_name_or_path"]) == ["--model-name-or-path", "x"]
    assert capsys.readouterr().err == ""


def test_old_and_new_spellings_do_the_same(capsys):
    assert estimate.main(["gpt2", "--length", "64", "--tp", "2", "--json"]) == 0
    old = capsys.readouterr().out
    words = ["--model=gpt2", "--sequence-length", "64", "--model-parallel-size", "2", "--json"]
    assert estimate.main(words) == 0
    assert capsys.readouterr().out == old
    assert models.main(["gpt2", "--tp", "2", "--dtype", "float32"]) == 0
    old = capsys.readouterr().out
    assert models.main(["--model", "gpt2", "--model-parallel-size", "2", "--precision=fp32"]) == 0
    assert capsys.readouterr().out == old


def test_an_estimate_reads_a_recipe(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: gpt2\nsequence_length: 64\nprecision: bf16\nlr: 1e-3\nsequence_parallel: false\n"
    )
    assert estimate.main(["--config", str(file), "--json"]) == 0
    found = capsys.readouterr().out
    words = ["gpt2", "--sequence-length", "64", "--precision", "bf16", "--json"]
    assert estimate.main(words) == 0
    assert capsys.readouterr().out == found
    assert estimate.main(["--config", str(file), "--sequence-length", "32", "--json"]) == 0
    assert capsys.readouterr().out != found
    assert estimate.main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_mistakes_are_answered_with_what_was_meant(capsys):
    for words, meant in (
        (["estimate", "gpt2-x1"], "did you mean gpt2-xl?"),
        (["models", "t5-smal"], "did you mean t5-small?"),
        (["pretran"], "did you mean pretrain?"),
    ):
        assert main(words) == 2
        shown = " ".join(capsys.readouterr().err.split())
        assert shown.startswith("error: ")
        assert meant in shown
        assert len(shown) < 160, "all names are listed beside the one that was meant"


def test_a_folder_with_the_name_of_a_preset_is_mentioned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-quickstart").mkdir()
    assert main(["estimate", "gpt2-quickstart"]) == 0
    assert not capsys.readouterr().err
    (tmp_path / "gpt2-quickstart" / "config.json").write_text("{}")
    notice = "notice: gpt2-quickstart is the preset; for the folder of that name write ./gpt2-quick"
    assert main(["estimate", "gpt2-quickstart"]) == 0
    assert capsys.readouterr().err.startswith(notice)
    (tmp_path / "text.txt").write_text("one two\n")
    words = ["--model", "gpt2-quickstart", "--data", "text.txt", "--dry-run"]
    with pytest.raises(SystemExit) as end:
        main(["pretrain", *words])
    assert end.value.code == 0
    assert capsys.readouterr().err.startswith(notice)


def test_a_command_line_that_does_not_parse_is_one_line(capsys):
    for words, line in (
        (["models", "--tp", "x"], "--model-parallel-size: a whole number is needed, not 'x'"),
        (["plan", "gpt2", "--gpu", "4"], "unrecognized options: --gpu; did you mean --gpus?"),
        (
            ["estimate", "gpt2", "--device-memory", "lots"],
            "--device-memory: a number is needed, not 'lots'; see",
        ),
        (
            ["estimate", "gpt2", "--precision", "fp8"],
            "--precision must be one of fp32, bf16, fp16, not 'fp8'",
        ),
        (
            ["convert", "split", "a", "b", "--to", "megatro"],
            "--to must be one of shardzoo, legacy, megatron, not 'megatro'; did you mean megatron?",
        ),
        (["finetune", "--task", "chatt"], "did you mean chat?"),
        (["convert", "verfy"], "no command 'shardzoo convert verfy'; did you mean verify?"),
        (["data", "prepar", "a"], "no command 'shardzoo data prepar'; did you mean prepare?"),
        (["data", "--output", "a"], "shardzoo data needs a command: prepare, merge, "),
        (
            ["generate", "--num-return-sequences", "3"],
            "error: --num-return-sequences 3 must not exceed --num-beams 1; raise --num-beams, or "
            "sample with --do-sample; see",
        ),
        (
            ["data", "prepare"],
            "missing: --output PATH, --tokenizer PATH; see shardzoo data prepare",
        ),
        (
            ["data", "inspect"],
            "missing: PATH (PREFIX of the files); see shardzoo data inspect --help",
        ),
        (["checkpoint"], "expected one of {verify}"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        [shown] = capsys.readouterr().err.splitlines()
        assert shown.startswith("error: ")
        assert line.lower() in shown.lower()
        assert "None" not in shown


def test_a_message_spells_arguments_as_options():
    for message, spelled in (
        ("tie=2 and do_sample=True", "tie=2 and --do-sample"),
        ("a_b must be 3; see config.json of a_b", None),
        ("train_iter=3 is x.train_iter=3", "train_iter=3 is x.train_iter=3"),
        ("set seed=3, not the seed", "set --seed 3, not the seed"),
        (
            "use it (overwrite=True), or --overwrite (overwrite=True)",
            "use it (--overwrite), or --overwrite",
        ),
        ("do_sample=False; do_sampled", "--no-do-sample; do_sampled"),
        ("seed must be 0 or more, not -1", "--seed must be 0 or more, not -1"),
        ("model must be trained", None),
        (
            "target_modules 'x' match nothing; name it in modules_to_save",
            "--lora-target-modules 'x' match nothing; name it in modules_to_save",
        ),
    ):
        names = ("do_sample", "seed", "overwrite", "a_b", "lora_target_modules")
        assert name_options(message, names) == (spelled or message)


def test_a_message_names_options_as_they_were_typed():
    for typed, message, expected in (
        ("--tp 0", "--model-parallel-size must be at least 1", "--tp must be at least 1"),
        ("--tp=0", "use --model-parallel-size 2", "use --tp 2"),
        ("train.log_period=0", "--log-interval must be", "train.log_period must be"),
        ("--batch-size 0", "--micro-batch-size must", "--batch-size must"),
        ("--model-parallel-size 0", "--model-parallel-size must", None),
        ("--tp 2", "--model-parallel-size-x", None),
        ("tp=2 lr=3", "--lr must be above 0", None),
    ):
        assert name_as_typed(message, typed.split()) == (expected or message)


def test_the_choices_of_an_option_are_listed_in_one_order(capsys):
    listed = "Invalid choice 'X' for argument '--task'. Expected one of ('chat', 'None', 'answer')."
    assert "one of answer, chat, not 'X'" in shorten_box(f"title\n| {listed} |\n")


def test_a_shell_completes_commands_options_and_choices(pages, tmp_path):
    script = tmp_path / "completion"
    script.write_text(write_bash(pages))

    def complete(*words: str) -> set[str]:
        line = " ".join(f"'{word}'" for word in words)
        command = (
            f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shardzoo; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert complete("shardzoo", "con") == {"convert"}
    assert {"split", "merge"} <= complete("shardzoo", "convert", "")
    assert complete("shardzoo", "convert", "split", "--mod") == {"--model-parallel-size"}
    assert complete("shardzoo", "generate", "--t") >= {"--tp", "--temperature", "--top-k"}
    assert complete("shardzoo", "estimate", "--recompute", "") >= {"none", "selective", "full"}
    assert complete("shardzoo", "estimate", "gpt2-x") == {"gpt2-xl"}
    assert "mt5-quickstart" in complete("shardzoo", "pretrain", "--model", "mt5-")
    assert "mt5-libai" in complete("shardzoo", "recipes", "mt5-l")
    assert complete("shardzoo", "finetune", "--model", "gpt2-x") == set()
    assert "--objective" in list_options(pages["pretrain"][""])
