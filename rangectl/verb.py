"""The shape of every verb: help text with examples and exit status, sizes, the --json switch.

Owns what all verbs share on the command line; never runs a verb and never prints a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem
from rangekv.engine.sizes import parse_size
from rangekv.format.errors import ExitCode, UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])

if TYPE_CHECKING:
    _IntParam = click.ParamType[int]
    _TupleParam = click.ParamType[tuple[Any, ...]]
else:
    # Before click 8.4 the type could not be subscripted.
    _IntParam = _TupleParam = click.ParamType

# By it the script of `rangectl completion` asks what a word may become.
COMPLETE_VARIABLE = "_RANGECTL_COMPLETE"

EXIT_MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "done, nothing wrong found",
    ExitCode.CHECK_FAILED: "a check failed: damage, a rule violated, or not a store",
    ExitCode.USAGE: "arguments that cannot work",
    ExitCode.ENVIRONMENT: "space, owner, mode, file system or no O_DIRECT",
    ExitCode.COLD: "readable, but an open would discard the index",
    ExitCode.UNSUPPORTED: "a version or feature this Range does not know",
    ExitCode.UNRETURNED_WRITE: "a write has not returned; the store stays dirty",
    ExitCode.NO_STORE: "no store there",
    ExitCode.LOCKED: "another process holds the store",
    ExitCode.OTHER_NAMESPACE: "the store belongs to another namespace",
    ExitCode.INTERRUPTED: "interrupted",
}


class _Manual(click.Command):
    """Help that reads: one sentence, two examples, options, EXIT STATUS."""

    def __init__(
        self, *args: Any, examples: Sequence[str], exits: Sequence[ExitCode], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.exits = (ExitCode.OK, ExitCode.USAGE, *exits, ExitCode.INTERRUPTED)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as refused:
            refused.ctx = refused.ctx or ctx  # names the verb whose help helps
            raise

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("EXIT STATUS"):
            formatter.write_dl([(str(int(c)), EXIT_MEANINGS[c]) for c in sorted(self.exits)])


class Verb(_Manual):
    """One verb."""


class VerbGroup(_Manual, click.Group):
    """A verb with subcommands, one of which is meant when none is named."""

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else [self.default, *args])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        meant = self.commands[self.default]
        with click.Context(meant, info_name=self.default, parent=ctx) as inner:
            records = [param.get_help_record(inner) for param in meant.get_params(inner)]
        with formatter.section(f"Options of {self.default}, which is meant where none is named"):
            formatter.write_dl([record for record in records if record is not None])
        self.format_commands(ctx, formatter)


class Size(_IntParam):
    """Bytes as `16GiB`, `512MiB` or a plain number; `16G` is refused as ambiguous."""

    name = "size"

    def __init__(self, multiple_of: int = 1) -> None:
        self.multiple_of = multiple_of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        name = param.opts[0] if param is not None else "size"
        return parse_size(value, name=name, multiple_of=self.multiple_of)


class Listed(_TupleParam):
    """Values of one type with commas between them, as a tuple without repetitions."""

    name = "list"

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self.inner = inner

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value  # a default
        parts = [part.strip() for part in str(value).split(",")]
        return tuple(dict.fromkeys(self.inner.convert(part, param, ctx) for part in parts))


def _not_empty(context: click.Context, argument: click.Parameter, path: str) -> str:
    """Refuse the path of a shell variable that is not set: it is not the working directory."""
    if not path:
        raise UsageError("empty-path", "PATH is empty; name a directory")
    return path


def complete_directory(
    context: click.Context, argument: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete a directory."""
    return [CompletionItem(incomplete, type="dir")]


path_argument = click.argument("path", callback=_not_empty, shell_complete=complete_directory)
"""The PATH of a verb; the function receives it as `path`."""

EXISTING_DIRECTORY = click.Path(exists=True, file_okay=False, readable=False, path_type=Path)


def json_option(function: _Function) -> _Function:
    """Add `--json`; the function receives it as `as_json`."""
    option = click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object; errors too, on stderr."
    )
    return option(function)


def device_option(purpose: str) -> Callable[[_Function], _Function]:
    """Return what adds `--device`, the engine's setting."""
    return click.option(
        "--device",
        default="cpu",
        show_default=True,
        type=click.Choice(["cpu", "cuda"]),
        help=purpose,
    )


def no_such(kind: str, found: str, known: list[str]) -> str:
    """Say that a verb, option or view is unknown, and which one was probably meant."""
    from difflib import get_close_matches

    nearest = get_close_matches(found, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(sorted(known))}"
    return f"no {kind} {found!r}; {hint}"
