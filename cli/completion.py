"""`shardzoo completion`: prints what completes commands, options and choices in a shell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import tyro

from ..files.verbosity import OPTIONS
from ..models.family_table import presets
from .console import run_and_report
from .help import HelpPage, show_help
from .parsing import parse_words
from .recipes import list_recipes
from .spellings import SHORT_NAMES

BASH = """# Completes shardzoo's commands, options and choices.
_shardzoo() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}"
    local before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}"
    local words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "$command ${{COMP_WORDS[2]}}" in
{nested}
        esac
        if [ -z "$words" ]; then
            case "$command" in
{options}
            esac
        fi
        case "$before" in
{choices}
        esac
        case "$command $before" in
            "pretrain --model") words="{presets}" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _shardzoo shardzoo
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True)
class Completion:
    """Prints the completion of a shell.

    For bash: mkdir -p ~/.local/share/bash-completion/completions
              shardzoo completion bash > ~/.local/share/bash-completion/completions/shardzoo

    For zsh: shardzoo completion zsh >> ~/.zshrc
    """

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional] = "bash"


HELP = HelpPage("shardzoo completion", Completion)


def list_pages() -> dict[str, Mapping[str, HelpPage]]:
    """Returns the help pages of all commands: of a command without commands of its own, under an
    empty name.
    """
    from . import (
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
    from .board import command as board

    return {
        "pretrain": {"": pretrain.help_page("gpt")},
        "finetune": {"": finetune.help_page()},
        "board": {"": board.HELP},
        "checkpoint": checkpoint.HELP,
        "generate": {"": generate.HELP},
        "convert": convert.HELP,
        "models": {"": models.HELP},
        "recipes": {"": recipes.HELP},
        "data": data.HELP,
        "estimate": {"": estimate.HELP},
        "plan": {"": plan.HELP},
        "doctor": {"": doctor.HELP},
        "bench": {"kernels": bench.HELP},
        "completion": {"": HELP},
    }


def list_options(page: HelpPage) -> dict[str, Sequence[str]]:
    """Returns the options of a command, each with its choices, if it has any."""
    hints = get_type_hints(page.arguments, include_extras=True)
    options: dict[str, Sequence[str]] = dict.fromkeys(("--help", "--help-all", *OPTIONS), ())
    for item in fields(page.arguments):
        markers = getattr(hints[item.name], "__metadata__", ())
        if tyro.conf.Positional in markers or tyro.conf.Suppress in markers:
            continue
        choices: list[str] = []
        for kind in (hints[item.name], *get_args(hints[item.name])):
            if get_origin(kind) is Literal:
                choices = [str(choice) for choice in get_args(kind) if choice is not None]
        options[f"--{item.name.replace('_', '-')}"] = choices
        if item.name in SHORT_NAMES:
            options[SHORT_NAMES[item.name]] = ()
    return options


def write_bash(pages: Mapping[str, Mapping[str, HelpPage]]) -> str:
    """Returns the script for bash.

    Presets are offered as the model of the commands that need no weights.
    """
    names = [name for name, _ in presets()]
    named = {"estimate": names, "plan": names, "models": names, "recipes": list(list_recipes())}
    nested: list[str] = []
    options: list[str] = []
    all_choices: dict[str, set[str]] = {}
    for command, own in pages.items():
        for name, page in own.items():
            found = list_options(page)
            for option, choices in found.items():
                all_choices.setdefault(option, set()).update(choices)
            if name:
                nested.append(f'            "{command} {name}") words="{" ".join(found)}" ;;')
            else:
                words = " ".join([*named.get(command, ()), *found])
                options.append(f'                {command}) words="{words}" ;;')
        if "" not in own:
            options.append(f'                {command}) words="{" ".join(own)}" ;;')
    with_choices: list[str] = []
    for option, values in all_choices.items():
        if values:
            with_choices.append(f'            {option}) words="{" ".join(sorted(values))}" ;;')
    return BASH.format(
        commands=" ".join(pages),
        nested="\n".join(nested),
        presets=" ".join(names),
        options="\n".join(options),
        choices="\n".join(with_choices),
    )


def main(argv: list[str]) -> int:
    """Runs the command. Returns 0."""
    show_help(HELP, argv)
    command = parse_words(Completion, argv, HELP.program)

    def work() -> int:
        script = write_bash({**list_pages(), "lm-eval": {"": HelpPage("", Nothing)}})
        print(script if command.shell == "bash" else ZSH + script, end="")
        return 0

    return run_and_report(work)


@dataclass(frozen=True)
class Nothing:
    """The options of lm-eval, which are that program's own."""
