"""Which path payload takes, what is needed for it, and what counts as proof that it was taken."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rangekv.engine import EngineConfig
from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.payload import gds_probe, path, requirements
from rangekv.engine.payload.cufile_stats import Calls, CufileStats, Level3, PerGpu
from rangekv.engine.payload.evidence import Evidence
from rangekv.engine.payload.gds_probe import GdsProbe, probe
from rangekv.engine.payload.path import open_payload
from rangekv.engine.payload.posix import PosixPayload
from rangekv.engine.payload.requirements import missing
from rangekv.format.errors import EnvironmentFault, UsageError
from support.required import required
from support.rig import Rig

MIB = 1 << 20


@pytest.mark.parametrize(
    ("evidence", "proves"),
    [
        (Evidence(0, 0), "unproved"),
        (Evidence(0, 0, Calls(0, 0)), "unproved"),
        (Evidence(1, 0), "cufile-compat"),
        (Evidence(1, MIB, Calls(8, 0)), "cufile-compat"),
        (Evidence(0, MIB), "unproved"),  # the name of a backend, and no more
        (Evidence(0, MIB, Calls(0, 0)), "unproved"),
        (Evidence(0, MIB, Calls(0, 8)), "cufile-compat"),
        (Evidence(0, MIB, Calls(7, 1)), "cufile-compat"),
        (Evidence(0, MIB, Calls(8, 0)), "cufile-gds"),
        (Evidence(0, 0, Calls(8, 0)), "unproved"),  # of another user of cuFile
    ],
)
def test_what_evidence_proves(evidence: Evidence, proves: str) -> None:
    assert evidence.path == proves
    assert evidence.line().startswith(f"path={proves} host_bytes={evidence.host_bytes} ")


def test_what_nobody_told_is_said_to_be_unknown() -> None:
    assert Evidence(5, 6).line() == (
        "path=cufile-compat host_bytes=5 cufile_bytes=6 cufile_direct=unknown "
        "cufile_bounced=unknown page_cache_bytes=unknown"
    )
    assert (
        Evidence(0, 6, Calls(2, 0), 0)
        .line()
        .endswith("cufile_direct=2 cufile_bounced=0 page_cache_bytes=0")
    )


class Function:
    """A function of cuFile: `err` is what it returns."""

    def __init__(self, err: int = 0, fill=None):
        self.err, self.fill = err, fill

    def __call__(self, *arguments):
        if self.fill:
            self.fill(arguments[0]._obj)
        return self.restype(self.err, 0)


class Cufile:
    def __init__(self, *, level: int = 0, start: int = 0, get: int = 0, fill=None):
        self.cuFileSetStatsLevel = Function(level)
        self.cuFileStatsStart = Function(start)
        self.cuFileGetStatsL3 = Function(get, fill)


def test_cufile_tells_of_every_gpu() -> None:
    def fill(told: Level3) -> None:
        told.num_gpus = 2
        for index, names in enumerate(
            [["n_p2p_reads", "n_nvfs_writes"], ["n_nvfs_reads", "n_p2p_writes", "n_posix_reads"]]
        ):
            for name in names:
                setattr(told.per_gpu[index], name, 10 + index)
        told.per_gpu[1].n_posix_writes = 100
        told.per_gpu[2].n_posix_reads = 1000  # no such GPU

    stats = CufileStats.start(Cufile(fill=fill), (1, 20))
    assert stats.calls() == Calls(direct=42, bounced=111)


def test_cufile_that_does_not_tell_is_no_evidence() -> None:
    for one in (Cufile(level=5001), Cufile(start=5001), object()):
        assert CufileStats.start(one, (1, 20)) is None
    for version in ((1, 14), (1, 19), (1, 21), (2, 0)):
        assert CufileStats.start(Cufile(), version) is None, "an unknown layout was read"
    assert CufileStats.start(Cufile(get=5001), (1, 20)).calls() is None

    def too_many(told: Level3) -> None:
        told.num_gpus = 17

    assert CufileStats.start(Cufile(fill=too_many), (1, 20)).calls() is None


LAYOUT = """
#include <stdint.h>
#include <stddef.h>
#include <stdio.h>
#include <cufile.h>
#define AT(field) printf("%zu ", offsetof(CUfilePerGpuStats_t, field));
int main(void) {
  printf("%zu %zu %zu %zu ", sizeof(CUfileStatsLevel3_t), sizeof(CUfilePerGpuStats_t),
         offsetof(CUfileStatsLevel3_t, num_gpus), offsetof(CUfileStatsLevel3_t, per_gpu_stats));
  FIELDS
  return 0;
}
"""


def test_the_layout_is_that_of_nvidias_header(tmp_path: Path) -> None:
    header = cufile_header()
    if header is None or shutil.which("gcc") is None:
        if required("kvikio"):
            pytest.fail(f"gcc is missing, or cufile.h: {header}")
        pytest.skip("there is no gcc, or no cufile.h to compare with")
    names = [name for name, _ in PerGpu._fields_]
    source = LAYOUT.replace("FIELDS", "".join(f"AT({name})" for name in names))
    (tmp_path / "layout.c").write_text(source)
    # All that cufile.h takes from the CUDA toolkit, which need not be installed.
    (tmp_path / "cuda.h").write_text("typedef int CUresult; typedef void *CUstream;")
    include = [f"-I{tmp_path}", f"-I{header.parent}"]
    argv = ["gcc", *include, "-o", tmp_path / "layout", tmp_path / "layout.c"]
    subprocess.run(argv, check=True, timeout=120)
    told = subprocess.run(tmp_path / "layout", check=True, capture_output=True, timeout=60).stdout
    assert [int(number) for number in told.split()] == [
        *(ctypes.sizeof(Level3), ctypes.sizeof(PerGpu)),
        *(Level3.num_gpus.offset, Level3.per_gpu.offset),
        *(getattr(PerGpu, name).offset for name in names),
    ]


def cufile_header() -> Path | None:
    """Return the header that comes with cuFile's wheel for CUDA 13, or None."""
    spec = find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    headers = (Path(place) / "cu13" / "include" / "cufile.h" for place in places)
    return next((header for header in headers if header.exists()), None)


