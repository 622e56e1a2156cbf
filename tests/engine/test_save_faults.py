"""Nothing becomes visible that was not fully written, and space comes back when writes have."""

from __future__ import annotations

import itertools

import pytest
from rangekv.engine import EngineConfig
from rangekv.engine.devices.fence import Fence, FenceState
from rangekv.engine.transfer.save import SaveState
from rangekv.format.errors import ExitCode
from support.faulty import FaultyFiles, Gate
from support.rig import MIB, MLA, Rig, tokens_of

TOKENS = tokens_of(1, 320)


def start(tmp_path, **config):
    files = FaultyFiles()
    settings = {"read_workers": 4, "lock_wait_s": 0.5, **config}
    return Rig(tmp_path / "s", files=files, config=EngineConfig(**settings)), files


def begin(rig, tokens=TOKENS, **kwargs):
    save = rig.engine.save(rig.key(), tokens)
    ids = rig.take(len(tokens) // rig.model.block_tokens)
    rig.produce(tokens, ids)
    rig.announce(save, ids, **kwargs)
    return save, ids


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "short"])
def test_any_failed_write_keeps_the_range_invisible(tmp_path, failing, kind):
    rig, files = start(tmp_path)

    calls = itertools.count()

    def fail(offset, length):
        if next(calls) == failing:
            if kind == "short":
                return length - 4096
            raise OSError(5 if kind == "EIO" else 28, "injected")
        return None

    files.on_write = fail
    save, ids = begin(rig)
    save.extracted(10)
    save.finish()
    assert not save.wait(10)
    assert save.state is SaveState.FAILED
    assert kind in str(save.error) or "short-write" in str(save.error)
    assert rig.hit(TOKENS) == 0
    rig.give(ids)
    rig.check_quiet()
    assert rig.engine.stats().used_bytes == 0
    files.on_write = None
    assert rig.save(TOKENS)
    assert rig.restore(TOKENS) == 320
    rig.engine.close()


def test_space_of_a_failed_save_waits_for_its_other_writes(tmp_path):
    rig, files = start(tmp_path)
    gate = Gate()

    calls = itertools.count()

    def first_stalls_second_fails(offset, length):
        call = next(calls)
        if call == 0:
            gate(offset, length)
        elif call == 1:
            raise OSError(5, "injected")

    files.on_write = first_stalls_second_fails
    save, _ = begin(rig)
    save.extracted(10)
    assert rig.engine._events.wait_until(lambda: save.state is SaveState.FAILED, 10)
    assert rig.engine.stats().used_bytes > 0
    assert rig.hit(TOKENS) == 0
    gate.opened.set()
    assert not save.wait(10)
    assert rig.engine.stats().used_bytes == 0
    rig.engine.close()


def test_nothing_is_visible_before_the_last_write_has_returned(tmp_path):
    rig, files = start(tmp_path)
    gate = Gate()
    files.on_write = gate
    save, ids = begin(rig)
    assert save.extracted(10)
    rig.give(ids)  # extraction is over: the producer may reuse its blocks
    save.finish()
    assert gate.reached.acquire(timeout=10)
    assert rig.hit(TOKENS) == 0
    gate.opened.set()
    assert save.wait(10)
    assert rig.restore(TOKENS) == 320
    rig.engine.close()


@pytest.mark.parametrize("model", [None, MLA])
def test_an_unfinished_save_publishes_its_proved_prefix(tmp_path, model):
    rig = Rig(tmp_path / "s", **({"model": model} if model else {}))
    tokens = tokens_of(2, 20 * 16)
    save = rig.engine.save(rig.key(), tokens)
    ids = rig.take(20)
    rig.produce(tokens, ids)
    rig.announce(save, ids, end=5 * 16)
    assert save.extracted(10)
    rig.announce(save, ids, begin=5 * 16, end=12 * 16)
    assert save.extracted(10)
    save.layer_ready(0, (12 * 16, 13 * 16), ids[12:13])  # one layer is ahead of the others
    save.finish()
    assert save.wait(10)
    assert rig.restore(tokens) in (11 * 16, 12 * 16)
    assert rig.save(tokens)
    assert rig.restore(tokens) == 320
    rig.check_quiet()
    rig.engine.close()


def test_steps_of_any_size_hash_straddled_pages_right(tmp_path):
    rig = Rig(tmp_path / "s", model=MLA)
    tokens = tokens_of(2, 61 * 16)
    save = rig.engine.save(rig.key(), tokens)
    ids = rig.take(61)
    at = 0
    for step in (1, 2, 3, 5, 7, 11, 13, 19):
        for block in range(at, at + step):
            rig.produce(tokens[: (block + 1) * 16], ids[block : block + 1], block)
        rig.announce(save, ids, begin=at * 16, end=(at + step) * 16)
        assert save.extracted(10)
        for layer in rig.layers:
            layer[ids[at : at + step]] = 0  # the next step may reuse them
        at += step
    save.finish()
    assert save.wait(10)
    assert rig.restore(tokens) == 61 * 16
    rig.engine.close()


def test_pieces_announced_out_of_order_are_joined(tmp_path):
    rig, _ = start(tmp_path)
    save = rig.engine.save(rig.key(), TOKENS)
    ids = rig.take(20)
    rig.produce(TOKENS, ids)
    for block in [5, 3, 4, 0, 2, 1, *range(19, 5, -1)]:
        for layer in range(4):
            save.layer_ready(layer, (block * 16, block * 16 + 16), ids[block : block + 1])
    assert save.extracted(10)
    save.finish()
    assert save.wait(10)
    assert rig.restore(TOKENS) == 320
    rig.engine.close()


