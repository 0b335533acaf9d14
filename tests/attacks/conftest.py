"""Attacks run with a home of their own."""

from tools.command_line import home, run

__all__ = ["home", "run"]
