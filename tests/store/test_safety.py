"""Who owns a store, who may enter it, what stands in its place: one clear line each."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from rangekv.engine.inspection import read_store
from rangekv.engine.pack import filesystem_name
from rangekv.format.errors import EnvironmentFault, ExitCode, StoreMissing, UsageError
from support.stores import AnyFiles, ChangedStat, contents, make_store, open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store")


def refused(path: Path, files: AnyFiles | None = None, **changes: object) -> EnvironmentFault:
    """Open is refused with exit 3, and nothing on disk has changed."""
    before = contents(path)
    with pytest.raises(EnvironmentFault) as caught:
        open_store(path, files, **changes)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert contents(path) == before
    return caught.value


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_that_lets_others_in(path, mode):
    path.chmod(mode)
    assert refused(path).line().endswith(f"chmod 700 {path} [wrong-mode]")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_pack_that_lets_others_in(path, mode):
    (path / "range.pack").chmod(mode)
    assert refused(path).code == "wrong-mode"
    with pytest.raises(EnvironmentFault, match="wrong-mode"):
        read_store(str(path), AnyFiles())


def test_another_owner(path):
    error = refused(path, ChangedStat(uid=os.geteuid() + 1))
    assert error.code == "wrong-owner"
    assert f"user {os.geteuid() + 1}" in error.message


def test_a_linked_directory(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(EnvironmentFault, match="symlink"):
        open_store(link)


def test_a_directory_below_a_link_is_fine(path, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    open_store(tmp_path / "link" / "store").abandon()


def test_a_linked_pack(path, tmp_path):
    (path / "range.pack").rename(tmp_path / "elsewhere")
    (path / "range.pack").symlink_to(tmp_path / "elsewhere")
    assert refused(path).code == "symlink"


def test_a_pack_with_two_names(path, tmp_path):
    os.link(path / "range.pack", tmp_path / "second")
    assert refused(path).code == "hard-linked"


def test_no_regular_file(path):
    (path / "range.pack").unlink()
    (path / "range.pack").mkdir(0o700)
    with pytest.raises(EnvironmentFault, match="not-a-regular-file"):
        open_store(path)
    (path / "range.pack").rmdir()
    os.mkfifo(path / "range.pack", 0o600)
    for look in (open_store, lambda at: read_store(str(at), AnyFiles())):
        with pytest.raises(EnvironmentFault, match="not-a-regular-file"):
            look(path)


def test_nothing_there(tmp_path):
    for missing in (tmp_path / "none", tmp_path):
        tmp_path.chmod(0o700)
        with pytest.raises(StoreMissing, match="rangectl init") as caught:
            open_store(missing)
        assert caught.value.exit_code == ExitCode.NO_STORE
        with pytest.raises(StoreMissing):
            read_store(str(missing), AnyFiles())


def test_a_file_where_a_directory_should_be(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="not-a-directory"):
        open_store(tmp_path / "file")


class NoDirectOpen(AnyFiles):
    """A file system that refuses O_DIRECT when a file is opened."""

    def open_pack(self, dir_fd, name, *, write, direct):
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open_pack(dir_fd, name, write=write, direct=direct)


class NoDirectRead(AnyFiles):
    """A file system that accepts O_DIRECT and then refuses the reads."""

    def preadv(self, fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().preadv(fd, buffers, offset)


class OnTmpfs(AnyFiles):
    def filesystem_magic(self, fd):
        return 0x01021994


@pytest.mark.parametrize("files", [NoDirectOpen, NoDirectRead, OnTmpfs])
def test_no_direct_io_is_refused_unless_buffered_is_allowed(path, files):
    assert refused(path, files(), allow_buffered=False).code == "no-direct-io"
    store = open_store(path, files(), allow_buffered=True)
    assert store.io_path == "posix-buffered"
    assert store.open_result.state == "warm"
    assert store.close(store.tables).state == "clean"


def test_the_payload_descriptor_is_direct_and_private(path):
    store = open_store(path)
    flags = fcntl.fcntl(store.pack_fd, fcntl.F_GETFL)
    assert bool(flags & os.O_DIRECT) == (store.io_path == "posix-direct")
    assert not os.get_inheritable(store.pack_fd)
    assert store.filesystem == filesystem_name(store.superblock.fs_magic)
    store.abandon()


def test_the_seam_tells_what_the_kernel_tells(path):
    files = AnyFiles()
    fd = files.open_dir(str(path))
    try:
        for name in ("range.pack", "range.snapshot"):
            told, known = files.statx_at(fd, name), (path / name).stat()
            assert (told.mode, told.uid, told.nlink, told.size, told.inode, told.mtime_ns) == (
                known.st_mode,
                known.st_uid,
                known.st_nlink,
                known.st_size,
                known.st_ino,
                known.st_mtime_ns,
            )
            assert os.makedev(*told.device) == known.st_dev
        with pytest.raises(FileNotFoundError):
            files.statx_at(fd, "none")
        assert len(files.boot_id()) == 16
        assert 0 < files.free_bytes(fd) < 1 << 60
    finally:
        files.close(fd)


def test_no_descriptor_is_left_open(path):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    store = open_store(path)
    with pytest.raises(Exception, match="store-locked"):
        open_store(path)
    read_store(str(path), AnyFiles())
    store.close(store.tables)
    with pytest.raises(UsageError):
        make_store(path)
    with pytest.raises(EnvironmentFault):
        open_store(path, ChangedStat(uid=os.geteuid() + 1))
    assert descriptors() == before
