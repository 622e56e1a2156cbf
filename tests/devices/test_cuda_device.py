"""The CUDA device under a whole engine, over what stands in for a GPU: order, evidence, memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rangekv.engine import EngineConfig
from rangekv.engine.devices.cpu import CpuDevice
from rangekv.engine.payload.posix import PosixPayload
from rangekv.engine.testing.gpu_blocks import GpuBlocks
from rangekv.engine.transfer.bank_sizes import DEVICE_MARGIN, bank_sizes
from rangekv.format.errors import EnvironmentFault, RangeError, TicketError, UsageError
from rangekv.format.geometry import ModelGeometry
from support.rig import POISON, Rig

MIB = 1 << 20
TOKENS = np.arange(1, 321, dtype=np.uint32)
ODD = ModelGeometry(layer_count=3, token_bytes=24, block_tokens=16)


@pytest.fixture
def gpu(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for the one GPU of this machine."""
    from support.gpu_stand_in import stand_in

    return stand_in(monkeypatch)


@pytest.fixture
def rig(gpu: Any, tmp_path: Path) -> Iterator[Rig]:
    found = Rig(tmp_path / "store", device="cuda")
    yield found
    gpu.let_go()
    gpu.errors.clear()
    found.engine.close(30)


def claimed(rig: Rig) -> tuple[Any, np.ndarray]:
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    assert ticket.token_count == len(TOKENS)
    ids = rig.take(len(TOKENS) // rig.model.block_tokens)
    return rig.engine.claim(ticket, TOKENS, ids), ids


@pytest.mark.parametrize("model", [None, ODD], ids=["aligned", "blocks of 384 bytes"])
@pytest.mark.parametrize("piece", [None, 48])
def test_what_a_gpu_saved_a_host_restores_and_the_other_way_round(
    gpu: Any, tmp_path: Path, model: ModelGeometry | None, piece: int | None
) -> None:
    """Bytes, checksums and places are one format, whatever device wrote them."""
    options = {} if model is None else {"model": model}
    first = Rig(tmp_path / "store", device="cuda", **options)
    assert isinstance(first.layers[0], GpuBlocks)
    assert first.save(TOKENS, piece=piece)
    assert first.restore(TOKENS) == len(TOKENS)
    host = first.reopen(device="cpu")
    assert isinstance(host.engine._device, CpuDevice)
    assert host.restore(TOKENS) == len(TOKENS)
    assert host.engine.stats().counters["checksum_failures"] == 0
    more = TOKENS[::-1].copy()
    assert host.save(more, piece=piece)
    last = host.reopen(device="cuda")
    assert last.restore(more) == len(more)
    assert last.restore(TOKENS) == len(TOKENS)
    assert last.engine.close(30).state == "clean"


def test_each_request_has_a_stream_and_a_span_is_one_launch(gpu: Any, rig: Rig) -> None:
    rig.save(TOKENS)
    copies = gpu.copied[-1]
    gathers = [launch for launch in copies.launches if launch[0] == "gather"]
    assert len({stream for _, _, stream in gathers}) == 1
    assert len(gathers) == rig.engine.stats().counters["gathers"]
    assert sum(strips for _, strips, _ in gathers) == rig.model.layer_count
    copies.launches.clear()
    before = rig.engine.stats().counters
    assert rig.restore(TOKENS) == rig.restore(TOKENS) == len(TOKENS)
    counted = rig.engine.stats().counters
    spans = counted["reads"] - before["reads"]
    scatters = [launch for launch in copies.launches if launch[0] == "scatter"]
    assert len(scatters) == spans
    assert sum(strips for _, strips, _ in scatters) == counted["scatters"] - before["scatters"]
    assert len({stream for _, _, stream in scatters}) == 2
    assert 0 not in {stream for _, _, stream in copies.launches}, "copies ran on the default stream"


def test_copies_follow_what_the_caller_had_given_its_stream(gpu: Any, rig: Rig) -> None:
    """A claim orders the scatters behind its thread's stream, and so does each announcement."""
    compute = gpu.stream()
    with gpu.on(compute):
        rig.save(TOKENS)
        restore, _ = claimed(rig)
        assert restore.wait_layer(rig.model.layer_count - 1, 30)
        restore.finish()
    used = {stream for _, _, stream in gpu.copied[-1].launches}
    for number in used:
        follows = [event.stream for event in gpu.streams[number].follows]
        assert follows
        assert set(follows) == {compute}


def test_a_layer_is_ready_when_its_event_has_taken_place(gpu: Any, rig: Rig) -> None:
    rig.save(TOKENS)
    gpu.hold()
    restore, ids = claimed(rig)
    assert not restore.wait_layer(0, 0.3)
    ended = threading.Event()
    finisher = threading.Thread(target=lambda: (restore.finish(), ended.set()))
    finisher.start()
    assert not ended.wait(0.3), "blocks were given back while a copy may fill them"
    gpu.let_go()
    finisher.join(30)
    assert ended.is_set()
    rig.give(ids)


@pytest.mark.parametrize("call", ["query", "synchronize", "record"])
def test_a_copy_that_no_event_proves_fails_its_blocks_and_keeps_its_bank(
    gpu: Any, rig: Rig, call: str
) -> None:
    rig.save(TOKENS)
    if call == "synchronize":
        gpu.hold()  # so that there is something to wait for
    restore = None
    for lost in (call, "drained"):
        gpu.errors[lost] = RuntimeError("CUDA error: an illegal memory access was encountered")
    if call == "record":
        with pytest.raises(TicketError, match="device-failed"):
            claimed(rig)
        return
    restore, ids = claimed(rig)
    assert not restore.wait_layer(0, 30)
    assert set(restore.failed_blocks()) == set(ids.tolist())
    restore.finish()
    assert rig.engine.stats().banks_in_quarantine > 0
    gpu.errors.clear()
    gpu.let_go()


def test_a_save_whose_hashes_fail_publishes_nothing_and_frees_its_bank(gpu: Any, rig: Rig) -> None:
    gpu.errors["hash"] = RuntimeError("CUDA out of memory")
    for _ in range(10):  # more than there are banks
        save = rig.engine.save(rig.key(), TOKENS)
        ids = rig.take(len(TOKENS) // rig.model.block_tokens)
        rig.announce(save, ids)
        assert not save.extracted(30)
        rig.give(ids)
        save.finish()
        assert not save.wait(30)
    assert rig.engine.stats().banks_in_quarantine == 0
    gpu.errors.clear()
    assert rig.save(TOKENS)
    assert rig.restore(TOKENS) == len(TOKENS)


def test_bytes_that_cannot_be_hashed_are_not_delivered(gpu: Any, rig: Rig) -> None:
    rig.save(TOKENS)
    gpu.errors["hash"] = RuntimeError("CUDA out of memory")
    restore, ids = claimed(rig)
    assert not restore.wait_layer(0, 30)
    restore.finish()
    assert all((layer[ids] == POISON).all() for layer in rig.layers)
    gpu.errors.clear()
    rig.give(ids)
    assert rig.restore(TOKENS) == len(TOKENS), "what was not damaged was retired"


@pytest.mark.parametrize("call", ["scatter", "upload", "query", "synchronize"])
def test_a_copy_that_has_ended_without_proof_of_its_bytes_fails_its_blocks_alone(
    gpu: Any, rig: Rig, call: str
) -> None:
    """The bank comes back: an event, or a drained device, tells when what was started has ended.

    Events cannot be asked while a graph is captured.
    """
    rig.save(TOKENS)
    if call == "synchronize":
        gpu.hold()  # so that there is something to wait for
    gpu.errors[call] = RuntimeError("CUDA error: operation not permitted")
    restore, ids = claimed(rig)
    assert not restore.wait_layer(0, 30)
    restore.finish()
    assert set(restore.failed_blocks()) == set(ids.tolist())
    assert rig.engine.stats().banks_in_quarantine == 0
    gpu.errors.clear()
    gpu.let_go()
    rig.give(ids)
    assert rig.restore(TOKENS) == len(TOKENS)


@pytest.mark.parametrize("call", ["gather", "query", "upload"])
def test_a_save_whose_gather_is_not_proved_publishes_nothing(gpu: Any, rig: Rig, call: str) -> None:
    save = rig.engine.save(rig.key(), TOKENS)
    ids = rig.take(len(TOKENS) // rig.model.block_tokens)
    rig.produce(TOKENS, ids)
    rig.announce(save, ids)
    gpu.errors[call] = RuntimeError("CUDA error")
    assert not save.extracted(30)
    save.finish()
    assert not save.wait(30)
    gpu.errors.clear()
    assert rig.restore(TOKENS) == 0


def test_a_save_that_cannot_be_ordered_behind_its_producer_fails(gpu: Any, rig: Rig) -> None:
    save = rig.engine.save(rig.key(), TOKENS)
    ids = rig.take(len(TOKENS) // rig.model.block_tokens)
    gpu.errors["wait_event"] = RuntimeError("CUDA error")
    rig.announce(save, ids)
    assert not save.extracted(30)
    save.finish()
    assert not save.wait(30)
    assert not gpu.copied[-1].launches, "blocks were read that may not be written yet"


def test_a_damaged_page_is_found_by_the_device(gpu: Any, rig: Rig, tmp_path: Path) -> None:
    """A poisoned bank is never delivered: the hash of what was read is the device's own."""
    rig.save(TOKENS)
    rig.close_damaged()
    layer_count = rig.model.layer_count
    again = Rig(rig.path, device="cuda", new=False, config=rig.config)
    ticket = again.engine.lookup(again.key(), TOKENS)
    assert ticket.token_count == len(TOKENS), "the store was not warm: nothing was tested"
    ids = again.take(ticket.token_count // again.model.block_tokens)
    restore = again.engine.claim(ticket, TOKENS, ids)
    assert not any(restore.wait_layer(n, 30) for n in range(layer_count))
    restore.finish()
    for layer in again.layers:
        assert (layer[ids] == POISON).all(), "bytes that failed their checksum were delivered"
    assert again.engine.stats().counters["checksum_failures"] > 0
    again.engine.close(30)


# -- memory ----------------------------------------------------------------------------------------


def test_banks_are_scaled_to_the_memory_that_is_free(gpu: Any, tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store", device="cuda", capacity=2 << 30)
    geometry = rig.engine.geometry
    rig.engine.close(30)
    config = EngineConfig(device="cuda")
    read = 8 * bank_sizes(config, geometry, 1 << 40).read
    plenty = bank_sizes(config, geometry, 1 << 40).save
    assert plenty == min(256 * MIB, geometry.pack_bytes)
    half = bank_sizes(config, geometry, read + 8 * plenty // 2 + DEVICE_MARGIN)
    assert half.save == plenty // 2
    with pytest.raises(EnvironmentFault, match="gpu-memory-utilization") as refused:
        bank_sizes(config, geometry, read)
    assert refused.value.code == "no-device-memory"
    assert str(read) in str(refused.value)
    # What the user has set is not changed behind his back.
    chosen = EngineConfig(device="cuda", save_bank=64 * MIB)
    with pytest.raises(EnvironmentFault):
        bank_sizes(chosen, geometry, read + 8 * 32 * MIB + DEVICE_MARGIN)


def test_all_banks_are_one_piece_that_is_registered_once(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the driver has allocated as one, no part may be registered twice."""
    registered: list[int] = []
    monkeypatch.setattr(
        PosixPayload, "register", lambda self, memory: registered.append(memory.nbytes)
    )
    rig = Rig(tmp_path / "store", device="cuda")
    banks = [*rig.engine._read_banks.banks, *rig.engine._save_banks.banks]
    assert registered == [sum(bank.memory.nbytes for bank in banks)]
    assert len({bank.memory.data_ptr() for bank in banks}) == len(banks)
    rig.engine.close(30)


def test_an_engine_without_room_for_its_banks_does_not_start(gpu: Any, tmp_path: Path) -> None:
    gpu._free_bytes = 70 * MIB
    with pytest.raises(EnvironmentFault, match="no-device-memory"):
        Rig(tmp_path / "store", device="cuda")


def test_a_gpu_that_is_not_there_is_said(torch: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(EnvironmentFault, match="no-gpu") as refused:
        Rig(tmp_path / "store", device="cuda")
    assert "use 'cpu'" in str(refused.value)


def test_layers_of_another_size_or_place_are_refused(gpu: Any, tmp_path: Path) -> None:
    import torch

    rig = Rig(tmp_path / "store", device="cuda")
    rig.engine.close(30)
    device = rig.engine._device
    with pytest.raises(UsageError, match="already-attached"):
        device.attach([])
    fresh = type(device)(2, 64, gpu)
    with pytest.raises(UsageError, match="expected 2"):
        fresh.attach([torch.zeros(4, 64, dtype=torch.uint8)])
    with pytest.raises(UsageError, match="expected cpu with blocks of 64"):
        fresh.attach([torch.zeros(4, 32, dtype=torch.uint8)] * 2)


def test_device_memory_is_never_given_to_the_kernels_own_reads(gpu: Any, tmp_path: Path) -> None:
    gpu.in_host_memory = False
    with pytest.raises(RangeError, match="payload-refused"):
        Rig(tmp_path / "store", device="cuda")
