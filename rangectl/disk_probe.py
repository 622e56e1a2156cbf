"""What a directory's file system can do for a store, found out by trying it on a small file.

Owns the trials and their verdicts; leaves nothing behind and touches no store.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rangekv.engine.files import OS_FILES
from rangekv.engine.pack import NEVER_DIRECT, NEVER_WARM, filesystem_name
from rangekv.format.geometry import ALIGNMENT

from rangectl.finding import Finding, judged
from rangectl.output import human_bytes
from rangectl.scratch import scratch_directory

TRIAL_BYTES = 1 << 20
SPACE_FAIL_BYTES = 1 << 30
SPACE_WARN_BYTES = 16 << 30
SYNC_WARN_MS = 50.0
_MOUNTS = Path("/proc/self/mountinfo")
_NO_FLUSH = frozenset({"nobarrier", "barrier=0", "nointegrity"})
_MOVE = "use a directory on ext4 or xfs on a local SSD"
_NAME = "trial"


def disk_findings(folder: Path) -> Iterator[Finding]:
    """Yield what stands in the way of a store in `folder`; raises EnvironmentFault, OSError."""
    yield _directory(folder)
    with scratch_directory(folder, "doctor") as place, _opened(place) as dir_fd:
        filesystem = filesystem_name(OS_FILES.filesystem_magic(dir_fd))
        yield _filesystem(folder, filesystem)
        fd = OS_FILES.create_temp(dir_fd, _NAME)
        try:
            yield _preallocation(fd)
            os.pwrite(fd, bytes(ALIGNMENT), 0)
            yield _direct(dir_fd, filesystem)
            yield _identity(fd)
            yield _locks(dir_fd, fd)
            yield _renames(dir_fd)
            yield _sync(fd)
        finally:
            os.close(fd)
    yield _space(folder)
    yield _device(folder)


@contextmanager
def _opened(place: Path) -> Iterator[int]:
    fd = OS_FILES.open_dir(str(place))
    try:
        yield fd
    finally:
        OS_FILES.close(fd)


def _directory(folder: Path) -> Finding:
    status = folder.stat()
    mode = status.st_mode & 0o7777
    owner = "this user's" if status.st_uid == os.geteuid() else f"user {status.st_uid}'s"
    shared = mode & 0o002 and not mode & 0o1000
    return judged(
        "directory",
        f"mode {mode:04o}, {owner}",
        warn="others may remove a store from here; chmod o-w it" if shared else None,
    )


def _filesystem(folder: Path, filesystem: str) -> Finding:
    options = _mount_options(folder)
    found = filesystem if options is None else f"{filesystem} ({options})"
    lossy = _NO_FLUSH & set((options or "").split(","))
    fail = warn = None
    if filesystem in NEVER_DIRECT:
        fail = f"it is memory: a store would not survive a restart; {_MOVE}"
    elif lossy:
        fail = f"mounted with {', '.join(sorted(lossy))}: a power cut may lose what was synced"
    elif filesystem in NEVER_WARM:
        warn = f"a store here is cold at every start: no proof that a file is the same one; {_MOVE}"
    return judged("file system", found, fail=fail, warn=warn)


def _mount_options(folder: Path) -> str | None:
    """Return the options of the mount that holds `folder`, those of its file system included."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted and len(rest.split()) >= 3:
            return ",".join(
                dict.fromkeys([*fields.split()[5].split(","), *rest.split()[2].split(",")])
            )
    return None


def _preallocation(fd: int) -> Finding:
    try:
        OS_FILES.fallocate(fd, 0, TRIAL_BYTES)
    except OSError as error:
        os.truncate(fd, TRIAL_BYTES)
        advice = "rangectl init --zero writes the file instead; blank stores by the engine fail"
        return Finding("preallocation", "warn", error.strerror or str(error), advice)
    return judged("preallocation", "fallocate works")


