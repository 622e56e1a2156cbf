"""What must hold at the end of every run, whatever fault it had: nothing leaked, no byte wrong.

Owns the checks; looks into the engine from outside and changes nothing but the banks' free memory.
"""

from __future__ import annotations

from typing import Any, Protocol

from rangekv.engine import Engine
from rangekv.engine.index import image
from rangekv.engine.inspection import StoreReport
from rangekv.engine.testing.gpu_blocks import fill
from rangekv.engine.testing.oracle import Oracle
from rangekv.engine.transfer.banks import Bank, BankSet, BankState

POISON = 0xDB


class Violation(Exception):
    """A rule of Range did not hold."""


class Absent(Exception):
    """This machine has no such state; the message says why."""


class Expectation(Protocol):
    """What a run expects of its end."""

    patience_s: float

    @property
    def quarantined(self) -> int:
        """Banks that may be in quarantine at the end."""

    def read_pack(self, offset: int, length: int) -> bytes: ...


class BankWatch:
    """Poisons every bank that is freed and looks whether the poison is whole when it is taken.

    A read, copy or write that goes on in a bank after it was freed leaves its trace there.
    """

    def __init__(self, engine: Engine) -> None:
        self.trespasses: list[str] = []
        self._sets = {"read": engine._read_banks, "save": engine._save_banks}
        for name, banks in self._sets.items():
            self._watch(name, banks)

    def _watch(self, name: str, banks: BankSet) -> None:
        take, release = banks.take, banks.release
        for bank in banks.banks:
            fill(bank.memory, POISON)

        def watched_take(state: BankState) -> Bank | None:
            bank = take(state)
            if bank is not None:
                self._look(name, bank)
            return bank

        def watched_release(bank: Bank, evidence: Any) -> None:
            fill(bank.memory, POISON)
            release(bank, evidence)

        banks.take = watched_take  # type: ignore[method-assign]
        banks.release = watched_release  # type: ignore[method-assign]

    def _look(self, name: str, bank: Bank) -> None:
        if not (bank.memory == POISON).all():
            self.trespasses.append(f"{name} bank {bank.index} was written while it was free")

    def look(self) -> None:
        """Look at all free banks now. Raises Violation."""
        for name, banks in self._sets.items():
            for bank in banks.banks:
                if bank.state is BankState.FREE:
                    self._look(name, bank)
        require(not self.trespasses, "; ".join(self.trespasses))


def check_quiet(engine: Engine, oracle: Oracle, expected: Expectation, watch: BankWatch) -> str:
    """Wait until nothing is going on and require what must hold then. Raises Violation.

    No lease, restore or save is left, used bytes are committed bytes, all banks are free but those
    that the run says are in quarantine, all threads live, and every visible byte is what was saved.
    Returns what was seen, as one line.
    """
    events, patience_s = engine._events, expected.patience_s
    leases = engine._catalog.leases.open
    require(events.wait_until(lambda: not leases, patience_s), f"{len(leases)} leases are left")
    saves = engine._saves.active
    require(events.wait_until(lambda: not saves, patience_s), f"{len(saves)} saves are left")
    require(events.fault is None, f"an event handler failed: {events.fault!r}")
    require(not engine._desk.open, f"{len(engine._desk.open)} tickets are left")
    require(not engine._restores._active, f"{len(engine._restores._active)} restores are left")
    require(all(thread.is_alive() for thread in engine._pool.threads), "a worker thread is dead")
    with events.lock:
        check_space(engine)
        check_banks(engine, expected.quarantined)
        tables = image.dump(engine._catalog)
        wrong = oracle.check_tables(tables, engine.geometry, expected.read_pack)
        watch.look()
    require(wrong is None, f"what is visible is what was saved: {wrong}")
    used = engine.stats().used_bytes
    return (
        f"{tables.token_count} tokens in {len(tables.records)} records byte for byte, {used} bytes "
        "used and committed, no lease, no bank lost"
    )


def reason_without_journal(report: StoreReport) -> str | None:
    """Return why an open that keeps no journal would be cold; None where it would be warm."""
    return "dirty-marker" if report.state == "would-recover" else report.reason


def check_space(engine: Engine) -> None:
    """Require that every used byte is committed to a visible record, and counted right."""
    catalog = engine._catalog
    committed = {record.extent for record in catalog.directory.visible()}
    require(set(catalog.extents.live) == committed, "an extent is used and holds nothing")
    size_bytes = sum(engine.geometry.extent_bytes(extent.width) for extent in committed)
    used = catalog.extents.used_bytes
    require(used == size_bytes, f"{used} bytes are used, {size_bytes} are committed")
    for extent, records in catalog.residents.items():
        require(
            extent.references == len(records) and not extent.growing,
            f"extent at {extent.offset} has {extent.references} references of {len(records)}",
        )


def check_banks(engine: Engine, quarantined: int) -> None:
    """Require that no bank is lost but those in declared quarantine."""
    found = 0
    for banks in (engine._read_banks, engine._save_banks):
        states = [bank.state for bank in banks.banks]
        free = sum(state is BankState.FREE for state in states)
        found += banks.quarantined_count
        require(
            free == banks.free_count and free + banks.quarantined_count == len(states),
            f"banks are lost: {[state.value for state in states]}",
        )
    require(found == quarantined, f"{found} banks are in quarantine, not {quarantined}")


def require(holds: bool, rule: str) -> None:
    """Raise Violation unless the rule holds."""
    if not holds:
        raise Violation(rule)
