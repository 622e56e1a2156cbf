"""What is saved comes back byte for byte, at every geometry, piece size, clip and skip."""

from __future__ import annotations

import numpy as np
import pytest
from rangekv.engine import EngineConfig
from rangekv.format.errors import UsageError
from rangekv.format.geometry import ModelGeometry, stripe_bytes_floor
from support.rig import MIB, MLA, SMALL, Rig, tokens_of


@pytest.mark.parametrize("model", [SMALL, MLA, ModelGeometry(5, 256, 16), ModelGeometry(2, 64, 32)])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("piece_blocks", [1, 3, None])
def test_bytes_survive_a_reopen(tmp_path, model, by_layer, piece_blocks):
    rig = Rig(tmp_path / "s", model=model)
    tokens = tokens_of(1, 40 * model.block_tokens + 5)
    piece = piece_blocks and piece_blocks * model.block_tokens
    assert rig.save(tokens, piece=piece, by_layer=by_layer)
    assert rig.restore(tokens) == 40 * model.block_tokens
    rig = rig.reopen()
    assert rig.engine.open_result.state == "warm"
    assert rig.restore(tokens) == 40 * model.block_tokens
    rig.check_quiet()
    rig.engine.close()


@pytest.mark.parametrize("model", [SMALL, MLA])
def test_every_clip_and_skip_delivers_only_its_own_blocks(tmp_path, model):
    rig = Rig(tmp_path / "s", model=model)
    size = model.block_tokens
    tokens = tokens_of(2, 37 * size)
    assert rig.save(tokens)
    for skip in (0, 1, 8, 17, 36):
        for end in (skip + 1, skip + 2, 37):
            most = min(end, 37) * size + (size - 1)
            assert rig.restore(tokens, skip=skip * size, most=most) == min(end, 37) * size
    assert rig.engine.stats().counters["checksum_failures"] == 0
    rig.check_quiet()
    rig.engine.close()


def test_the_smallest_store_of_a_model_works(tmp_path):
    model = ModelGeometry(2, 1152, 16)
    capacity = 4 * model.layer_count * stripe_bytes_floor(model.block_bytes)
    rig = Rig(tmp_path / "s", model=model, capacity=capacity)
    tokens = tokens_of(3, 4 * 16)
    assert rig.save(tokens)
    assert rig.restore(tokens) == 64
    rig.engine.close()


def test_a_stripe_wider_than_a_bank_is_read_in_pieces(tmp_path):
    config = EngineConfig(read_bank=256 * 1024, save_bank=256 * 1024, read_banks=2, save_banks=2)
    rig = Rig(tmp_path / "s", config=config, capacity=64 * MIB)
    tokens = tokens_of(3, 100 * 16)
    assert rig.save(tokens, by_layer=True)
    assert rig.restore(tokens) == 1600
    assert rig.engine.stats().counters["reads"] == 4 * 7  # 1.6 MB of a layer in 256 KiB banks
    rig.engine.close()


def test_full_narrow_extents_are_read_several_layers_at_once(tmp_path):
    rig = Rig(tmp_path / "s")
    width = rig.engine.geometry.stripe_bytes_min
    tokens = tokens_of(4, width // SMALL.token_bytes)
    grown = np.concatenate([tokens, tokens_of(5, len(tokens))])
    assert rig.save(tokens)
    assert rig.save(grown[:-16])
    assert rig.engine.stats().extents == 1
    assert rig.restore(grown) == len(grown) - 16
    # Neighbouring records are one span per layer; a full extent is one span for all layers.
    assert rig.engine.stats().counters["reads"] == SMALL.layer_count
    assert rig.save(grown)
    assert rig.restore(grown) == len(grown)
    assert rig.engine.stats().counters["reads"] == SMALL.layer_count + 1
    rig.engine.close()


def test_a_setting_that_cannot_work_loses_nothing(tmp_path):
    rig = Rig(tmp_path / "s")
    tokens = tokens_of(3, 320)
    assert rig.save(tokens)
    rig.engine.close()
    with pytest.raises(UsageError, match="bank-too-small"):
        Rig(tmp_path / "s", new=False, config=EngineConfig(read_bank=4096, lock_wait_s=0.1))
    rig = Rig(tmp_path / "s", new=False)
    assert rig.engine.open_result.state == "warm"
    assert rig.restore(tokens) == 320
    rig.engine.close()


def test_growth_in_place_leaves_earlier_records_untouched(tmp_path):
    rig = Rig(tmp_path / "s")
    tokens = tokens_of(6, 30 * 16)
    for turn in range(1, 31):
        assert rig.save(tokens[: turn * 16])
        assert rig.restore(tokens[: turn * 16]) == turn * 16
    stats = rig.engine.stats()
    assert stats.records == 30
    assert stats.extents <= 8
    rig = rig.reopen()
    assert rig.restore(tokens) == 480
    rig.check_quiet()
    rig.engine.close()


def test_unaligned_ends_never_grow_in_place(tmp_path):
    rig = Rig(tmp_path / "s", model=MLA)
    tokens = tokens_of(8, 9 * 16)
    assert rig.save(tokens[: 3 * 16])  # 3 blocks of 18,432 bytes do not end at 4096
    assert rig.save(tokens)
    assert rig.engine.stats().extents == 2
    assert rig.restore(tokens) == 9 * 16
    rig.engine.close()


def test_divergence_inside_a_block_floors_to_the_block(tmp_path):
    rig = Rig(tmp_path / "s")
    tokens = tokens_of(9, 20 * 16)
    assert rig.save(tokens)
    other = tokens.copy()
    other[10 * 16 + 7] ^= 1
    assert rig.restore(other) == 160
    assert rig.save(other)
    assert rig.restore(other) == 320
    assert rig.restore(tokens) == 320
    high = tokens.copy()
    high[5] ^= np.uint32(1 << 31)  # ids that differ only in their highest bit are different
    assert rig.hit(high) == 0
    rig.check_quiet()
    rig.engine.close()


def test_close_gives_bank_memory_back_at_once(tmp_path):
    rig = Rig(tmp_path / "s")
    banks = [*rig.engine._read_banks.banks, *rig.engine._save_banks.banks]
    assert all(bank.memory.nbytes > 0 for bank in banks)
    assert rig.save(tokens_of(3, 320))
    rig.engine.close()
    assert all(bank.memory is None for bank in banks)
    assert rig.engine.stats().counters["saves"] == 1
