"""Looks at every crash of a recorded trace, and of the recoveries from those crashes.

Owns the search and its verdicts. A power cut leaves one of many images; a killed process leaves the
disk as it was, unsynced data included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rangekv.engine.testing.crash.cuts import Breadth, cuts
from rangekv.engine.testing.crash.disk import ROOT, Disk
from rangekv.engine.testing.crash.disk_files import DiskFiles
from rangekv.engine.testing.crash.findings import (
    CAME_BACK,
    COLD_CLOSE,
    KILL,
    NOT_KEPT,
    REFUSED,
    TRACEBACK,
    WRONG_KV,
    Findings,
    Step,
    Violation,
)
from rangekv.engine.testing.crash.image import Image
from rangekv.engine.testing.crash.medium import Medium
from rangekv.engine.testing.crash.operations import Closed, Created, Dropped, Kept, Log
from rangekv.engine.testing.crash.oracle import Blocks, Oracle, WrongKv
from rangekv.engine.testing.crash.recovery import Reopened, carry_on, reopen, restore_all
from rangekv.engine.testing.crash.rot import Rot, rotten
from rangekv.engine.testing.crash.scenarios import Play, Scenario
from rangekv.engine.testing.crash.seam import WatchedFiles
from rangekv.engine.testing.crash.stage import Lost, Stage
from rangekv.format.errors import RangeError

TRACE_LINES = 12


@dataclass(frozen=True, slots=True)
class Search:
    """How far an exploration goes."""

    crashes: int = 2
    """Crashes in a row: the second one hits the recovery from the first."""
    breadth: Breadth = field(default_factory=Breadth)
    verified: bool = False
    """Restore what is visible through an engine that checks payload, instead of comparing raw."""
    opens: bool = False
    """Crash recoveries only while they open the store."""
    rot_recoveries: bool = False
    """Crash the recoveries from a damaged medium too."""
    stop_at: str | None = None
    """Kind of a violation that ends the exploration."""
    route: tuple[Step, ...] = ()
    """Look at this one state only."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known at one crash point: whether the store exists, what a clean close left in it,
    what was dropped for good, and what a journal proves."""

    created: bool = False
    closed: Blocks | None = None
    dropped: Blocks = frozenset()
    kept: Kept = field(default_factory=Kept)


@dataclass(frozen=True, slots=True)
class Crash:
    """One crash: the unsynced disk or the cut of it, what is known, and how it came about."""

    medium: Medium
    image: Image
    moment: Moment
    place: str
    trace: tuple[str, ...]
    rot: Rot | None
    number: int
    """1 for a crash of the recorded trace, 2 for one of its recovery, …"""
    further: bool
    """Whether the recovery's own crashes are to be explored."""