class Machine(Files):
    """A machine with the files that it is given."""

    def __init__(self, *there: str):
        self.there = there

    def exists(self, path: str) -> bool:
        return path in self.there

    is_directory = exists


GDS = ("/dev/nvidia3", "/run/udev")


@pytest.fixture
def complete(monkeypatch) -> None:
    """A machine that has KvikIO and a driver."""
    monkeypatch.setattr(requirements, "importable", lambda name: True)
    monkeypatch.setattr(requirements, "has_driver", lambda: True)


def refusal(mode: str, files: Files, **changes) -> str:
    place = {"store_path": "/kv", "direct": True, "threads": 2, "device_memory": True}
    with pytest.raises(EnvironmentFault) as caught:
        open_payload(mode, files, -1, **place | changes)
    assert caught.value.code == "payload-refused"
    return caught.value.message


def test_all_that_is_missing_is_named_at_once(monkeypatch) -> None:
    monkeypatch.setattr(requirements, "importable", lambda name: False)
    monkeypatch.setattr(requirements, "has_driver", lambda: False)
    line = refusal("gds", Machine(), direct=False)
    assert line.startswith("payload 'gds' is refused, bytes would pass the host: missing: kvikio ")
    for name in ("libcuda.so.1", "a GPU", "/run/udev", "O_DIRECT", "nvidia-fs"):
        assert name in line
    line = refusal("compat", Machine(), direct=False)
    assert "kvikio" in line
    assert "libcuda.so.1" in line
    assert not any(name in line for name in ("GPU", "udev", "O_DIRECT", "nvidia-fs"))


@pytest.mark.usefixtures("complete")
def test_one_thing_that_is_missing_is_enough(monkeypatch) -> None:
    assert missing("gds", direct=True, files=Machine(*GDS)) == []
    for place, word in zip(GDS, ("a GPU", "/run/udev"), strict=True):
        files = Machine(*(one for one in GDS if one != place))
        (lacking,) = missing("gds", direct=True, files=files)
        assert lacking.startswith(word)
    assert missing("gds", direct=False, files=Machine(*GDS))[0].startswith("O_DIRECT")
    monkeypatch.setattr(requirements, "has_driver", lambda: False)
    assert missing("gds", direct=True, files=Machine(*GDS))[0].startswith("libcuda.so.1")
    assert missing("posix", direct=False, files=Machine()) == []


@pytest.mark.usefixtures("complete")
def test_gds_starts_only_on_proof(monkeypatch) -> None:
    asked = []

    def unproved(place: str) -> GdsProbe:
        asked.append(place)
        return GdsProbe(False, "path=cufile-compat host_bytes=4096")

    monkeypatch.setattr(path, "probe", unproved)
    assert "host memory" in refusal("gds", Machine(*GDS), device_memory=False)
    assert asked == []
    line = refusal("gds", Machine(*GDS))
    assert "path=cufile-compat host_bytes=4096; nvidia-fs" in line
    assert asked == ["/kv/range.pack"]
    line = refusal("gds", Machine(*GDS, "/sys/module/nvidia_fs"))
    assert "nvidia-fs" not in line


