"""Every order of events, chosen by a seed: the engine with all its requests on a simulated machine.

Owns the run, what must hold after each event and what must be left at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from rangekv.engine import Engine, EngineConfig
from rangekv.engine.index import image
from rangekv.engine.testing import checks
from rangekv.engine.testing.checks import BankWatch, Violation, require
from rangekv.engine.testing.machine import Machine, MachinePool, MachineStore, machine_files
from rangekv.engine.testing.oracle import Oracle
from rangekv.engine.testing.serving import Serving
from rangekv.engine.transfer.banks import BankState
from rangekv.engine.transfer.restore import RestoreState
from rangekv.format.geometry import ALIGNMENT, Geometry, ModelGeometry, write_unit_bytes
from rangekv.format.tables import Tables

EVENTS = 200


def _geometry(token_bytes: int) -> Geometry:
    """Return a store of three packs, so small that it is short of space all the time."""
    model = ModelGeometry(layer_count=3, token_bytes=token_bytes, block_tokens=16)
    unit = write_unit_bytes(model.block_bytes)
    stripe_min, stripe_max = (2 * unit, 8 * unit) if unit == ALIGNMENT else (unit, 2 * unit)
    return Geometry(
        layer_count=model.layer_count,
        token_bytes=model.token_bytes,
        block_tokens=model.block_tokens,
        stripe_bytes_min=stripe_min,
        stripe_bytes_max=stripe_max,
        pack_bytes=model.layer_count * stripe_max,
        pack_count=3,
        checksum_page_blocks=max(2, unit // model.block_bytes),
    )


ALIGNED = _geometry(256)
UNALIGNED = _geometry(144)


class Simulation:
    """One seed: an engine, its requests, its machine, and the order in which everything happens."""

    def __init__(self, seed: int, events: int = EVENTS) -> None:
        chance = random.Random(seed)
        self.events = events
        self.patience_s = 0.0
        self.chance = chance
        self.geometry = UNALIGNED if seed % 4 == 3 else ALIGNED
        self.oracle = Oracle(self.geometry.model)
        self.machine = Machine(chance)
        self.machine.stall_rate = chance.choice([0.0, 0.0, 0.03, 0.1])
        self.machine.copy_fault_rate = chance.choice([0.0, 0.0, 0.0, 0.03])
        self.files = machine_files(self.geometry, chance)
        self.files.fault_rate = chance.choice([0.0, 0.0, 0.02, 0.1])
        verify = chance.choice(["always", "always", "first-touch"])
        # Who checks a page at first touch believes it from then on.
        self.files.rot_rate = chance.choice([0.0, 0.02]) if verify == "always" else 0.0
        direct = self.geometry is ALIGNED and seed % 3 == 1
        self.config = EngineConfig(
            verify=verify,
            read_bank=self._bank_bytes(chance.choice([1, 2, 4])),
            read_banks=chance.choice([1, 2, 3, 8]),
            read_workers=chance.choice([1, 2, 8]),
            save_bank=self._bank_bytes(chance.choice([2, 4])),
            save_banks=chance.choice([1, 2, 4]),
            ticket_deadline_s=20.0,
            restore_deadline_s=10.0,
            placement="direct" if direct else "banks",
            affinity=frozenset({0}),
            recovery="discard",  # commits have a thread of their own, here one seed orders all
        )
        self._stalled: list[str] = []
        engine = self._engine(None)
        self.serving = Serving(engine, self.oracle, chance)
        self._attach(engine)

    def _bank_bytes(self, pages: int) -> int:
        page = self.geometry.page_bytes
        return pages * page + (0 if self.geometry.block_bytes % ALIGNMENT == 0 else 2 * page)

    def _engine(self, tables: Tables | None) -> Engine:
        store = MachineStore(self.geometry, self.files, tables)
        return Engine(store, self.config, events=self.machine, pool_type=MachinePool)

    def _attach(self, engine: Engine) -> None:
        engine.attach(list(self.serving.kv))
        engine._restores._on_stall = self._stalled.append
        for kind in ("scatter", "gather"):
            real = getattr(engine._device, kind)
            setattr(engine._device, kind, self.machine.copies_through(real))
        self.serving.engine = engine
        self.watch = BankWatch(engine)

    # -- the run -----------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        """Play all events and come to rest. Raises Violation; returns what happened how often."""
        serving, counts = self.serving, self.serving.counts
        acts = self._acts()
        for _ in range(self.chance.randint(0, 3)):
            serving.save_at_once()
        for number in range(self.events):
            act, _ = self.chance.choices(acts, [weight for _, weight in acts])[0]
            name = act.__name__.strip("_").replace("_", " ")
            counts[name] += 1
            self.machine.story.append(name)
            act()
            self._check_now()
            if self._stalled:
                counts["process ended"] += 1
                return counts  # a direct read stood still: the process is no more
            if number % 50 == 49:
                self._check_visible()
        self._come_to_rest()
        return counts

    def _acts(self) -> list[tuple[Callable[[], object], float]]:
        serving, machine = self.serving, self.machine
        return [
            (machine.step, 40),
            (machine.wake, 2),
            (self._time_passes, 2),
            (serving.look_up, 9),
            (serving.look_up_again, 2),
            (serving.claim, 8),
            (serving.claim_wrongly, 1.5),
            (serving.wait_layer, 6),
            (serving.finish, 5),
            (serving.release, 2),
            (serving.save, 5),
            (serving.save_at_once, 4),
            (serving.layer_ready, 12),
            (serving.extracted, 6),
            (serving.finish_save, 4),
            (serving.cancel_save, 1),
            (serving.reset, 0.3),
            (serving.retire, 0.5),
        ]

    def _time_passes(self) -> None:
        self.machine.pass_time(self.chance.choice([0.1, 1.0, 6.0, 25.0]))

    # -- what must hold ----------------------------------------------------------------------------

    @property
    def quarantined(self) -> int:
        """Banks that may be in quarantine at rest: those of copies that were never proved."""
        return self.machine.unproved

    def read_pack(self, offset: int, length: int) -> bytes:
        """Read the pack file past the engine."""
        return bytes(self.files.memory[offset : offset + length])

    def _check_now(self) -> None:
        """Require what holds after every event."""
        engine = self.serving.engine
        require(self.machine.fault is None, f"an event handler failed: {self.machine.fault!r}")
        require(not self.watch.trespasses, "; ".join(self.watch.trespasses))
        used = engine._catalog.extents.used_bytes
        require(0 <= used <= self.geometry.usable_bytes, "used bytes are in bounds")
        for banks in (engine._read_banks, engine._save_banks):
            free = sum(bank.state is BankState.FREE for bank in banks.banks)
            require(free == banks.free_count, "free banks are those that are free")
        counters = engine._counters
        open_leases = counters.leases_taken - counters.leases_released
        require(open_leases == len(engine._catalog.leases.open), "leases are counted right")
        failures = counters.checksum_failures
        require(failures <= self.files.rotten, "only what rotted on its way fails its check")
        self._check_banks(engine)

    def _check_banks(self, engine: Engine) -> None:
        banks, active = engine._read_banks, engine._restores._active
        ahead = [one for one in active if one.state is RestoreState.PREFETCH]
        held = sum(len(one.reading) + len(one.read) for one in ahead)
        require(held <= max(0, len(banks.banks) - 1), "reading ahead leaves a bank")
        starving = banks.free_count == 0 and any(one.read for one in ahead)
        for one in active:
            begins = one.state is RestoreState.BOUND and one.may_read
            waits = begins and not one.pending[0].direct
            require(not (waits and starving), "scheduled work takes banks back")

    def _check_visible(self) -> None:
        tables = image.dump(self.serving.engine._catalog)
        wrong = self.oracle.check_tables(tables, self.geometry, self.read_pack)
        require(wrong is None, f"what is visible is what was saved: {wrong}")

    def _come_to_rest(self) -> None:
        """End every request, let everything return, require that nothing is left, and reopen."""
        serving, machine = self.serving, self.machine
        machine.stall_rate = machine.copy_fault_rate = 0.0
        self.files.fault_rate = self.files.rot_rate = 0.0
        while serving.tickets:
            serving.release()
        while serving.restores:
            serving.finish()
        while serving.saves:
            serving.finish_save()
        while machine.wake() or machine.step():
            pass
        checks.check_quiet(serving.engine, self.oracle, self, self.watch)
        serving.counts["evicted bytes"] = serving.engine._counters.evicted_bytes
        serving.counts["published"] = serving.engine._counters.saves_published
        hits = [serving.hit(tokens) for tokens in serving.prompts]
        while machine.step():
            pass
        result = serving.engine.close(1.0)
        require(result.state == "clean", "the close is clean")
        store = serving.engine.store
        assert isinstance(store, MachineStore)
        self._attach(self._engine(store.kept))
        reopened = [serving.hit(tokens) for tokens in serving.prompts]
        require(reopened == hits or self._lost_banks(), "a reopen shows what was there")
        for tokens in serving.prompts:
            serving.restore_whole(tokens)
        serving.engine.close(1.0)

    def _lost_banks(self) -> bool:
        """Whether the engine had no bank left to read with: then it said so, and missed."""
        return self.machine.unproved >= self.config.read_banks


def simulate(seed: int, events: int = EVENTS) -> Counter[str]:
    """Run one seed; returns what happened how often. Raises Violation with what led to it."""
    simulation = Simulation(seed, events)
    try:
        return simulation.run()
    except Violation as broken:
        story = simulation.machine.story
        last = ", ".join(story[-5:])
        raise Violation(f"seed {seed}, event {len(story)} ({last}): {broken}") from None
