"""The command line as a whole: help, imports, errors, exit status, closed pipes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rangekv.format.errors import ExitCode

from rangectl import cli
from rangectl.cli import VERBS
from rangectl.cli import rangectl as group
from rangectl.verb import EXIT_MEANINGS, Verb

VERB_NAMES = sorted(VERBS)
COMMAND = [sys.executable, "-m", "rangectl"]


def run(*arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, **kwargs
    )


def imported_by(*arguments: str) -> set[str]:
    script = (
        "import sys, contextlib, io\n"
        "from rangectl.cli import run\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    assert run({list(arguments)!r}) == 0\n"
        "print(' '.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "rich", "numpy", "vllm", "msgpack", "xxhash"}
    assert imported_by("--help") & heavy == set()


@pytest.mark.parametrize("verb", VERB_NAMES)
def test_no_verb_imports_for_its_help_what_only_its_work_needs(verb: str) -> None:
    heavy = {"torch", "vllm", "rich", "numpy", "rangekv.engine.engine"}
    assert imported_by(verb, "--help") & heavy == set()


@pytest.mark.parametrize("verb", VERB_NAMES)
def test_help_has_a_sentence_two_examples_options_and_exit_status(verb: str) -> None:
    shown = run(verb, "--help")
    assert shown.returncode == 0
    assert shown.stderr == ""
    text = shown.stdout
    order = [text.index(part) for part in (VERBS[verb], "Examples:", "--json", "EXIT STATUS:")]
    assert order == sorted(order)
    assert text.count(f"rangectl {verb}") >= 3, "usage and two examples name the verb"


def test_the_table_of_verbs_says_what_each_verb_says_itself() -> None:
    context = group.make_context("rangectl", ["init", "--help"], resilient_parsing=True)
    for verb, sentence in VERBS.items():
        command = group.get_command(context, verb)
        assert command is not None
        assert (command.help or "").startswith(sentence)


def test_every_exit_status_is_explained_and_none_has_changed() -> None:
    assert {int(code) for code in EXIT_MEANINGS} == {0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 130}
    assert set(EXIT_MEANINGS) == set(ExitCode)


def test_the_help_and_the_readme_list_the_exit_codes_that_there_are() -> None:
    codes = {int(code) for code in ExitCode}
    section = run("--help").stdout.partition("EXIT STATUS:")[2]
    assert {int(line.split()[0]) for line in section.splitlines() if line.strip()} == codes
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    (paragraph,) = [one for one in readme.split("\n\n") if one.startswith("Exit status: ")]
    told = paragraph.replace("\n", " ").removeprefix("Exit status: ").split(" · ")
    assert {int(one.split()[0]) for one in told} == codes
    for verb in VERB_NAMES:
        listed = run(verb, "--help").stdout.partition("EXIT STATUS:")[2].splitlines()
        assert {int(line.split()[0]) for line in listed if line.strip()} <= codes


def test_an_unknown_verb_names_its_nearest_match() -> None:
    refused = run("inspct")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr == "rangectl: no verb 'inspct'; did you mean inspect? [unknown-verb]\n"


def test_an_unknown_option_names_its_nearest_match() -> None:
    refused = run("init", "/nowhere", "--capcity", "1GiB")
    assert refused.returncode == 2
    assert "no option '--capcity'; did you mean --capacity?" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_errors_are_one_object_under_json() -> None:
    refused = run("inspct", "--json")
    assert refused.returncode == 2
    fields = json.loads(refused.stderr)
    assert list(fields)[:2] == ["schema", "ok"]
    assert (fields["ok"], fields["code"], fields["exit"]) == (False, "unknown-verb", 2)


def test_no_arguments_show_the_help_and_are_a_usage_error() -> None:
    shown = run()
    assert shown.returncode == 2
    assert "Verbs:" in shown.stderr


def test_version_names_what_matters() -> None:
    shown = run("--version")
    assert shown.returncode == 0
    names = [line.split()[0] for line in shown.stdout.splitlines()]
    assert names[0] == "rangectl"
    assert {"python", "xxhash", "torch", "format"} <= set(names)


@pytest.mark.parametrize("arguments", [["replay-fault", "list"], ["--help"], ["init", "--help"]])
def test_a_reader_that_leaves_is_not_an_error(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*COMMAND, *arguments], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_disk_that_is_full_of_other_output_is_not_taken_for_the_store_s() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "replay-fault", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 3
        assert done.stderr.startswith("rangectl: the verb has run, but stdout cannot be written")
        assert done.stderr.count("\n") == 1
        lost = subprocess.run([*COMMAND, "inspct"], stderr=full, check=False)
        assert lost.returncode == 2, "the exit status tells where stderr cannot"


def test_closed_standard_streams_are_no_place_for_files_and_no_defect() -> None:
    script = f"exec {shlex.join(COMMAND)} replay-fault list <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", script], check=False).returncode == 0
    script = f"exec {shlex.join(COMMAND)} inspct >&- 2>&-"
    assert subprocess.run(["sh", "-c", script], check=False).returncode == 2


def test_a_terminal_without_unicode_gets_escapes() -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    shown = run("replay-fault", "run", "stale-ticket", env=ascii_only)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert r"lookup \u2192 retired" in shown.stdout


def test_a_name_with_line_ends_stays_one_line() -> None:
    refused = run("inspect", "/nowhere/a\nb\x1b[31m")
    assert refused.stderr == (
        r"rangectl: /nowhere/a\nb\x1b[31m: there is no such directory [no-store]" + "\n"
    )


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    script = f"mkdir gone; cd gone; rmdir ../gone; exec {shlex.join(COMMAND)} inspect here"
    gone = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert gone.returncode == 3
    assert "the working directory has been removed" in gone.stderr


def test_a_defect_is_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Verb, context: object) -> None:
        raise RuntimeError("something we never thought of")

    monkeypatch.setattr(Verb, "invoke", broken)
    assert cli.run(["replay-fault", "list"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "RuntimeError: something we never thought of" in shown
