"""Every command's help page: it fits a screen, groups the options, and begins with what is required."""

from __future__ import annotations

import contextlib
import io
import re
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
import tyro
from commands import user_environment

from shardzoo.cli import (
    bench,
    checkpoint,
    convert,
    data,
    doctor,
    estimate,
    finetune,
    generate,
    models,
    plan,
    pretrain,
    recipes,
)
from shardzoo.cli import main as cli
from shardzoo.cli.board import command as board
from shardzoo.cli.help import HelpPage
from shardzoo.cli.help.page import shorten

SCREEN = 48  # lines
COLUMNS = (80, 120)
PAGES = [
    pretrain.help_page("gpt"), finetune.help_page(), generate.HELP, models.HELP, recipes.HELP, estimate.HELP, plan.HELP,
    board.HELP, doctor.HELP, bench.HELP, *convert.HELP.values(), *data.HELP.values(), *checkpoint.HELP.values(),
]  # fmt: skip


def shown(*words: str) -> str:
    """What `shardzoo WORDS` prints before it ends with exit code 0."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code
    assert code == 0, words
    return output.getvalue().rstrip("\n")


def commands_on(page: str) -> list[str]:
    """The commands that a page lists in its groups: words without dashes or capitals."""
    return re.findall(r"^  ([a-z][a-z-]*)  ", page, re.MULTILINE)


def every_command(*before: str) -> Iterator[tuple[str, ...]]:
    """All commands, found by reading the pages as a user does."""
    yield before
    for name in commands_on(shown(*before, "--help")):
        yield from every_command(*before, name)


COMMANDS = sorted(
    {(), *((name,) for name in cli.COMMANDS), *(tuple(page.program.split()[1:]) for page in PAGES)}
)


def test_a_reader_of_the_pages_finds_every_command():
    assert sorted(every_command()) == COMMANDS


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(words) or "shardzoo")
def test_a_page_fits_a_screen_and_begins_with_what_is_required(words, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown(*words, "--help").split("\n")
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= max(columns, len(lines[0]))
    assert lines[0].startswith(f"usage: {' '.join(['shardzoo', *words])} ")
    titles = [line for line in lines[1:] if re.fullmatch(r"[\w, ]+:", line)]
    assert titles or words == ("doctor",)
    assert "required:" not in titles[1:]
    entries = [line for line in lines if line.startswith("  ")]
    assert all(re.match(r"  \S+", line) for line in entries), "a line for each entry"
    assert all(len(line.split("  ", 2)[2].strip()) > 3 for line in entries), "each says what it is"
    if columns > COLUMNS[0]:
        options = [line for line in entries if line.startswith("  --")]
        cut = [
            line for line in options if line.endswith(" ...") or line.count("{") > line.count("}")
        ]
        assert not cut


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.program.removeprefix("shardzoo "))
def test_the_whole_page_has_every_option_of_the_command(page: HelpPage, monkeypatch):
    """tyro's own help is the oracle: which options there are, and which must be given."""
    monkeypatch.setenv("COLUMNS", "200")
    parser = io.StringIO()
    with contextlib.redirect_stdout(parser), pytest.raises(SystemExit):
        tyro.cli(page.arguments, args=["--help"], prog=page.program)
    theirs = re.sub(r"[│╭╰─╮╯]", " ", parser.getvalue())
    options = set(re.findall(r"^ *(--[a-z][\w.-]*)", theirs, re.MULTILINE)) - {"--help"}
    whole = shown(*page.program.split()[1:], "--help-all").replace("--[no-]", "--")
    assert options <= set(re.findall(r"^ *(--[a-z][\w.-]*)", whole, re.MULTILINE))
    required = whole.partition("required:")[2].partition("\n\n")[0]
    for name in re.findall(r"^ *(--[a-z][\w.-]*)[^-]*?\(required\)", theirs, re.MULTILINE):
        assert name in required
    assert "shows the texts in full" not in whole


@pytest.mark.parametrize(
    ("text", "room", "short"),
    [
        ("Seconds. For never, 0.", 40, "Seconds"),
        ("Number of stages: each holds a part of the blocks.", 30, "Number of stages: each ..."),
        ("Number of pipeline stages: each holds a part.", 30, "Number of pipeline stages"),
        (
            "A preset, or a folder with a config.json",
            60,
            "A preset, or a folder with a config.json",
        ),
        ("", 10, ""),
    ],
)
def test_shortened(text, room, short):
    assert shorten(text, room) == short


@pytest.mark.parametrize(
    ("program", "most"),
    [("import shardzoo", 1.0), ("from shardzoo.cli.main import main; main([])", 0.5)],
)
def test_a_simple_command_starts_at_once(program, most):
    """Seconds of a processor, which other programs do not change; the loading of torch alone takes more."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    heavy = (
        "import sys; assert not {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", f"{program}; {heavy}"]
    subprocess.run(command, env=user_environment(), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < most
