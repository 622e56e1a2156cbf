"""A claim gets exactly what was promised, or a named refusal; leases end whatever happens."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from rangekv.engine import EngineConfig, RequestKey
from rangekv.format.errors import TicketError, UsageError
from support.rig import Rig, tokens_of

TOKENS = tokens_of(1, 160)


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path / "s")
    assert rig.save(TOKENS)
    yield rig
    rig.check_quiet()
    rig.engine.close()


def test_a_repeated_lookup_is_the_same_ticket(rig):
    key = rig.key()
    first = rig.engine.lookup(key, TOKENS)
    assert rig.engine.lookup(key, TOKENS) is first
    with pytest.raises(TicketError, match="tokens-changed"):
        rig.engine.lookup(key, TOKENS[:150])
    rig.engine.release(first)
    assert rig.engine.stats().counters["leases_taken"] == 2  # one save, one ticket


def test_a_repeated_lookup_with_another_local_hit_is_a_new_ticket(rig):
    key = rig.key()
    first = rig.engine.lookup(key, TOKENS)
    second = rig.engine.lookup(key, TOKENS, skip_tokens=32)
    assert second is not first
    with pytest.raises(TicketError, match="stale-ticket"):
        rig.engine.claim(first, TOKENS, rig.take(10))
    restore = rig.engine.claim(second, TOKENS, rig.take(8))
    assert restore.wait_layer(3, 10)
    restore.finish()


@pytest.mark.parametrize("at", [0, 80, 159])
def test_altered_tokens_are_refused(rig, at):
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    altered = TOKENS.copy()
    altered[at] += 1
    with pytest.raises(TicketError, match="tokens-changed"):
        rig.engine.claim(ticket, altered, rig.take(10))


@pytest.mark.parametrize("count", [0, 9, 11])
def test_an_altered_endpoint_is_refused(rig, count):
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    with pytest.raises(TicketError, match="endpoint-changed"):
        rig.engine.claim(ticket, TOKENS, rig.take(count))


@pytest.mark.parametrize("bad", [-1, 512, "twice"])
def test_destinations_outside_paged_kv_are_refused(rig, bad):
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    ids = rig.take(10)
    ids[3] = ids[4] if bad == "twice" else bad
    with pytest.raises(UsageError, match="bad-block-id"):
        rig.engine.claim(ticket, TOKENS, ids)


def test_a_ticket_of_another_epoch_or_rank_is_refused(rig):
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    ticket.epoch += 1
    with pytest.raises(TicketError, match="foreign-ticket"):
        rig.engine.claim(ticket, TOKENS, rig.take(10))


def test_double_claim_and_double_release(rig):
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    restore = rig.engine.claim(ticket, TOKENS, rig.take(10))
    with pytest.raises(TicketError, match="stale-ticket"):
        rig.engine.claim(ticket, TOKENS, rig.take(10))
    assert all(restore.wait_layer(layer, 10) for layer in range(4))
    restore.finish()
    restore.finish()
    rig.engine.release(ticket)
    rig.engine.release(ticket)
    stats = rig.engine.stats().counters
    assert stats["leases_taken"] == stats["leases_released"] == 2
    assert stats["delivered_tokens"] == 160


def test_a_retired_generation_is_refused_and_its_lease_ends(rig):
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    rig.engine.reset()
    with pytest.raises(TicketError, match="stale-ticket"):
        rig.engine.claim(ticket, TOKENS, rig.take(10))
    assert rig.hit(TOKENS) == 0


def test_a_lease_outlives_the_ticket_object(rig):
    rig.engine.lookup(RequestKey("lost", "s"), TOKENS)
    gc.collect()
    assert rig.engine.stats().leases_open == 1
    rig.engine.release(rig.engine.lookup(RequestKey("lost", "s"), TOKENS))


def test_an_unclaimed_ticket_ends_without_further_traffic(tmp_path):
    rig = Rig(tmp_path / "s", config=EngineConfig(ticket_deadline_s=0.05, lock_wait_s=0.1))
    assert rig.save(TOKENS)
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    assert rig.engine._events.wait_until(lambda: not rig.engine._catalog.leases.open, 10)
    with pytest.raises(TicketError, match="stale-ticket"):
        rig.engine.claim(ticket, TOKENS, rig.take(10))
    assert rig.engine.stats().counters["miss_deadline"] == 1
    rig.engine.close()


@pytest.mark.parametrize(
    ("tokens", "skip", "reason"),
    [
        (TOKENS[:15], 0, "below-one-block"),
        (tokens_of(2, 64), 0, "absent"),
        (TOKENS, 160, "nothing-beyond-skip"),
    ],
)
def test_every_miss_has_its_reason(rig, tokens, skip, reason):
    ticket = rig.engine.lookup(rig.key(), tokens, skip_tokens=skip)
    assert (ticket.token_count, ticket.reason) == (0, reason)
    assert rig.engine.stats().counters[f"miss_{reason}"] == 1


def test_tokens_may_come_in_pieces_and_in_any_uint32_buffer(rig):
    from array import array

    forms = [
        TOKENS,
        [TOKENS[:7], TOKENS[7:]],
        array("I", TOKENS.tolist()),
        TOKENS.tobytes(),
        TOKENS.tolist(),
    ]
    assert [rig.hit(form) for form in forms] == [160] * 5
    with pytest.raises(UsageError, match="bad-tokens"):
        rig.engine.lookup(rig.key(), TOKENS.astype(np.int64))


def test_tokens_of_a_claim_may_go_on_behind_the_endpoint(rig):
    ticket = rig.engine.lookup(rig.key(), TOKENS, max_tokens=100)
    assert ticket.token_count == 96
    restore = rig.engine.claim(ticket, TOKENS, rig.take(6))
    assert restore.wait_layer(3, 10)
    restore.finish()


def test_a_closed_engine_refuses_by_name(tmp_path):
    rig = Rig(tmp_path / "s")
    rig.engine.close()
    with pytest.raises(UsageError, match="engine-closed"):
        rig.engine.lookup(rig.key(), TOKENS)
