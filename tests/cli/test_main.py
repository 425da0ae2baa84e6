"""`shardzoo` finds its commands and says what went wrong."""

from __future__ import annotations

import importlib.util

import pytest

from shardzoo.cli import main as cli


def test_help_lists_every_command(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shardzoo 0.")


def test_unknown_command_names_the_close_one(capsys):
    assert cli.main(["convrt"]) == 2
    assert "did you mean convert?" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_its_module(command):
    assert importlib.util.find_spec(cli.COMMANDS[command][0])