class Explorer:
    """Explores one scenario under one protocol: `process` starts a process on a disk."""

    def __init__(
        self,
        scenario: Scenario,
        process: Callable[[Disk], DiskFiles] = DiskFiles,
        search: Search | None = None,
    ) -> None:
        self.findings = Findings()
        self.story: list[str] = []
        """What happened on the way to the state that `search.route` names."""
        self._scenario = scenario
        self._process = process
        self._search = search or Search()
        self._oracle = Oracle(scenario.model)
        self._seen: set[tuple[int, Moment, int]] = set()
        self._shows_nothing: set[tuple[int, Moment]] = set()
        self._recovered: set[tuple[object, ...]] = set()
        self._root = ROOT

    def run(self) -> Findings:
        """Record the scenario on a disk in memory and explore it."""
        disk = Disk(Image.empty())
        self.record(lambda: self._process(disk), disk.log)
        return self.explore(disk.log)

    def record(self, process: Callable[[], WatchedFiles], log: Log, root: str = ROOT) -> None:
        """Play the scenario below the empty directory `root`; `process` starts each process."""
        self._root = root
        stage = self._stage(log, Moment())
        stage.create(process())
        self._scenario.play(Play(stage, self._oracle, process))

    def explore(self, log: Log) -> Findings:
        """Look at all crashes of what was recorded."""
        with suppress(_Enough):
            self._explore(Medium.of(Image.empty()), log, Moment(), self._scenario.name, 1)
        return self.findings

    def _explore(self, medium: Medium, log: Log, start: Moment, place: str, number: int) -> None:
        search = self._search
        for done in range(len(log.operations) + 1):
            if done:
                medium.apply(log.operations[done - 1])
            if search.route and search.route[number - 1][0] != done:
                continue
            moment = _moment(log, done, start)
            self.findings.points += 1
            self.findings.clean_closes += moment.closed is not None
            last = log.operations[max(0, done - TRACE_LINES) : done]
            trace = tuple(operation.line() for operation in last)
            for crash in self._crashes(medium, moment, f"{place}@{done}", trace, number):
                self._tell(f"crash {number}, {crash.place}", *crash.trace)
                self._recover(crash)

    def _crashes(
        self, medium: Medium, moment: Moment, point: str, trace: tuple[str, ...], number: int
    ) -> Iterator[Crash]:
        """Yield the crashes at one point, but none that is like one before."""
        route, breadth = self._search.route, self._search.breadth
        wanted = route[number - 1][1] if route else None
        rots = self._scenario.rots and number == 1
        for index, cut in enumerate(cuts(medium, breadth, f"{self._search.seed} {point}")):
            self.findings.states += 1
            image = cut.image
            # One that was seen later in a row has fewer crashes to come, and no damage.
            known = (image.digest(), moment, number)
            if (wanted and wanted.partition("-")[0] != str(index)) or known in self._seen:
                continue
            self._seen.add(known)
            self.findings.distinct += 1
            image.prune()
            further = self._further(number, image, moment)
            if further or (image.digest(payload=False), moment) not in self._shows_nothing:
                place, lines = f"{point}.{index}", (*trace, *cut.lines())
                if wanted in (None, str(index)):
                    fresh = image.copy()
                    yield Crash(
                        Medium.of(image), fresh, moment, place, lines, None, number, further
                    )
            if rots:
                yield from self._rotten(image, moment, f"{point}.{index}", (*trace, *cut.lines()))
        unsynced = medium.unsynced()
        if wanted in (None, KILL) and any(unsynced):
            live = medium.live()
            live.prune()
            if self._further(number, live, moment, *unsynced):
                place = f"{point}.{KILL}"
                yield Crash(medium.copy(), live, moment, place, trace, None, number, True)

    def _rotten(
        self, image: Image, moment: Moment, place: str, trace: tuple[str, ...]
    ) -> Iterator[Crash]:
        """Yield the crashes with something damaged besides."""
        for rot, bad in rotten(image):
            known = _under(rot, moment)
            place_of, lines = f"{place}-{rot.value}", (*trace, f"damaged: {rot.value}")
            if self._search.route and self._search.route[0][1] != place_of.rpartition(".")[2]:
                continue
            further = self._search.rot_recoveries and self._further(1, bad, known)
            yield Crash(Medium.of(bad), bad, known, place_of, lines, rot, 1, further)

    def _further(self, number: int, image: Image, moment: Moment, *unsynced: int) -> bool:
        """Whether to explore the recovery from a crash: once for each metadata it can find."""
        if self._search.route:
            return number < len(self._search.route)
        if number >= self._search.crashes:
            return False
        key = (number, image.digest(payload=False), moment, *unsynced)
        new = key not in self._recovered
        self._recovered.add(key)
        return new

    def _recover(self, crash: Crash) -> None:
        """Reopen what a crash left, judge it, and explore the session that goes on from there."""
        self.findings.reopens += 1
        metadata = crash.image.digest(payload=False)
        pristine = crash.image.copy() if self._search.verified else None
        disk = Disk(crash.image, self._root)
        files = self._process(disk)
        try:
            reopened = reopen(self._stage(disk.log, crash.moment), files)
            made_anew = bool(disk.log.notes)
            self._judge(reopened, crash, None if made_anew else pristine)
            if not (reopened.records or files.payload_reads):
                self._shows_nothing.add((metadata, crash.moment))
            if crash.further and not self._search.opens:
                carry_on(reopened, files, self._oracle, f"recovery {crash.number}")
            else:
                reopened.store.abandon()
        except _Broken as error:
            self._violated(error.kind, str(error), crash)
        except WrongKv as error:
            self._violated(WRONG_KV, str(error), crash)
        except Lost as error:
            self._violated(REFUSED, str(error), crash)
        except RangeError as error:
            self._violated(REFUSED, error.line(), crash)
        except Exception as error:  # whatever it is, a user would see a traceback
            self._violated(TRACEBACK, repr(error), crash)
        else:
            if crash.further:
                self.findings.recoveries += 1
                start = replace(crash.moment, closed=None)
                self._explore(crash.medium, disk.log, start, crash.place, crash.number + 1)

    def _judge(self, reopened: Reopened, crash: Crash, pristine: Image | None) -> None:
        store = reopened.store
        if crash.rot is not None:
            self.findings.rotten += 1
            self.findings.rotten_warm += reopened.reason is None
        elif reopened.reason is None:
            self.findings.warm += 1
        else:
            self.findings.cold[reopened.reason] += 1
        self._tell(f"reopen: {reopened.reason or store.open_result.state}")
        if reopened.reason is None and pristine is not None:
            disk = Disk(pristine, self._root)
            stage = self._stage(disk.log, crash.moment)
            process = self._process(disk)
            self.findings.misses += restore_all(stage, process, self._oracle, store.namespace)
        elif store.tables is not None:
            self._oracle.check(store.tables, reopened.pack)
        shown = self._oracle.shown(store.tables)
        back = shown & crash.moment.dropped
        if back:
            raise _Broken(CAME_BACK, f"{len(back)} blocks were dropped and are visible again")
        missing = crash.moment.kept.blocks - shown
        if missing:
            raise _Broken(NOT_KEPT, f"{len(missing)} blocks were committed and are not visible")
        closed = crash.moment.closed
        if self._scenario.reformats and crash.moment.created:
            closed = frozenset()
        if closed is None:
            return
        if reopened.reason is not None:
            raise _Broken(COLD_CLOSE, f"a clean close reopens cold: {store.open_result.detail}")
        if shown != closed:
            raise _Broken(
                COLD_CLOSE,
                f"a clean close kept {len(closed)} blocks, {len(shown & closed)} of them came back",
            )

    def _violated(self, kind: str, detail: str, crash: Crash) -> None:
        self._tell(f"{kind}: {detail}")
        self.findings.violations.append(Violation(kind, detail, crash.place, crash.trace))
        if kind == self._search.stop_at:
            raise _Enough

    def _tell(self, *lines: str) -> None:
        """Add to the story, where there is one state to tell of."""
        if self._search.route:
            self.story += lines

    def _stage(self, log: Log, moment: Moment) -> Stage:
        scenario = self._scenario
        return Stage(
            self._root,
            log,
            scenario.model,
            scenario.placing,
            scenario.reformats,
            scenario.recovers,
            moment.created,
        )


class _Broken(Exception):
    """A rule does not hold."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _Enough(Exception):
    """A violation of the wanted kind was found."""


def _under(rot: Rot, moment: Moment) -> Moment:
    """Return what must still hold when something was damaged besides."""
    kept = frozenset[bytes]()
    if rot in (Rot.SLOT_A, Rot.SLOT_B) and moment.kept.either_slot:
        kept = moment.kept.blocks
    if rot is Rot.LAST_COMMIT:  # which may have retired some: they come back or they do not
        kept = moment.kept.without_last & moment.kept.blocks
    return replace(moment, closed=None, kept=Kept(kept, kept))


def _moment(log: Log, done: int, start: Moment) -> Moment:
    """Return what is known after `done` operations of a trace."""
    created, closed = start.created, start.closed if done == 0 else None
    dropped, kept = start.dropped, start.kept
    for at, note in log.notes:
        if at > done:
            break
        if isinstance(note, Closed):
            closed = note.blocks if at == done else None
        elif isinstance(note, Dropped):
            dropped |= note.blocks
        elif isinstance(note, Kept):
            kept = note
        else:
            created = isinstance(note, Created)
    return Moment(created, closed, dropped, kept)
