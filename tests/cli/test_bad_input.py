"""Wrong input ends in one clear line, its exit status, no traceback, and nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rangekv.engine.files import Files
from rangekv.format import errors
from rangekv.format.errors import ExitCode

from rangectl import cli

STORE_VERBS = ("inspect", "verify", "format")


def require_one_line(result, status: int, *words: str) -> None:
    assert (result.status, result.out) == (status, "")
    assert result.err.count("\n") == 1
    assert result.err.startswith("rangectl: ")
    for word in words:
        assert word in result.err


@pytest.mark.parametrize("verb", STORE_VERBS)
def test_a_missing_directory_and_one_without_stores(rangectl, tmp_path: Path, verb: str) -> None:
    require_one_line(rangectl(verb, tmp_path / "nope"), 10, "no such directory", "[no-store]")
    require_one_line(rangectl(verb, tmp_path), 10, "rangectl init", "[no-store]")


@pytest.mark.parametrize("verb", STORE_VERBS)
def test_a_mode_that_lets_others_in(rangectl, scene, verb: str) -> None:
    scene.store.chmod(0o755)
    require_one_line(rangectl(verb, scene.store), 3, "mode 0755", "chmod")
    scene.store.chmod(0o700)
    (scene.store / "range.pack").chmod(0o644)
    require_one_line(rangectl(verb, scene.store), 3, "mode 0644", "chmod 600")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_owner(rangectl, scene) -> None:
    os.chown(scene.store / "range.pack", 12345, 12345)
    require_one_line(rangectl("inspect", scene.store), 3, "user 12345", "[wrong-owner]")


def test_no_space(rangectl, tmp_path: Path) -> None:
    refused = rangectl("init", tmp_path / "kv", "--capacity", "4PiB")
    require_one_line(refused, 3, "bytes are needed", "[no-space]")
    assert not (tmp_path / "kv").exists()
    require_one_line(rangectl("bench", "--dir", tmp_path, "--size", "4PiB"), 3, "[no-space]")
    big = rangectl("restore-benchmark", "--dir", tmp_path, "--payload", "1PiB")
    require_one_line(big, 3, "[no-space]")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "word"),
    [
        ("16G", "16GiB"),
        ("16GB", "16GiB"),
        ("-1", "positive"),
        ("0", "positive"),
        ("", "not a size"),
        ("lots", "not a size"),
        ("1.5GiB", "fraction"),
    ],
)
def test_sizes_that_are_none(rangectl, tmp_path: Path, size: str, word: str) -> None:
    refused = rangectl("init", tmp_path / "kv", "--capacity", size)
    require_one_line(refused, 2, "--capacity", word, "[bad-size]")
    assert list(tmp_path.iterdir()) == []


def test_a_capacity_that_is_too_small_names_the_smallest(rangectl, tmp_path: Path) -> None:
    refused = rangectl(
        *("init", tmp_path / "kv", "--capacity", "1MiB", "--layers", 32),
        *("--token-bytes", 4096, "--block-tokens", 8, "--namespace", "model=x"),
    )
    require_one_line(refused, 2, "smallest that works is 8388608 bytes", "[capacity-too-small]")
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_missing(rangectl, tmp_path: Path) -> None:
    refused = rangectl("init", tmp_path / "a" / "b" / "c", "--capacity", "8MiB")
    require_one_line(refused, 2, "[parent-missing]")


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_an_unknown_option(rangectl, verb: str) -> None:
    require_one_line(rangectl(verb, "--no-such-option"), 2, "--no-such-option", "--help")


@pytest.mark.parametrize("verb", ["init", *STORE_VERBS])
def test_a_missing_argument(rangectl, verb: str) -> None:
    require_one_line(rangectl(verb), 2, "PATH", f"see rangectl {verb} --help")


def test_a_second_process_that_holds_the_lock(rangectl, scene) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rangekv.engine.testing.scene import Scene\n"
        "engine = Scene(Path(sys.argv[1]), seed=0).open()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
        "engine.close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(scene.store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for verb in ("verify", "format"):
            refused = rangectl(verb, scene.store, *(["--yes"] if verb == "format" else []))
            require_one_line(refused, 11, f"process {holder.pid}", "[store-locked]")
        assert f"live (process {holder.pid}" in rangectl("inspect", scene.store).out
        assert holder.stdin is not None
        holder.stdin.close()
        assert holder.wait() == 0
    assert rangectl("verify", scene.store, "--read-data").status == 0


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.FormatError, 1),
        (errors.NotAStore, 1),
        (errors.UsageError, 2),
        (errors.EnvironmentFault, 3),
        (errors.UnsupportedVersion, 5),
        (errors.UnreturnedWrite, 6),
        (errors.StoreMissing, 10),
        (errors.StoreLocked, 11),
        (errors.OtherNamespace, 12),
    ],
)
def test_every_kind_of_error_has_its_exit_status(rangectl, monkeypatch, kind, status: int) -> None:
    def refuse(*args: object) -> None:
        raise kind("some-code", "found this, expected that; do so", path="/kv", offset=7)

    monkeypatch.setattr("rangectl.verify.one_store", refuse)
    require_one_line(rangectl("verify", "/kv"), status, "/kv: found this", "[some-code]")
    fields = rangectl("verify", "/kv", "--json").json
    assert fields == {
        "schema": "rangectl.error/1",
        "ok": False,
        "code": "some-code",
        "message": "found this, expected that; do so",
        "path": "/kv",
        "offset": 7,
        "exit": status,
    }
    assert ExitCode(status)


def test_an_interrupt_ends_in_130(rangectl, monkeypatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rangectl.verify.one_store", interrupt)
    require_one_line(rangectl("verify", "/kv"), 130, "[interrupted]")


@pytest.mark.parametrize("verb", ["init", *STORE_VERBS])
def test_an_empty_path_is_not_the_working_directory(rangectl, scene, monkeypatch, verb) -> None:
    monkeypatch.chdir(scene.store)
    more = {"init": ["--capacity", "8MiB"], "format": ["--yes"]}.get(verb, [])
    require_one_line(rangectl(verb, "", *more), 2, "PATH is empty", "[empty-path]")
    assert "2 records" in rangectl("inspect", ".").out


@pytest.mark.parametrize("verb", ["bench", "restore-benchmark"])
def test_a_directory_that_is_missing_or_a_file(rangectl, tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "nope", ""):
        place = tmp_path / name if name else ""
        require_one_line(rangectl(verb, "--dir", place), 2, "--dir", f"see rangectl {verb} --help")


def test_a_file_or_a_link_in_the_place_of_a_store(rangectl, scene, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(scene.store)
    for verb in STORE_VERBS:
        pack = scene.store / "range.pack"
        require_one_line(rangectl(verb, pack), 2, "found a file", "[not-a-directory]")
        require_one_line(rangectl(verb, tmp_path / "link"), 3, "real path", "[symlink]")


def test_a_format_that_cannot_work_says_so_in_a_dry_run_too(rangectl, scene) -> None:
    os.truncate(scene.store / "range.pack", 1 << 20)
    for how in ("--dry-run", "--yes"):
        require_one_line(rangectl("format", scene.store, how), 1, "[truncated-pack]")
        assert (scene.store / "range.snapshot").exists()


def test_an_option_without_its_value_names_the_verb(rangectl, tmp_path: Path) -> None:
    require_one_line(rangectl("init", tmp_path, "--capacity"), 2, "see rangectl init --help")
    assert "path" not in rangectl("inspect", "-dash").err.partition("known:")[2].split(";")[0]


@pytest.mark.parametrize("verb", ["restore-benchmark", "replay-fault"])
def test_a_file_system_that_proves_no_identity(
    rangectl, tmp_path: Path, monkeypatch, verb: str
) -> None:
    overlayfs = 0x794C7630
    monkeypatch.setattr(Files, "filesystem_magic", lambda self, fd: overlayfs)
    refused = rangectl(verb, "--dir", tmp_path)
    require_one_line(refused, 3, "overlayfs", "mounted volume", "[unsupported-filesystem]")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_may_not_be_listed_is_not_taken_for_an_empty_one(
    rangectl, tmp_path: Path, monkeypatch
) -> None:
    hidden = tmp_path / "kv" / "blank" / "rank-0-of-1"
    hidden.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda place, mode: str(place) != str(hidden))
    for path in (hidden, tmp_path / "kv"):
        require_one_line(rangectl("inspect", path), 3, str(hidden), "[permission]")
