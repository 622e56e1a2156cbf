"""Defects that were found by reading, each as the rule that it broke."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from rangekv.engine import EngineConfig
from rangekv.engine.devices.fence import Fence, FenceState
from rangekv.engine.events import EventQueue
from rangekv.engine.payload.pool import Priority, WorkerPool
from rangekv.format.errors import ExitCode, StoreLocked, TicketError, TransferError, UsageError
from support.faulty import FaultyFiles, Gate
from support.rig import MIB, Rig, tokens_of

TOKENS = tokens_of(1, 160)
OTHER = tokens_of(2, 160)


def start(folder, **config):
    files = FaultyFiles()
    settings = {"read_workers": 4, "lock_wait_s": 0.0, **config}
    return Rig(folder, files=files, capacity=4 * MIB, config=EngineConfig(**settings)), files


def claim(rig, tokens=TOKENS):
    ticket = rig.engine.lookup(rig.key(), tokens)
    block_ids = rig.take(ticket.token_count // 16)
    return rig.engine.claim(ticket, tokens, block_ids), block_ids


def begin(rig, tokens=TOKENS, **kwargs):
    save = rig.engine.save(rig.key(), tokens)
    ids = rig.take(len(tokens) // 16)
    rig.produce(tokens, ids)
    rig.announce(save, ids, **kwargs)
    return save, ids


def in_thread(call):
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_cancelled_deadline_lets_go_of_what_it_would_have_acted_on():
    class Ticket:
        pass

    events = EventQueue()
    ticket = Ticket()
    gone = weakref.ref(ticket)
    deadline = events.at(3600, lambda _: None, ticket)
    deadline.cancel()
    del ticket
    gc.collect()
    assert gone() is None
    for _ in range(1_000):
        events.at(3600, print).cancel()
    assert len(events._deadlines) < 100
    events.close()


def test_a_defect_does_not_end_the_wait_for_a_copy_in_flight(tmp_path):
    """After a fault the caller would reuse blocks that a worker still fills."""
    rig, _ = start(tmp_path / "s")
    assert rig.save(TOKENS)
    gate = Gate()
    scatter = rig.engine._device.scatter

    def held(*copy):
        gate(0, 0)
        return scatter(*copy)

    rig.engine._device.scatter = held
    restore, _ = claim(rig)
    assert gate.reached.acquire(timeout=10)
    rig.engine._events.post(lambda: 1 / 0)
    assert not restore.wait_layer(0, 10)
    ended = threading.Event()
    thread = in_thread(lambda: (restore.finish(), ended.set()))
    assert not ended.wait(0.05)
    gate.opened.set()
    assert ended.wait(10)
    thread.join()
    assert rig.engine.close(5).exit_code is ExitCode.CHECK_FAILED


def test_an_interrupt_that_hits_a_handler_is_still_an_interrupt():
    events = EventQueue()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        events.post(interrupted)
    assert isinstance(events.fault, KeyboardInterrupt)
    events.close()


def test_a_cancel_wakes_those_who_wait_for_the_outcome(tmp_path):
    rig, _ = start(tmp_path / "s")
    save = rig.engine.save(rig.key(), TOKENS)
    waiting = in_thread(save.wait)
    save.cancel()
    waiting.join(10)
    assert not waiting.is_alive()
    rig.engine.close()


def test_copies_go_on_while_every_read_stands_still(tmp_path):
    rig, files = start(tmp_path / "s", read_workers=2)
    third = tokens_of(3, 160)
    assert rig.save(TOKENS)
    assert rig.save(third)
    gate = Gate()
    files.on_read = gate
    restores = [claim(rig)[0], claim(rig, third)[0]]
    assert gate.reached.acquire(timeout=10)
    assert gate.reached.acquire(timeout=10)
    save, ids = begin(rig, OTHER)
    assert save.extracted(10)
    rig.give(ids)
    assert all(not restore.errors for restore in restores)  # the reads still stand there
    gate.opened.set()
    save.finish()
    assert save.wait(10)
    for restore in restores:
        assert all(restore.wait_layer(layer, 10) for layer in range(4))
        restore.finish()
    assert rig.restore(OTHER) == 160
    rig.check_quiet()
    rig.engine.close()


def test_all_threads_of_a_pool_end_whatever_is_queued():
    events = EventQueue()
    pool = WorkerPool(events, 5, None)
    gate = threading.Event()
    outcomes: list[BaseException | None] = []
    for _ in range(6):
        pool.submit(Priority.WRITE, gate.wait, lambda result, error: outcomes.append(error))
    threading.Timer(0.02, gate.set).start()
    assert pool.close(10)
    assert len(outcomes) == 6
    refused = [error for error in outcomes if error is not None]
    assert refused
    assert all("engine-closed" in str(error) for error in refused)
    pool.submit(Priority.COPY, gate.wait, lambda result, error: outcomes.append(error))
    assert isinstance(outcomes[-1], TransferError)


def test_workers_live_on_where_their_cpus_cannot_be_had(tmp_path):
    rig, _ = start(tmp_path / "s", affinity=frozenset({9999}))
    assert rig.save(TOKENS)
    assert rig.engine.commit(10)
    assert rig.restore(TOKENS) == 160
    rig.engine.close()


def test_a_refused_engine_leaves_no_threads(tmp_path):
    start(tmp_path / "s")[0].engine.close()
    before = threading.active_count()
    with pytest.raises(UsageError, match="bank-too-small"):
        Rig(tmp_path / "s", new=False, config=EngineConfig(read_bank=4096))
    assert threading.active_count() == before


def test_no_write_begins_after_a_close_and_none_outlives_the_lock(tmp_path):
    """A write on a descriptor that was closed may land in any file that has its number now."""
    rig, files = start(tmp_path / "s", read_workers=2)
    gate = Gate()
    files.on_write = gate
    save, _ = begin(rig)
    save.extracted(10)
    assert gate.reached.acquire(timeout=10)
    assert rig.engine.close(0.02).exit_code is ExitCode.UNRETURNED_WRITE
    with pytest.raises(StoreLocked):
        Rig(tmp_path / "s", new=False, config=rig.config)
    begun = len(files.writes)
    gate.opened.set()
    for thread in rig.engine._pool.threads:
        thread.join(10)
    assert len(files.writes) == begun
    rig = Rig(tmp_path / "s", new=False, config=rig.config)
    assert rig.engine.open_result.state == "recovered"
    assert rig.hit(TOKENS) == 0
    rig.engine.close()


def test_a_ticket_of_another_engine_is_refused_and_left_alone(tmp_path):
    rig, _ = start(tmp_path / "one")
    other, _ = start(tmp_path / "other")
    assert rig.save(TOKENS)
    assert other.save(TOKENS)
    assert rig.engine.epoch == other.engine.epoch
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    with pytest.raises(TicketError, match="foreign-ticket"):
        other.engine.claim(ticket, TOKENS, other.take(10))
    other.engine.release(ticket)
    ids = rig.take(10)
    restore = rig.engine.claim(ticket, TOKENS, ids)
    assert all(restore.wait_layer(layer, 10) for layer in range(4))
    restore.finish()
    for each in (rig, other):
        each.check_quiet()
        each.engine.close()


def test_a_repeated_lookup_never_stands_for_another_query(tmp_path):
    rig, _ = start(tmp_path / "s")
    assert rig.save(TOKENS)
    key = rig.key()
    first = rig.engine.lookup(key, TOKENS)
    with pytest.raises(TicketError, match="tokens-changed"):
        rig.engine.lookup(key, TOKENS, root=1)
    shorter = rig.engine.lookup(key, TOKENS, max_tokens=100)
    assert (first.token_count, shorter.token_count) == (160, 96)
    with pytest.raises(TicketError, match="stale-ticket"):
        rig.engine.claim(first, TOKENS, rig.take(10))
    rig.engine.release(shorter)
    rig.check_quiet()
    rig.engine.close()


def test_blocks_that_were_not_extracted_are_not_read_after_finish(tmp_path):
    """The producer reuses its blocks: their new content is not the KV of these tokens."""
    rig, files = start(tmp_path / "s", read_workers=1, save_banks=1)
    gate = Gate()
    files.on_write = gate
    first, _ = begin(rig, OTHER)
    assert first.extracted(10)
    save, ids = begin(rig)
    save.finish()
    for layer in rig.layers:
        layer[ids] = 0xAA
    gate.opened.set()
    first.finish()
    assert first.wait(10)
    assert not save.wait(10)
    assert rig.hit(TOKENS) == 0
    assert rig.restore(OTHER) == 160
    rig.check_quiet()
    rig.engine.close()


@pytest.mark.parametrize("ends_by", ["failure", "cancel"])
def test_a_save_settles_when_several_of_its_gathers_fail(tmp_path, ends_by):
    rig, _ = start(tmp_path / "s", save_bank=256 * 1024)
    tokens = tokens_of(3, 256 * 3)
    gate = Gate()

    def fail(*_):
        gate(0, 0)
        raise MemoryError

    rig.engine._device.gather = fail
    save, _ = begin(rig, tokens, piece=256)
    assert gate.reached.acquire(timeout=10)
    assert gate.reached.acquire(timeout=10)
    cancelling = in_thread(save.cancel) if ends_by == "cancel" else None
    gate.opened.set()
    if cancelling is not None:
        cancelling.join(10)
    assert not save.wait(10)
    assert save.settled
    assert rig.engine.stats().used_bytes == 0
    assert rig.engine.close(5).state == "clean"


def test_a_write_that_stands_still_gives_its_save_up_without_traffic(tmp_path):
    rig, files = start(tmp_path / "s", restore_deadline_s=0.05)
    gate = Gate()
    files.on_write = gate
    save, ids = begin(rig)
    assert save.extracted(10)
    save.finish()
    assert rig.engine._events.wait_until(lambda: save.error is not None, 10)
    assert "write-deadline" in str(save.error)
    stats = rig.engine.stats()
    assert stats.banks_in_quarantine == 1
    assert stats.used_bytes > 0  # a late write may still land there
    assert rig.engine.save(rig.key(), TOKENS) is not None  # nobody waits for it any more
    gate.opened.set()
    assert not save.wait(10)
    assert rig.engine.stats().banks_in_quarantine == 0
    rig.give(ids)
    rig.engine.close()


def test_lookups_are_misses_while_all_banks_stand_still(tmp_path):
    rig, files = start(tmp_path / "s", restore_deadline_s=0.02, read_banks=2)
    assert rig.save(TOKENS)
    gate = Gate()
    files.on_read = gate
    claims = [claim(rig), claim(rig)]
    for restore, _ in claims:
        assert not restore.wait_layer(0, 10)
        restore.finish()
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    assert (ticket.token_count, ticket.reason) == (0, "stalled")
    files.on_read = None
    gate.opened.set()
    assert rig.engine._events.wait_until(lambda: rig.engine._read_banks.free_count == 2, 10)
    for _, ids in claims:
        rig.give(ids)
    assert rig.restore(TOKENS) == 160
    rig.check_quiet()
    rig.engine.close()


def test_reads_of_an_unclaimed_ticket_that_stand_still_are_seen(tmp_path):
    rig, files = start(tmp_path / "s", ticket_deadline_s=0.02)
    assert rig.save(TOKENS)
    gate = Gate()
    files.on_read = gate
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    assert gate.reached.acquire(timeout=10)
    assert rig.engine._events.wait_until(lambda: ticket.state.value == "released", 10)
    assert rig.engine.stats().banks_in_quarantine == 1
    gate.opened.set()
    rig.check_quiet()
    assert rig.engine.stats().banks_in_quarantine == 0
    rig.engine.close()


def test_a_fence_that_fails_leaves_other_requests_alone(tmp_path):
    rig, _ = start(tmp_path / "s", read_banks=2)
    assert rig.save(TOKENS)
    assert rig.save(np.concatenate([TOKENS, OTHER]))
    scatter = rig.engine._device.scatter
    rig.engine._device.scatter = lambda layer, *rest: Fence(FenceState.FAILED)
    restore, _ = claim(rig)
    assert not any(restore.wait_layer(layer, 10) for layer in range(4))
    restore.finish()
    rig.engine._device.scatter = scatter
    assert rig.restore(np.concatenate([TOKENS, OTHER])) == 320
    rig.check_quiet()
    rig.engine.close()