def test_without_a_free_bank_the_piece_is_dropped_and_counted(tmp_path):
    rig, files = start(tmp_path, save_banks=1, save_bank=512 * 1024)
    gate = Gate()
    files.on_write = gate
    save, ids = begin(rig, piece=64)
    assert not save.extracted(0.05)
    assert rig.engine.stats().counters["pieces_dropped"] > 0
    gate.opened.set()
    save.finish()
    save.wait(10)
    assert rig.hit(TOKENS) < 320
    rig.give(ids)
    rig.check_quiet()
    assert rig.save(TOKENS, piece=64, by_layer=True) or rig.hit(TOKENS) == 320
    rig.engine.close()


@pytest.mark.parametrize("state", [FenceState.UNKNOWN, FenceState.FAILED])
def test_an_unproved_gather_publishes_nothing(tmp_path, state):
    rig, _ = start(tmp_path)
    gather = rig.engine._device.gather
    rig.engine._device.gather = lambda lane, bank, strips, ids: (
        Fence(state)
        if any(strip.layer_index == 2 for strip in strips)
        else gather(lane, bank, strips, ids)
    )
    save, ids = begin(rig)
    assert not save.extracted(10)
    save.finish()
    assert not save.wait(10)
    rig.engine._device.gather = gather
    assert rig.engine.stats().banks_in_quarantine == (state is FenceState.UNKNOWN)
    assert rig.hit(TOKENS) == 0
    rig.give(ids)
    assert rig.save(TOKENS)
    rig.check_quiet()
    rig.engine.close()


def test_the_same_range_joins_one_reservation(tmp_path):
    rig, files = start(tmp_path)
    gate = Gate()
    files.on_write = gate
    save, _ = begin(rig)
    assert rig.engine.save(rig.key(), TOKENS) is None
    assert rig.engine.save(rig.key(), TOKENS[:100]) is None
    assert rig.engine.stats().counters["saves_declined_joined"] == 2
    gate.opened.set()
    assert save.extracted(10)
    save.finish()
    assert save.wait(10)
    assert rig.engine.save(rig.key(), TOKENS) is None
    assert rig.engine.stats().counters["saves_declined_held"] == 1
    rig.engine.close()


@pytest.mark.parametrize("parent_ends", ["published", "cancelled", "short"])
def test_a_child_becomes_visible_after_its_parent_or_never(tmp_path, parent_ends):
    rig, _ = start(tmp_path)
    parent, parent_ids = begin(rig, TOKENS, end=80 if parent_ends == "short" else 320)
    assert parent.extracted(10)
    longer = tokens_of(1, 400)
    longer[:320] = TOKENS
    child = rig.engine.save(rig.key(), longer)
    assert (child.start_token, child.token_count) == (320, 400)
    ids = rig.take(25)
    rig.produce(longer, ids)
    rig.announce(child, ids)
    assert child.extracted(10)
    child.finish()
    assert rig.engine._events.wait_until(lambda: child.settled, 10)
    assert rig.hit(longer) == 0
    if parent_ends == "cancelled":
        parent.cancel()
    else:
        parent.finish()
    parent.wait(10)
    expected = {"published": 400, "cancelled": 0, "short": 80}[parent_ends]
    assert rig.restore(longer) == expected
    rig.give(ids)
    rig.give(parent_ids)
    rig.check_quiet()
    rig.engine.close()


def test_reset_voids_saves_begun_before(tmp_path):
    rig, _ = start(tmp_path)
    assert rig.save(tokens_of(5, 64))
    save, _ = begin(rig)
    rig.engine.reset()
    save.extracted(10)
    save.finish()
    assert not save.wait(10)
    assert rig.hit(TOKENS) == rig.hit(tokens_of(5, 64)) == 0
    assert rig.save(TOKENS)
    assert rig.restore(TOKENS) == 320
    rig.engine.close()


def test_a_close_that_takes_longer_than_allowed_says_what_it_needs(tmp_path, caplog):
    rig, _ = start(tmp_path)
    assert rig.save(TOKENS)
    result = rig.engine.close(0.0)
    assert result.state == "clean"
    assert "index written in" in result.detail
    assert "close_deadline_s is 0.0: allow" in caplog.text


def test_close_finishes_what_was_accepted(tmp_path):
    rig, _ = start(tmp_path)
    save, _ = begin(rig)
    assert save.extracted(10)
    assert rig.engine.close(30).state == "clean"
    rig = Rig(tmp_path / "s", new=False)
    assert rig.restore(TOKENS) == 320
    rig.engine.close()


def test_a_write_that_never_returns_leaves_the_store_dirty(tmp_path):
    rig, files = start(tmp_path)
    gate = Gate()
    files.on_write = gate
    save, _ = begin(rig)
    assert save.extracted(10)
    assert gate.reached.acquire(timeout=10)
    result = rig.engine.close(0.05)
    assert (result.state, result.exit_code) == ("dirty", ExitCode.UNRETURNED_WRITE)
    gate.opened.set()
    rig = Rig(tmp_path / "s", new=False)
    assert rig.engine.open_result.state == "recovered"
    assert rig.hit(TOKENS) == 0
    rig.engine.close()


def test_a_save_that_can_never_fit_is_declined(tmp_path):
    rig = Rig(tmp_path / "s", capacity=4 * MIB, block_count=2048)
    assert not rig.save(tokens_of(1, 1600 * 16))
    assert rig.engine.stats().counters["saves_declined_too-large"] == 1
    assert rig.engine.save(rig.key(), TOKENS, start_token=32) is None
    assert rig.engine.stats().counters["saves_declined_gap"] == 1
    rig.engine.close()
