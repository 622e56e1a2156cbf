"""A session that did not close: what its journal keeps, and what it must not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rangekv.engine import EngineConfig
from rangekv.engine.index import image
from rangekv.engine.inspection import read_store
from rangekv.engine.testing.faulty_files import FaultyFiles, error
from rangekv.format.errors import ExitCode, UsageError
from support.rig import MIB, Rig, tokens_of

# Commits happen when a test asks for them, not by the clock.
CONFIG = EngineConfig(read_workers=4, lock_wait_s=0.5, commit_interval_s=3600)


def killed(rig: Rig) -> Rig:
    """Lose the engine as a kill does, and open what is left of the store."""
    rig.engine._commits.close()
    rig.engine._pool.close(10)
    rig.engine.store.abandon()
    return Rig(rig.path, model=rig.model, config=rig.config, new=False)


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path / "s", config=CONFIG)


def test_what_was_committed_survives_a_kill_and_the_rest_does_not(rig):
    early, late = tokens_of(1, 256), tokens_of(2, 256)
    assert rig.save(early)
    assert rig.engine.commit(10)
    assert rig.save(late)
    again = killed(rig)
    assert again.engine.open_result.state == "recovered"
    assert again.engine.open_result.detail.startswith("1 records, 256 tokens; 1 commits")
    assert again.restore(early) == 256
    assert again.hit(late) == 0
    again.check_quiet()
    assert again.engine.close(10).state == "clean"


def test_sessions_that_are_killed_one_after_another_add_up(rig):
    prompts = [tokens_of(seed, 128) for seed in range(5)]
    for prompt in prompts:
        assert rig.save(prompt)
        assert rig.engine.commit(10)
        rig = killed(rig)
        assert rig.engine.open_result.state == "recovered"
    assert [rig.restore(prompt) for prompt in prompts] == [128] * 5
    rig = rig.reopen()
    assert rig.engine.open_result.state == "warm"
    assert [rig.restore(prompt) for prompt in prompts] == [128] * 5


def test_a_chat_that_grew_in_place_comes_back_as_one(rig):
    chat = tokens_of(3, 512)
    for turn in range(64, 513, 64):
        assert rig.save(chat[:turn])
        assert rig.engine.commit(10)
    records = rig.engine.stats().records
    rig = killed(rig)
    assert rig.engine.stats().records == records > 1
    assert rig.restore(chat) == 512


def test_what_was_forgotten_for_good_stays_forgotten(rig):
    kept, bad, child = tokens_of(4, 128), tokens_of(5, 128), tokens_of(5, 256)
    for prompt in (kept, bad, child):
        assert rig.save(prompt)
    assert rig.engine.commit(10)
    rig.engine.retire(bad)
    assert rig.engine.commit(10)
    rig = killed(rig)
    assert (rig.restore(kept), rig.hit(bad), rig.hit(child)) == (128, 0, 0)


def test_a_reset_is_durable_when_it_returns(rig):
    before, after = tokens_of(6, 128), tokens_of(7, 128)
    assert rig.save(before)
    assert rig.engine.commit(10)
    rig.engine.reset()
    rig = killed(rig)
    assert rig.engine.open_result.state == "recovered"
    assert rig.hit(before) == 0
    assert rig.save(after)
    rig.engine.commit(10)
    assert killed(rig).restore(after) == 128


def test_tenants_come_back_apart(rig):
    prompt = tokens_of(8, 128)
    digest = bytes(range(32))
    root = rig.engine.root(digest)
    save = rig.engine.save(rig.key(), prompt, root=root)
    block_ids = rig.take(8)
    rig.produce(prompt, block_ids)
    rig.announce(save, block_ids)
    assert save.extracted(10)
    save.finish()
    assert save.wait(10)
    rig.engine.commit(10)
    rig = killed(rig)
    assert rig.hit(prompt) == 0
    ticket = rig.engine.lookup(rig.key(), prompt, root=rig.engine.root(digest))
    assert ticket.token_count == 128
    rig.engine.release(ticket)


def test_space_is_written_again_only_when_its_retirement_is_durable(tmp_path):
    """A full store: every save evicts, and no replay shows bytes that were overwritten."""
    rig = Rig(tmp_path / "s", config=CONFIG, capacity=4 * MIB)
    prompts = [tokens_of(seed, 512) for seed in range(20, 32)]
    for prompt in prompts:
        assert rig.save(prompt)
        assert rig.engine.commit(10)
    stats = rig.engine.stats()
    assert stats.counters["evicted_bytes"] > 0
    assert stats.counters["writes_held"] > 0
    shown = [rig.hit(prompt) for prompt in prompts]
    rig = killed(rig)
    assert rig.engine.open_result.state == "recovered"
    for prompt, hit in zip(prompts, shown, strict=True):
        assert rig.restore(prompt) >= hit
    assert rig.engine.stats().counters["checksum_failures"] == 0


def test_a_long_journal_begins_anew_and_keeps_everything(tmp_path):
    rig = Rig(tmp_path / "s", config=CONFIG, capacity=4 * MIB)
    rig.engine._commits.checkpoint_bytes = 4096
    lengths = []
    prompts = [tokens_of(seed, 512) for seed in range(40, 52)]
    for prompt in prompts:
        ticket = rig.engine.lookup(rig.key(), prompts[0])
        assert rig.save(prompt)
        rig.engine.commit(10)
        lengths.append(rig.engine.stats().journal_bytes)
        rig.engine.release(ticket)
    assert rig.engine.store.epoch > rig.engine.epoch, "no checkpoint was made"
    assert max(lengths) < 8192
    shown = [rig.hit(prompt) for prompt in prompts]
    rig = killed(rig)
    assert rig.engine.open_result.state == "recovered"
    for prompt, hit in zip(prompts, shown, strict=True):
        assert rig.restore(prompt) >= hit
    assert rig.engine.stats().counters["checksum_failures"] == 0
    rig.check_quiet()


def test_a_ticket_outlives_a_checkpoint(rig):
    prompt = tokens_of(60, 128)
    assert rig.save(prompt)
    rig.engine._commits.checkpoint_bytes = 1
    ticket = rig.engine.lookup(rig.key(), prompt)
    rig.engine.commit(10)
    rig.engine.commit(10)  # waits for the checkpoint after the first one
    assert rig.engine.store.epoch > rig.engine.epoch
    block_ids = rig.take(8)
    restore = rig.engine.claim(ticket, prompt, block_ids)
    assert all(restore.wait_layer(layer, 10) for layer in range(rig.model.layer_count))
    restore.finish()
    assert rig.restore(prompt) == 128


def test_a_close_that_cannot_write_the_index_keeps_it_in_the_journal(tmp_path):
    files = FaultyFiles()
    rig = Rig(tmp_path / "s", config=CONFIG, files=files)
    prompt = tokens_of(61, 128)
    assert rig.save(prompt)
    files.arm("create_temp .range.snapshot.tmp", error(errno.ENOSPC))
    result = rig.engine.close(10)
    assert (result.state, result.exit_code) == ("dirty", ExitCode.ENVIRONMENT)
    assert "1 commits" in result.detail
    rig = Rig(tmp_path / "s", config=CONFIG, new=False)
    assert rig.engine.open_result.state == "recovered"
    assert rig.restore(prompt) == 128


def test_a_defect_of_a_commit_makes_nobody_wait(rig, monkeypatch):
    assert rig.save(tokens_of(62, 128))
    monkeypatch.setattr(image, "publication", lambda *_: 1 / 0)
    assert rig.engine.commit(10) is False
    assert rig.engine.close(10).state == "clean"


def test_inspect_tells_what_an_open_would_recover(rig):
    assert rig.save(tokens_of(9, 128))
    rig.engine.commit(10)
    rig.engine._commits.close()
    rig.engine.store.abandon()
    report = read_store(str(rig.path))
    assert (report.state, report.exit_code) == ("would-recover", 0)
    assert report.detail.startswith("1 records, 128 tokens; 1 commits, its journal is complete")


def test_without_a_journal_a_kill_loses_the_index(rig, tmp_path):
    prompt = tokens_of(10, 128)
    assert rig.save(prompt)
    rig.engine.commit(10)
    rig.config = EngineConfig(read_workers=4, recovery="discard")
    again = killed(rig)
    assert (again.engine.open_result.state, again.engine.open_result.reason) == (
        "cold",
        "dirty-marker",
    )
    assert not (tmp_path / "s" / "range.journal").exists()
    assert again.engine.commit(1) is False


def test_a_real_kill_keeps_what_an_interval_ago_was_published(tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from rangekv.engine import EngineConfig\n"
        "from support.rig import Rig, tokens_of\n"
        "rig = Rig(Path(sys.argv[1]), config=EngineConfig(commit_interval_s=0.05))\n"
        "assert rig.save(tokens_of(11, 256))\n"
        "while not rig.engine.stats().journal_commits: time.sleep(0.01)\n"
        "print('committed', flush=True)\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "s"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"committed\n"
        process.send_signal(signal.SIGKILL)
    rig = Rig(path, new=False, config=CONFIG)
    assert rig.engine.open_result.state == "recovered"
    assert rig.restore(tokens_of(11, 256)) == 256


def test_an_engine_without_a_journal_has_nothing_to_wait_for(tmp_path):
    rig = Rig(tmp_path / "s", config=EngineConfig(recovery="discard"), capacity=4 * MIB)
    for seed in range(12):
        assert rig.save(tokens_of(seed, 512))
    assert rig.engine.stats().counters["writes_held"] == 0
    rig.engine.reset()


def test_settings_of_the_journal_are_checked():
    with pytest.raises(UsageError, match="recovery is 'none'"):
        EngineConfig(recovery="none")
    with pytest.raises(UsageError, match="commit_interval_s is 0"):
        EngineConfig(commit_interval_s=0)
