"""Each protocol stopped at each of its calls, by an error and by the death of the process.

What follows always opens the store, and finds the old index, the new one or none: never a mixture.
Power cuts, where unsynced writes may be lost, are the crash explorer's.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rangekv.engine import stores
from rangekv.engine.folder import TEMP_PREFIX
from rangekv.engine.inspection import read_store
from rangekv.engine.store import create, reformat
from rangekv.format.errors import RangeError, UsageError
from rangekv.format.tables import Tables
from support.interruption import Died, Interrupted
from support.stores import (
    CAPACITY_BYTES,
    MODEL,
    NAMESPACE,
    OTHER_NAMESPACE,
    AnyFiles,
    filled_tables,
    make_store,
    open_store,
)

RANK = "rank-0-of-1"
TOTALS: Counter[str] = Counter()


def every_call(
    tmp_path: Path, death: bool, run: Callable[[Path, Interrupted], None], prepare=lambda at: None
) -> Iterator[tuple[Path, str | None]]:
    """Run a protocol anew for each of its calls; yield the place and the call that did not happen.

    The last one is complete: then the call is None.
    """
    for at in range(1, 500):
        place = tmp_path / f"{at}"
        place.mkdir(mode=0o700)
        prepare(place)
        files = Interrupted(at, death=death)
        try:
            run(place, files)
        except (Died, RangeError, OSError):
            assert files.reached, "it failed of itself"
        files.bury()
        TOTALS[run.__name__] += 1
        yield place, files.reached or None
        shutil.rmtree(place)
        if not files.reached:
            return
    raise AssertionError("the protocol never ends")


def open_and_close(path: Path) -> tuple[str | None, Tables | None]:
    """Open, as the next session would; return the reason and the tables, and close cleanly."""
    foretold = read_store(str(path), AnyFiles())
    store = open_store(path, recover=foretold.state == "would-recover")
    found = store.open_result.reason, store.tables
    assert foretold.reason == found[0] or foretold.blank
    assert store.close(store.tables or Tables.empty()).state == "clean"
    assert [one.name for one in path.iterdir() if one.name.startswith(TEMP_PREFIX)] == []
    again = open_store(path)
    assert again.open_result.state == "warm"
    again.abandon()
    return found


def filled(place: Path) -> None:
    store = open_store(make_store(place / "store"))
    store.close(filled_tables(store.geometry))


@pytest.fixture(params=[False, True], ids=["error", "death"])
def death(request) -> bool:
    return request.param


@pytest.fixture(autouse=True)
def counted(figure):
    yield
    figure("protocol calls failed or never made", f"{TOTALS.total():,}, every store opened after")


def test_create(tmp_path, death):
    def run(place: Path, files: Interrupted) -> None:
        make_store(place / "store", files)

    for place, call in every_call(tmp_path, death, run):
        path = place / "store"
        if not (path / "range.pack").exists():
            if not death:
                assert not path.exists(), f"{call} left something behind"
            make_store(path)
        reason, tables = open_and_close(path)
        assert reason in (None, "no-snapshot")
        assert tables in (None, Tables.empty())


def test_open(tmp_path, death):
    def run(place: Path, files: Interrupted) -> None:
        open_store(place / "store", files).abandon()

    for place, call in every_call(tmp_path, death, run, filled):
        marked = (place / "store" / "range.dirty").exists()
        reason, tables = open_and_close(place / "store")
        assert reason == ("dirty-marker" if marked else None), call
        assert marked or len(tables.records) == 3


def test_close(tmp_path, death):
    later = Tables.empty(generation_max=99)

    def run(place: Path, files: Interrupted) -> None:
        store = open_store(place / "store")
        store._pack.files = store._pack.folder.files = files
        # What the store had open is closed by the death too.
        files.open_fds |= {store._pack.fd, store._pack.folder.fd}
        result = store.close(later)
        (place / "said").write_text(result.state)

    for place, call in every_call(tmp_path, death, run, filled):
        said = (place / "said").read_text() if (place / "said").exists() else "died"
        reason, tables = open_and_close(place / "store")
        if said == "clean":
            assert reason is None
        assert reason in (None, "dirty-marker"), call
        assert tables in (None, later), "the index before this session is never taken for this one"


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "superblocks-lost"])
def test_reformat(tmp_path, death, lost):
    def prepare(place: Path) -> None:
        filled(place)
        if lost:
            with (place / "store" / "range.pack").open("r+b") as file:
                file.write(bytes(1 << 20))

    def run(place: Path, files: Interrupted) -> None:
        reformat(str(place / "store"), files=files)

    for place, call in every_call(tmp_path, death, run, prepare):
        path = place / "store"
        before = read_store(str(path), AnyFiles())
        if before.state == "unusable":
            assert lost
            reformat(str(path), files=AnyFiles())
        reason, tables = open_and_close(path)
        assert reason in (None, "dirty-marker", "uuid-mismatch", "geometry-mismatch"), call
        kept = reason is None and len(tables.records) > 0
        assert not kept or not (lost or call is None)
        if call is None:
            assert (reason, tables) == (None, Tables.empty())


def test_bind_in_its_place(tmp_path, death):
    def prepare(place: Path) -> None:
        create(str(place / "store"), capacity_bytes=CAPACITY_BYTES, files=AnyFiles())

    def run(place: Path, files: Interrupted) -> None:
        open_store(place / "store", files).abandon()

    for place, call in every_call(tmp_path, death, run, prepare):
        reason, tables = open_and_close(place / "store")
        assert reason in (None, "geometry-mismatch", "dirty-marker"), call
        assert tables in (None, Tables.empty())


def test_bind_below_blank(tmp_path, death):
    def prepare(place: Path) -> None:
        stores.create_ranks(str(place), capacity_bytes=CAPACITY_BYTES, files=AnyFiles())

    def adopt(place: Path, files: AnyFiles, namespace=NAMESPACE) -> str:
        return stores.resolve(str(place), namespace=namespace, geometry=MODEL, files=files)

    def run(place: Path, files: Interrupted) -> None:
        adopt(place, files)

    for place, call in every_call(tmp_path, death, run, prepare):
        (found,) = stores.list_stores(str(place), AnyFiles())
        if found.namespace is not None:
            with pytest.raises(UsageError, match="capacity-required"):
                adopt(place, AnyFiles(), OTHER_NAMESPACE)
        path = adopt(place, AnyFiles())
        assert path == str(place / NAMESPACE.folder / RANK)
        assert [one.path for one in stores.list_stores(str(place), AnyFiles())] == [path]
        report = read_store(path, AnyFiles())
        assert {slot.superblock.namespace for slot in report.slots} == {NAMESPACE}, call
        assert open_and_close(Path(path)) == (None, Tables.empty())


def test_a_new_namespace_in_a_directory(tmp_path, death):
    def resolve(place: Path, files: AnyFiles) -> str:
        return stores.resolve(
            str(place),
            namespace=NAMESPACE,
            geometry=MODEL,
            capacity_bytes=CAPACITY_BYTES,
            files=files,
        )

    def run(place: Path, files: Interrupted) -> None:
        resolve(place, files)

    for place, call in every_call(tmp_path, death, run):
        if not death and call is not None:
            left = [one for one in place.rglob("*") if one.is_file()]
            assert {one.name for one in left} <= {"range.pack", "range.snapshot"}
        reason, tables = open_and_close(Path(resolve(place, AnyFiles())))
        assert reason in (None, "no-snapshot")
        assert tables in (None, Tables.empty())
