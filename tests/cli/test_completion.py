"""Shell completion: scripts that a shell accepts, and the answers they get."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rangectl.cli import VERBS
from rangectl.verb import COMPLETE_VARIABLE

COMMAND = [sys.executable, "-c", "from rangectl.cli import main; main()"]


def answers(*words: str) -> list[str]:
    """What a bash script would be told for the last word."""
    done = subprocess.run(
        COMMAND,
        env={
            **os.environ,
            COMPLETE_VARIABLE: "bash_complete",
            "COMP_WORDS": " ".join(["rangectl", *words]),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_that_it_can_read(rangectl, shell: str) -> None:
    shown = rangectl("completion", shell)
    assert (shown.status, shown.err) == (0, "")
    assert f"{COMPLETE_VARIABLE}={shell}_complete" in shown.out
    assert rangectl("completion", shell, "--json").json["script"].strip() == shown.out.strip()
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=shown.out, text=True, check=True)


def test_verbs_views_and_options_are_completed() -> None:
    assert answers("") == [f"plain,{verb}" for verb in VERBS]
    assert answers("do") == ["plain,doctor"]
    assert answers("inspect", "/kv", "s") == ["plain,superblock", "plain,snapshot"]
    assert "plain,--read-data-subset" in answers("verify", "--read")
    assert answers("completion", "z") == ["plain,zsh"]
    assert answers("verify", "/k")[0].startswith("dir,")


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    if not shutil.which("bash"):
        pytest.skip("no bash")
    tool = tmp_path / "rangectl"
    tool.write_text(f"#!{sys.executable}\nfrom rangectl.cli import main\nmain()\n")
    tool.chmod(0o755)
    script = (
        'eval "$(rangectl completion bash)"\n'
        "COMP_WORDS=(rangectl dro); COMP_CWORD=1\n"
        '_rangectl_completion rangectl; echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "drop\n"


def test_an_unknown_shell(rangectl) -> None:
    refused = rangectl("completion", "csh")
    assert (refused.status, refused.out) == (2, "")
