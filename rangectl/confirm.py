"""The question before something is destroyed: the user types its path.

Owns the question and its answer; never destroys anything.
"""

from __future__ import annotations

import sys

import click
from rangekv.format.errors import UsageError


def confirm_path(path: str, verb: str, loss: str) -> None:
    """Let the user type `path`; raises UsageError without a terminal or for anything else."""
    if not sys.stdin.isatty():
        raise UsageError("not-confirmed", f"{verb} destroys what is cached; say --yes", path=path)
    click.echo(loss, err=True)
    if click.prompt("Type the path to go on", err=True) != path:
        raise UsageError("not-confirmed", "the path differs; nothing was changed", path=path)