def _direct(dir_fd: int, filesystem: str) -> Finding:
    fail = f"a store needs direct I/O; {_MOVE}"
    if filesystem in NEVER_DIRECT:
        return Finding("direct I/O", "fail", f"{filesystem} has none", fail)
    try:
        fd = OS_FILES.open_pack(dir_fd, _NAME, write=True, direct=True)
    except OSError as error:
        return Finding("direct I/O", "fail", f"O_DIRECT: {error.strerror}", fail)
    try:
        memory, offset = OS_FILES.direct_alignment(fd)
        with mmap.mmap(-1, ALIGNMENT) as page:
            moved = OS_FILES.pwritev(fd, [page], 0), OS_FILES.preadv(fd, [page], 0)
    except OSError as error:
        return Finding(
            "direct I/O", "fail", f"O_DIRECT of {ALIGNMENT} bytes: {error.strerror}", fail
        )
    finally:
        OS_FILES.close(fd)
    found = f"read and written; memory aligned to {memory}, offsets to {offset}"
    coarse = max(memory, offset) > ALIGNMENT or moved != (ALIGNMENT, ALIGNMENT)
    return judged(
        "direct I/O", found, fail=f"Range aligns to {ALIGNMENT}; {_MOVE}" if coarse else None
    )


def _identity(fd: int) -> Finding:
    status, generation = OS_FILES.statx(fd), OS_FILES.inode_generation(fd)
    birth = "no birth time" if status.btime_ns is None else "birth time"
    told = "no inode generation" if generation is None else "inode generation"
    lost = status.btime_ns is None and generation is None
    return judged(
        "identity",
        f"{birth}, {told}",
        warn=f"one of them must be there for a store to be warm; {_MOVE}" if lost else None,
    )


def _locks(dir_fd: int, fd: int) -> Finding:
    fail = f"two processes could open one store; {_MOVE}"
    try:
        OS_FILES.flock(fd)
        other = OS_FILES.open_pack(dir_fd, _NAME, write=True, direct=False)
    except OSError as error:
        return Finding("locks", "fail", f"flock: {error.strerror}", fail)
    try:
        OS_FILES.flock(other)
    except BlockingIOError:
        return judged("locks", "flock holds off a second opener")
    finally:
        OS_FILES.close(other)
    return Finding("locks", "fail", "flock lets two openers in", fail)


def _renames(dir_fd: int) -> Finding:
    try:
        OS_FILES.close(OS_FILES.create_temp(dir_fd, "first"))
        OS_FILES.rename_noreplace(dir_fd, "first", dir_fd, "second")
        OS_FILES.fsync_dir(dir_fd)
    except OSError as error:
        return Finding(
            "renames", "fail", f"renameat2 or a directory's fsync: {error.strerror}", _MOVE
        )
    return judged("renames", "renameat2 keeps what is there, directories can be synced")


def _sync(fd: int) -> Finding:
    """Time what a start and a close wait for; the median of a few."""
    times = []
    for number in range(7):
        os.pwrite(fd, bytes([number]) * ALIGNMENT, 0)
        start = time.perf_counter()
        OS_FILES.fdatasync(fd)
        times.append(1000 * (time.perf_counter() - start))
    median = statistics.median(times)
    slow = "starts and closes wait for about ten of these; an SSD of its own would help"
    return judged(
        "flush",
        f"{median:.1f} ms for 4 KiB, median of 7",
        warn=slow if median > SYNC_WARN_MS else None,
    )


def _space(folder: Path) -> Finding:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    advice = "free some, or give a smaller --capacity: a store takes all of its capacity at once"
    return judged(
        "free space",
        f"{human_bytes(free)} of {human_bytes(status.f_blocks * status.f_frsize)}",
        fail=advice if free < SPACE_FAIL_BYTES else None,
        warn=advice if free < SPACE_WARN_BYTES else None,
    )


def _device(folder: Path) -> Finding:
    number = folder.stat().st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        return Finding("device", "fact", "no block device of its own behind this directory")
    place = link.resolve()
    disk = place if (place / "queue").exists() else place.parent
    model = _text(disk / "device" / "model") or "unknown model"
    spins = _text(disk / "queue" / "rotational") == "1"
    kind = "says that it spins" if spins else "solid state"
    slow = "if it is a hard disk, restores are slower than computing; rangectl bench tells"
    return judged("device", f"{disk.name}, {model}, {kind}", warn=slow if spins else None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None
