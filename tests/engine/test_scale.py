"""The metadata of a large store stays small and quick; the figures are printed."""

from __future__ import annotations

from rangekv.engine.testing import directory_cost, lookup_cost, scale
from support.effort import effort

TOKENS = effort(3_200_000, 32_000_000)
RECORDS = effort(10_000, 100_000)


def test_metadata_takes_a_few_bytes_a_token(tmp_path, figure):
    found = scale.measure(str(tmp_path), TOKENS, RECORDS)
    assert (found["tokens"], found["records"]) == (TOKENS, RECORDS)
    # 4 for the token, 4 for its share of checksums, the rest for 320 tokens' share of a record.
    assert found["memory_bytes_per_token"] < 20
    assert found["snapshot_bytes"] < 9 * TOKENS
    figure(
        "metadata of a store",
        f"{TOKENS:,} tokens, {RECORDS:,} records: open {found['open_s']} s, close "
        f"{found['close_s']} s, inspect {found['inspect_s']} s, lookup {found['lookup_ms']} ms, "
        f"open after a kill {found['recover_s']} s, "
        f"{found['memory_bytes_per_token']} bytes of memory a token",
    )


def test_a_prompt_is_hit_whole_however_it_is_saved_and_named(tmp_path):
    lines = list(lookup_cost.measure(str(tmp_path), token_count=4_096, turns=4, repeat=1))
    assert [line.partition(":")[0].split() for line in lines] == [
        ["4", "records,", count, "objects"] for count in ("2", "16", "512")
    ]


def test_a_directory_takes_prompts_turns_branches_and_evicts():
    """Every step of the measurement checks what it does; the microseconds are not asserted."""
    steps = list(directory_cost.measure(record_count=200, branch_count=50, sample=20))
    assert steps[0][:2] == ("a prompt", 2)
    assert steps[-1][0] == "a prompt that evicts"
    assert all(microseconds > 0 for _, _, microseconds in steps)
