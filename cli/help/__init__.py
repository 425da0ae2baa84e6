"""The help pages of the commands."""

from .page import HelpPage, show_commands, show_help

__all__ = ["HelpPage", "show_commands", "show_help"]
