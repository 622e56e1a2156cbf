"""The model does what the kernel does: same operations, same files in the end, same answers."""

from __future__ import annotations

import errno
import mmap
import re

import pytest
from rangekv.engine.files import FileStat
from rangekv.engine.testing.crash.disk import ROOT, Disk
from rangekv.engine.testing.crash.disk_files import DiskFiles
from rangekv.engine.testing.crash.explorer import Explorer, Search
from rangekv.engine.testing.crash.image import Image
from rangekv.engine.testing.crash.medium import Medium
from rangekv.engine.testing.crash.operations import Log, SyncDirectory, Write
from rangekv.engine.testing.crash.recording import Recording, RecordingFiles
from rangekv.engine.testing.crash.scenarios import SCENARIOS

NAMES = [scenario.name for scenario in SCENARIOS]


def lines(log: Log, root: str) -> list[str]:
    """The operations without what is left to chance."""
    base = root.rpartition("/")[2]
    return [
        re.sub(r"[0-9a-f]{16}", "…", operation.line()).replace(base, "root")
        for operation in log.operations
    ]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_a_real_recording_is_that_of_the_model_and_holds(tmp_path, scenario, depth):
    recording = Recording(str(tmp_path))
    explorer = Explorer(scenario, search=Search(depth - 1))
    explorer.record(lambda: RecordingFiles(recording), recording.log, str(tmp_path))
    disk = Disk(Image.empty())
    Explorer(scenario).record(lambda: DiskFiles(disk), disk.log)
    assert lines(recording.log, str(tmp_path)) == lines(disk.log, ROOT)

    medium = Medium.of(Image.empty())
    for operation in recording.log.operations:
        medium.apply(operation)
    image = medium.live()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    for path in files:
        key = image.find(path.relative_to(tmp_path).parts)
        node = image.nodes[key]
        assert node.data.read(0, node.data.size) == path.read_bytes()
        assert node.birth.inode == path.stat().st_ino
        assert node.mtime_ns == path.stat().st_mtime_ns or path.name != "range.pack"

    findings = explorer.explore(recording.log)
    assert findings.violations == []
    assert findings.states > 500


@pytest.fixture(params=["model", "kernel"])
def files(request, tmp_path):
    """The two seams, each with the path of an empty directory below its root."""
    if request.param == "model":
        one = DiskFiles(Disk(Image.empty()))
        root = ROOT
    else:
        one = RecordingFiles(Recording(str(tmp_path)))
        root = str(tmp_path)
    one.mkdir(f"{root}/store")
    return one, f"{root}/store"


def code(call, *arguments) -> int | None:
    """The error number of a call, None if there is none."""
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    return None


def test_both_answer_alike(files):
    seam, path = files
    folder = seam.open_dir(path)
    assert seam.exists(path)
    assert seam.is_directory(path)
    assert not seam.exists(f"{path}/missing")
    assert code(seam.mkdir, path) == errno.EEXIST
    assert code(seam.open_dir, f"{path}/missing") == errno.ENOENT
    assert code(seam.open_file, folder, "missing") == errno.ENOENT
    assert code(seam.unlink, folder, "missing") == errno.ENOENT
    assert code(seam.statx_at, folder, "missing") == errno.ENOENT

    fd = seam.create_temp(folder, "one")
    assert code(seam.create_temp, folder, "one") == errno.EEXIST
    assert code(seam.open_dir, f"{path}/one") == errno.ENOTDIR
    assert seam.pwrite(fd, b"abc", 5) == 3
    assert seam.statx(fd).size == 8
    before: FileStat = seam.statx(fd)
    seam.rename(folder, "one", "two")
    assert seam.listdir(folder) == ["two"]
    assert seam.statx_at(folder, "two") == before
    other = seam.create_temp(folder, "three")
    assert code(seam.rename_noreplace, folder, "three", folder, "two") == errno.EEXIST
    assert code(seam.rmdir, path) == errno.ENOTEMPTY

    reader = seam.open_file(folder, "two")
    buffer = bytearray(10)
    assert seam.preadv(reader, [buffer], 0) == 8
    assert buffer == b"\0\0\0\0\0abc\0\0"
    seam.flock(reader)
    assert code(seam.flock, fd) == errno.EWOULDBLOCK
    seam.close(reader)
    seam.flock(fd)
    for one in (fd, other, folder):
        seam.close(one)


def test_both_refuse_unaligned_direct_io(files):
    seam, path = files
    folder = seam.open_dir(path)
    seam.close(seam.create_temp(folder, "range.pack"))
    try:
        fd = seam.open_pack(folder, "range.pack", write=True, direct=True)
    except OSError:
        pytest.skip("no direct I/O on this file system")
    with mmap.mmap(-1, 8192) as memory:
        view = memoryview(memory)
        assert seam.pwritev(fd, [view[:4096]], 4096) == 4096
        assert code(seam.pwritev, fd, [view[:4096]], 100) == errno.EINVAL
        assert code(seam.pwritev, fd, [view[100:4196]], 0) in (errno.EINVAL, None)
        view.release()
    seam.close(fd)
    seam.close(folder)


def test_a_dead_process_does_nothing_and_holds_no_lock(files):
    seam, path = files
    folder = seam.open_dir(path)
    fd = seam.create_temp(folder, "one")
    seam.flock(fd)
    done = len(seam.log.operations)
    seam.die()
    assert code(seam.pwrite, fd, b"late", 0) == errno.EIO
    assert code(seam.fsync_dir, folder) == errno.EIO
    assert code(seam.close, fd) is None
    assert len(seam.log.operations) == done


def test_a_recording_names_files_and_times(tmp_path):
    recording = Recording(str(tmp_path))
    seam = RecordingFiles(recording)
    seam.mkdir(str(tmp_path / "store"))
    folder = seam.open_dir(str(tmp_path / "store"))
    fd = seam.create_temp(folder, "one")
    seam.pwrite(fd, b"abc", 0)
    seam.fsync_dir(folder)
    write, sync = recording.log.operations[-2:]
    assert isinstance(write, Write)
    assert write.mtime_ns == (tmp_path / "store" / "one").stat().st_mtime_ns
    assert isinstance(sync, SyncDirectory)
    seam.die()
