"""`rangectl completion`: the script with which a shell completes verbs, views and options.

Owns the choice of the shell; click writes the script, and the script asks rangectl itself.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class
from rangekv.format.errors import ExitCode

from rangectl.output import Output
from rangectl.verb import COMPLETE_VARIABLE, Verb, json_option

SHELLS = ("bash", "zsh", "fish")


@click.command(
    cls=Verb,
    help="Print the completion script of a shell.",
    examples=(
        'eval "$(rangectl completion bash)"',
        "rangectl completion fish > ~/.config/fish/completions/rangectl.fish",
    ),
    exits=(),
)
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
def command(*, shell: str, as_json: bool) -> int:
    """Print the script; it holds no list of verbs that could grow old."""
    kind = get_completion_class(shell)
    assert kind is not None, f"click completes no {shell}"
    group = click.Group("rangectl")
    source = kind(group, {}, "rangectl", COMPLETE_VARIABLE).source_template % {
        "complete_func": "_rangectl_completion",
        "complete_var": COMPLETE_VARIABLE,
        "prog_name": "rangectl",
    }
    Output("completion", as_json=as_json).result(
        True, {"shell": shell, "script": source}, source.splitlines()
    )
    return ExitCode.OK
