"""The `rangectl` command: finds the verb, imports only that, turns every error into one line.

Owns exit codes and error lines; never does a verb's work.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click
from rangekv.format.errors import EnvironmentFault, ExitCode, InvariantError, RangeError, UsageError

from rangectl import output, process
from rangectl.verb import COMPLETE_VARIABLE, EXIT_MEANINGS, no_such

VERBS: dict[str, str] = {
    "init": "Preallocate a store.",
    "format": "Give an existing store a new identity and an empty index.",
    "inspect": "Show what a store holds and what an open would make of it.",
    "verify": "Check a store's structure and, on request, its payload.",
    "recover": "Keep what the journal of a killed session proves.",
    "drop": "Take a namespace, a tenant's root or a record out of closed stores.",
    "doctor": "Tell whether a directory will work for stores, and how well.",
    "completion": "Print the completion script of a shell.",
    "bench": "Measure the raw speed of a directory's disk in 32 MiB spans.",
    "restore-benchmark": "Measure what restoring a prefix costs, at every object size.",
    "serve-benchmark": "Measure how soon a vLLM server that restores a prefix answers.",
    "replay-fault": "Show on this file system that the ownership rules hold.",
}

_WIDTH = {"max_content_width": 100}


class VerbTable(click.Group):
    """The verbs by name; a verb's module is imported when the verb is used, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = import_module(f"rangectl.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UsageError("unknown-verb", no_such("verb", args[0], list(VERBS)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("EXIT STATUS"):
            formatter.write_dl([(str(int(code)), text) for code, text in EXIT_MEANINGS.items()])


def _show_versions(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Print what a report of a defect needs, without importing any of it."""
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    from rangekv.format.superblock import VERSION_MAJOR, VERSION_MINOR

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    lines = [f"rangectl {installed('rangekv')}", f"format {VERSION_MAJOR}.{VERSION_MINOR}"]
    lines.append(f"python {sys.version.split()[0]}")
    lines += [f"{name} {installed(name)}" for name in ("xxhash", "numpy", "torch", "vllm")]
    click.echo("\n".join(lines))
    context.exit()


@click.command(cls=VerbTable, subcommand_metavar="VERB [ARGS]...", context_settings=_WIDTH)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    help="Show versions.",
    callback=_show_versions,
)
def rangectl() -> None:
    """Make, check and measure the stores of Range, a KV cache on NVMe."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit status."""
    process.settle_streams()
    process.interrupt_once()
    question = os.environ.get(COMPLETE_VARIABLE)
    if question is not None:
        sys.exit(complete(question))
    status = run(list(sys.argv[1:] if arguments is None else arguments))
    process.ignore_interrupts()
    sys.exit(status)


def complete(instruction: str) -> int:
    """Answer a completion script's question, such as `bash_complete`; the words are in COMP_*."""
    from click.shell_completion import shell_complete

    return shell_complete(rangectl, {}, "rangectl", COMPLETE_VARIABLE, instruction)


def run(args: list[str]) -> int:
    """Run one command line and return its exit status; no exception leaves this function."""
    as_json = "--json" in args
    try:
        with rangectl.make_context("rangectl", args) as context:
            status = rangectl.invoke(context)
            return int(status or 0)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        fault: RangeError = Interrupted(
            "interrupted", "interrupted; what was unfinished is removed"
        )
    except click.exceptions.NoArgsIsHelpError as shown:
        click.echo(shown.ctx.get_help() if shown.ctx else "", err=True)
        return int(ExitCode.USAGE)
    except click.ClickException as refused:
        fault = _from_click(refused)
    except RangeError as raised:
        fault = raised
    except BrokenPipeError:
        output.discard(sys.stdout)  # the reader of a help text has gone away
        return int(ExitCode.OK)
    except OSError as raised:
        fault = _from_os(raised)
    except Exception as raised:
        if os.environ.get("RANGECTL_TRACEBACK"):
            raise
        fault = InvariantError(
            "internal",
            f"{type(raised).__name__}: {raised}; this is a defect of Range: please report it"
            " with the output under RANGECTL_TRACEBACK=1",
        )
    output.error(fault, as_json=as_json)
    return int(fault.exit_code)


class Interrupted(RangeError):
    """The user stopped the verb."""

    exit_code = ExitCode.INTERRUPTED


def _from_click(refused: click.ClickException) -> RangeError:
    """Say in one line what click found wrong with the arguments."""
    message = " ".join(refused.format_message().split()).rstrip(".")
    context = refused.ctx if isinstance(refused, click.UsageError) else None
    where = "rangectl" if context is None else context.command_path
    if isinstance(refused, click.NoSuchOption):
        known = _options(context) if context else []
        message = no_such("option", refused.option_name, known)
    return UsageError("usage", f"{message}; see {where} --help")


def _options(context: click.Context) -> list[str]:
    options = [opt for param in context.command.get_params(context) for opt in param.opts]
    return [opt for opt in options if opt.startswith("-")]


def _from_os(raised: OSError) -> RangeError:
    """Turn an operating system error that no layer below has named into one line."""
    if raised.errno == errno.ENOENT and raised.filename is None:
        return EnvironmentFault(
            "no-working-directory", "the working directory has been removed; change to another"
        )
    from rangekv.engine.faults import environment_fault

    path = raised.filename if isinstance(raised.filename, str) else None
    return environment_fault(raised, path, "go on")