@pytest.mark.usefixtures("complete")
def test_a_buffered_kvikio_under_a_direct_store_is_refused(monkeypatch) -> None:
    class Buffered:
        direct = closed = False

        def __init__(self, *_: object, **settings: object):
            self.settings = settings

        def close(self) -> None:
            type(self).closed = True

    monkeypatch.setattr(path, "KvikioPayload", Buffered)
    assert "O_DIRECT" in refusal("compat", Machine())
    assert Buffered.closed
    place = {"store_path": "/kv", "direct": False, "threads": 2, "device_memory": False}
    payload = open_payload("compat", Machine(), -1, **place)
    assert payload.settings == {"mode": "compat", "threads": 2}


def test_posix_asks_for_nothing() -> None:
    place = {"store_path": "/kv", "direct": False, "threads": 2, "device_memory": False}
    assert isinstance(open_payload("posix", Machine(), -1, **place), PosixPayload)


CHILDREN = {
    "crash": ("import os; os.abort()", "the probe died of SIGABRT"),
    "hang": ("import time; time.sleep(600)", "the probe did not answer within 0.5 s"),
    "silent": ("", "the probe ended with status 0 and no answer"),
    "noise": ("print('[]')", "the probe ended with status 0 and no answer"),
    "fails": ("raise SystemExit(3)", "the probe ended with status 3 and no answer"),
    "no": ('print(\'{"proved": "yes", "detail": "why"}\')', "why"),
}


@pytest.mark.parametrize("child", CHILDREN)
def test_whatever_becomes_of_the_probe_is_an_answer(child: str) -> None:
    code, detail = CHILDREN[child]
    # On a slow machine the others may need some time to start.
    deadline_s = 0.5 if child == "hang" else 60
    command = [sys.executable, "-S", "-c", code]
    assert probe("/kv", deadline_s, command) == GdsProbe(False, detail)


def test_the_probe_is_believed_and_told_where_to_read() -> None:
    code = "import json, sys; print('log'); print(json.dumps({'proved': True, 'detail': sys.argv}))"
    told = probe("/kv/range.pack", 60, [sys.executable, "-S", "-c", code])
    assert told == GdsProbe(True, "['-c', '/kv/range.pack']")
    assert probe("/kv", 60, ["/nonexistent/python"]).detail.startswith("the probe could not be")


def test_the_real_probe_answers_here(tmp_path: Path) -> None:
    """With a GPU or without one, with KvikIO or not: it ends, and says why where it proves not."""
    (tmp_path / "pack").write_bytes(bytes(2 * MIB))
    told = probe(str(tmp_path / "pack"), 120)
    if not requirements.has_driver():
        assert not told.proved
        assert told.detail == "libcuda.so.1 cannot be loaded"


def test_a_missing_driver_is_a_line(monkeypatch, tmp_path: Path) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gds_probe.ctypes, "CDLL", no_library)
    (tmp_path / "pack").write_bytes(bytes(MIB))
    assert gds_probe.answer(str(tmp_path / "pack")) == GdsProbe(
        False, "libcuda.so.1 cannot be loaded"
    )


def test_the_engine_refuses_what_cannot_be_and_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.engine.close(30)
    for mode in ("gds", "compat"):
        if mode == "compat" and not missing("compat", direct=True):
            continue
        with pytest.raises(EnvironmentFault, match=f"payload '{mode}' is refused") as caught:
            Rig(tmp_path, new=False, config=EngineConfig(payload=mode, lock_wait_s=0.5))
        assert "set payload to posix" in caught.value.message
    again = Rig(tmp_path, new=False, config=rig.config)
    assert again.engine.open_result.state == "warm"
    assert again.engine.stats().path == "posix-direct"
    again.engine.close(30)
    with pytest.raises(UsageError, match="payload is 'fast'"):
        EngineConfig(payload="fast")


def test_pages_in_the_cache_are_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64 * 1024))
    with (tmp_path / "file").open("rb") as file:
        file.read()
        assert OS_FILES.resident_bytes(file.fileno(), 0, 64 * 1024) == 64 * 1024
        assert OS_FILES.resident_bytes(file.fileno(), 4096, 4096) == 4096
    with pytest.raises(OSError, match="Bad file descriptor"):
        OS_FILES.resident_bytes(-1, 0, 4096)
