"""What is durable when, and which images a power cut can leave."""

from __future__ import annotations

from rangekv.engine.testing.crash.cuts import Breadth, cuts
from rangekv.engine.testing.crash.disk import ROOT, Disk
from rangekv.engine.testing.crash.disk_files import DiskFiles
from rangekv.engine.testing.crash.image import EMPTY, PAGE_BYTES, Image
from rangekv.engine.testing.crash.medium import Medium
from rangekv.engine.testing.crash.operations import FailedSync

PACK_BYTES = 2 * 1024 * 1024
PAYLOAD = 1024 * 1024


class Bench:
    """A durable pack file in a durable directory, and a process that works on it."""

    def __init__(self) -> None:
        self.disk = Disk(Image.empty())
        self.files = DiskFiles(self.disk)
        self.files.mkdir(f"{ROOT}/s")
        self.root = self.files.open_dir(ROOT)
        self.folder = self.files.open_dir(f"{ROOT}/s")
        self.files.fsync_dir(self.root)
        self.pack = self.files.create_temp(self.folder, "range.pack")
        self.files.fallocate(self.pack, 0, PACK_BYTES)
        self.files.fsync(self.pack)
        self.files.fsync_dir(self.folder)

    def medium(self) -> Medium:
        medium = Medium.of(Image.empty())
        for operation in self.disk.log.operations:
            medium.apply(operation)
        return medium

    def images(self, breadth: Breadth | None = None) -> list[Image]:
        return [cut.image for cut in cuts(self.medium(), breadth or Breadth(), "")]

    def write(self, offset: int, fill: bytes, pages: int = 1) -> None:
        self.files.pwrite(self.pack, fill * PAGE_BYTES * pages, offset)


def names(image: Image) -> set[str]:
    return set(image.entries[image.find(["s"])])


def pack(image: Image):
    return image.nodes[image.find(["s", "range.pack"])].data


def test_what_is_synced_is_in_every_image():
    bench = Bench()
    bench.write(PAYLOAD, b"a")
    bench.files.fsync(bench.pack)
    images = bench.images()
    assert len(images) == 1
    assert pack(images[0]).read(PAYLOAD, 4) == b"aaaa"


def test_an_unsynced_write_is_old_new_or_torn_between_pages():
    bench = Bench()
    bench.write(PAYLOAD, b"a", pages=2)
    found = {
        (pack(image).read(PAYLOAD, 1), pack(image).read(PAYLOAD + PAGE_BYTES, 1))
        for image in bench.images()
    }
    assert found == {(b"\0", b"\0"), (b"a", b"a"), (b"a", b"\0"), (b"\0", b"a")}


def test_a_page_is_torn_in_its_middle():
    bench = Bench()
    bench.write(0, b"a")
    found = {
        (pack(image).read(0, 1), pack(image).read(PAGE_BYTES - 1, 1)) for image in bench.images()
    }
    assert found == {(b"\0", b"\0"), (b"a", b"a"), (b"a", b"\0"), (b"\0", b"a")}


def test_fdatasync_leaves_the_modification_time_behind():
    bench = Bench()
    bench.write(0, b"a")
    bench.files.fdatasync(bench.pack)
    key = bench.images()[0].find(["s", "range.pack"])
    times = {image.nodes[key].mtime_ns for image in bench.images()}
    assert len(times) == 2
    bench.files.fsync(bench.pack)
    assert {image.nodes[key].mtime_ns for image in bench.images()} == {max(times)}


def test_names_come_in_any_subset_until_their_directory_is_synced():
    bench = Bench()
    bench.files.close(bench.files.create_temp(bench.folder, "one"))
    bench.files.close(bench.files.create_temp(bench.folder, "two"))
    bench.files.rename(bench.folder, "one", "three")
    found = {frozenset(names(image) - {"range.pack"}) for image in bench.images()}
    assert found == {
        frozenset(),
        frozenset({"one"}),
        frozenset({"two"}),
        frozenset({"three"}),
        frozenset({"one", "two"}),
        frozenset({"two", "three"}),
    }
    bench.files.fsync_dir(bench.folder)
    assert {frozenset(names(image)) for image in bench.images()} == {
        frozenset({"range.pack", "two", "three"})
    }


def test_a_move_between_directories_is_durable_once_both_are():
    bench = Bench()
    bench.files.mkdir(f"{ROOT}/t")
    target = bench.files.open_dir(f"{ROOT}/t")
    bench.files.fsync_dir(bench.root)
    bench.files.rename_noreplace(bench.folder, "range.pack", target, "range.pack")
    places = [(["s"], ["t"]), (["s"], ["t"]), (["t"],)]
    for sync, expected in zip((None, target, bench.folder), places, strict=True):
        if sync is not None:
            bench.files.fsync_dir(sync)
        found = [
            [place for place in (["s"], ["t"]) if image.find([*place, "range.pack"]) is not None]
            for image in bench.images()
        ]
        assert sorted(found) == sorted([place] for place in expected)


def test_what_a_failed_sync_lost_no_later_sync_brings_back():
    bench = Bench()
    bench.write(PAYLOAD, b"a")
    key = bench.files.disk.image.find(["s", "range.pack"])
    bench.files.do(FailedSync(key, "range.pack"))
    bench.files.fsync(bench.pack)
    assert b"\0" in {pack(image).read(PAYLOAD, 1) for image in bench.images()}
    bench.write(PAYLOAD, b"b")
    bench.files.fsync(bench.pack)
    assert {pack(image).read(PAYLOAD, 1) for image in bench.images()} == {b"b"}


def test_a_killed_process_leaves_its_unsynced_work_pending():
    bench = Bench()
    bench.write(PAYLOAD, b"a")
    bench.files.die()
    after = DiskFiles(bench.disk)
    folder = after.open_dir(f"{ROOT}/s")
    fd = after.open_pack(folder, "range.pack", write=True, direct=False)
    page = bytearray(PAGE_BYTES)
    after.preadv(fd, [page], PAYLOAD)
    assert page == b"a" * PAGE_BYTES
    assert {pack(image).read(PAYLOAD, 1) for image in bench.images()} == {b"a", b"\0"}
    after.fsync(fd)
    assert {pack(image).read(PAYLOAD, 1) for image in bench.images()} == {b"a"}


def test_many_writes_differ_one_by_one():
    bench = Bench()
    for page in range(6):
        bench.write(PAYLOAD + page * PAGE_BYTES, b"a")
    found = {
        bytes(pack(image).read(PAYLOAD + page * PAGE_BYTES, 1)[0] for page in range(6))
        for image in bench.images(Breadth(random_cuts=0))
    }
    for page in range(6):
        lost = bytes(0 if other == page else ord("a") for other in range(6))
        kept = bytes(ord("a") if other == page else 0 for other in range(6))
        assert {lost, kept} <= found


def test_equal_contents_have_equal_digests_whatever_their_history():
    one = EMPTY.written(0, b"a" * 5000).written(100, b"b")
    other = EMPTY.written(0, b"a" * 100 + b"b" + b"a" * 4899)
    assert (one.size, one.head_sum, one.body_sum) == (other.size, other.head_sum, other.body_sum)
    assert one.read(0, 6000) == other.read(0, 6000)


def test_inode_numbers_come_back_with_another_birth_time():
    bench = Bench()
    first = bench.files.statx(bench.pack)
    bench.files.close(bench.pack)
    bench.files.unlink(bench.folder, "range.pack")
    second = bench.files.statx(bench.files.create_temp(bench.folder, "range.pack"))
    assert second.inode == first.inode
    assert second.btime_ns != first.btime_ns
