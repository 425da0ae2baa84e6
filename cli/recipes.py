"""Implements `shardzoo recipes`: lists the recipes of the package, or prints one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .console import run_and_report
from .help import HelpPage, show_help
from .parsing import list_fields, parse_words

RECIPES = Path(__file__).parents[1] / "recipes"
TASKS = RECIPES / "tasks"


@dataclass(frozen=True)
class RecipesArguments:
    """Lists the recipes of `pretrain` and `finetune`, or prints one."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe, whose file is printed: where its values are from, the hardware, and the values."""


HELP = HelpPage("shardzoo recipes", RecipesArguments)


def main(argv: list[str]) -> int:
    """Runs the command. Returns 2 after a user's error."""
    show_help(HELP, argv)
    arguments = parse_words(RecipesArguments, argv, HELP.program)
    return run_and_report(lambda: run(arguments), options=list_fields(RecipesArguments))


def list_recipes() -> dict[str, Path]:
    """Returns the files of all recipes, by their names."""
    files = (*sorted(RECIPES.glob("*.yaml")), *sorted(TASKS.glob("*.yaml")))
    return {path.stem: path for path in files}


def run(arguments: RecipesArguments) -> int:
    """Prints the list or a recipe. Raises ValueError if there is none of the name."""
    files = list_recipes()
    name = arguments.name
    if name is None:
        width = max(map(len, files))
        print(f"{'recipe':{width}}  command   what is trained")
        for stem, path in files.items():
            command, title = read_title(path)
            print(f"{stem:{width}}  {command}  {title}")
        print(f"\nThe files are in {RECIPES}.")
        print(
            "`shardzoo pretrain --model NAME` takes the recipe of a model; --config FILE takes any."
        )
        print("`shardzoo recipes NAME` prints one.")
        return 0
    if name not in files:
        close = difflib.get_close_matches(name, files, n=1)
        hint = f"did you mean {close[0]}?" if close else "`shardzoo recipes` lists all"
        raise ValueError(f"there is no recipe {name!r}; {hint}")
    print(f"# {files[name]}")
    print(files[name].read_text(encoding="utf-8"), end="")
    return 0


def read_title(path: Path) -> tuple[str, str]:
    """Returns the command of a recipe, and the first sentence of the comment at its top.

    The comment may begin with a line of the command.
    """
    command = "pretrain"
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# shardzoo "):
            command = line.split()[2]
        elif line.startswith("#"):
            words += line.removeprefix("#").split()
        else:
            break
    return command, " ".join(words).partition(". ")[0].removesuffix(".")
