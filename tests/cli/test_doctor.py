"""`doctor` tries a directory out, says what to do, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from rangekv.engine.files import Files
from rangekv.engine.payload import gds_probe, requirements
from rangekv.engine.payload.gds_probe import GdsProbe

from rangectl import disk_probe, doctor

NAMES = [
    "directory",
    "file system",
    "preallocation",
    "direct I/O",
    "identity",
    "locks",
    "renames",
    "flush",
    "free space",
    "device",
    "cores",
    "memory",
    "huge pages",
    "GPU direct",
    "payload compat",
    "payload gds",
    "stores",
]


def finding(shown, name: str) -> dict:
    (found,) = [one for one in shown.json["findings"] if one["name"] == name]
    return found


def test_golden_json_and_text(rangectl, tmp_path: Path) -> None:
    shown = rangectl("doctor", tmp_path, "--json")
    assert list(shown.json) == ["schema", "ok", "path", "findings"]
    assert [one["name"] for one in shown.json["findings"]] == NAMES
    for one in shown.json["findings"]:
        assert list(one) == ["name", "verdict", "found", "advice"]
        assert one["verdict"] in ("ok", "warn", "fail", "fact")
        assert (one["advice"] is not None) == (one["verdict"] in ("warn", "fail"))
    text = rangectl("doctor", tmp_path).out.splitlines()
    rows = [line for line in text if not line.startswith("  ")]
    assert [re.split(r"  +", row)[1] for row in rows[:-1]] == NAMES
    assert re.fullmatch(r"\d+ ok, \d+ warn, \d+ fail", text[-1])
    assert os.listdir(tmp_path) == []


def test_a_failing_finding_is_exit_3_and_warnings_are_not(rangectl, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(doctor, "CORES_WARN", 1 << 20)
    shown = rangectl("doctor", tmp_path, "--json")
    assert finding(shown, "cores")["verdict"] == "warn"
    failed = any(one["verdict"] == "fail" for one in shown.json["findings"])
    assert shown.status == (3 if failed else 0)
    monkeypatch.setattr(disk_probe, "SPACE_FAIL_BYTES", 1 << 62)
    shown = rangectl("doctor", tmp_path, "--json")
    assert (shown.status, shown.json["ok"]) == (3, False)
    assert "--capacity" in finding(shown, "free space")["advice"]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to try")
def test_memory_is_no_place_for_a_store(rangectl) -> None:
    shown = rangectl("doctor", "/dev/shm", "--json")
    assert shown.status == 3
    assert finding(shown, "file system")["verdict"] == "fail"
    assert finding(shown, "direct I/O")["verdict"] == "fail"


class Poor(Files):
    """A file system that lacks what its subclass says."""

    def fallocate(self, fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def flock(self, fd, *, shared=False):
        return None

    def rename_noreplace(self, *names):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def inode_generation(self, fd):
        return None

    def direct_alignment(self, fd):
        return 512, 65536

    def filesystem_magic(self, fd):
        return 0x6969


def test_what_a_poor_file_system_lacks_is_said(rangectl, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_probe, "OS_FILES", Poor())
    shown = rangectl("doctor", tmp_path, "--json")
    assert shown.status == 3
    verdicts = {one["name"]: one["verdict"] for one in shown.json["findings"]}
    assert verdicts["file system"] == "warn"
    assert "cold at every start" in finding(shown, "file system")["advice"]
    assert (verdicts["preallocation"], verdicts["locks"], verdicts["renames"]) == (
        "warn",
        "fail",
        "fail",
    )
    assert "Range aligns to 4096" in finding(shown, "direct I/O")["advice"]
    assert "no inode generation" in finding(shown, "identity")["found"]
    assert os.listdir(tmp_path) == []


def test_what_payload_lacks_is_named(rangectl, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(requirements, "importable", lambda name: True)
    monkeypatch.setattr(requirements, "has_driver", lambda: False)
    monkeypatch.setattr(requirements, "has_gpu", lambda files: True)
    monkeypatch.setattr(requirements, "has_udev", lambda files: False)
    shown = rangectl("doctor", tmp_path, "--json")
    assert "GPU there, driver missing" in finding(shown, "GPU direct")["found"]
    assert "/run/udev missing, kvikio there" in finding(shown, "GPU direct")["found"]
    compat, gds = (finding(shown, f"payload {mode}") for mode in ("compat", "gds"))
    assert compat["found"].startswith("refused; missing: libcuda.so.1 (")
    assert "/run/udev" not in compat["found"]
    assert re.match(r"refused; missing: libcuda.so.1 \(.*/run/udev", gds["found"])
    assert (compat["verdict"], gds["verdict"]) == ("fact", "fact")


@pytest.mark.parametrize("proved", [True, False])
def test_gds_is_told_by_the_probe_alone(rangectl, monkeypatch, tmp_path: Path, proved) -> None:
    def probe(path: str) -> GdsProbe:
        assert Path(path).stat().st_size == gds_probe.PROBE_BYTES
        return GdsProbe(proved, "path=x")

    monkeypatch.setattr(requirements, "missing", lambda mode, direct: [])
    monkeypatch.setattr(gds_probe, "probe", probe)
    shown = rangectl("doctor", tmp_path, "--json")
    assert finding(shown, "payload compat")["found"] == "nothing is missing"
    word = "proved" if proved else "refused, unproved"
    assert finding(shown, "payload gds")["found"] == f"{word}: path=x"
    assert os.listdir(tmp_path) == []


def test_the_stores_of_the_directory_are_looked_at(rangectl, scene) -> None:
    assert finding(rangectl("doctor", scene.store.parent, "--json"), "stores") == {
        "name": "stores",
        "verdict": "ok",
        "found": "1 store: warm",
        "advice": None,
    }
    (scene.store / "range.dirty").touch()
    found = finding(rangectl("doctor", scene.store.parent, "--json"), "stores")
    assert (found["verdict"], found["found"]) == ("warn", "1 store: cold (dirty-marker)")


def test_a_directory_that_is_none(rangectl, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "nope"):
        refused = rangectl("doctor", tmp_path / name)
        assert (refused.status, refused.out) == (2, "")
        assert "[not-a-directory]" in refused.err
