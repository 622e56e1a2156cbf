"""Connector settings: every key with its default, every refusal by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from rangekv.engine.connector.settings import _READERS, Settings
from rangekv.format.errors import UsageError

MIB = 2**20


def test_every_field_is_a_key_and_the_other_way_round() -> None:
    assert list(_READERS) == [field.name for field in fields(Settings)]


def test_defaults_are_those_of_the_contract() -> None:
    settings = Settings.parse({"store": "/cache"})
    assert settings.capacity is None
    assert settings.dir_capacity is None
    assert settings.tags == "{}"
    assert settings.min_restore_tokens == 0
    assert settings.save_generated is True
    assert settings.verify == "always"
    assert (settings.read_bank, settings.read_banks, settings.read_workers) == (32 * MIB, 8, 8)
    assert (settings.save_bank, settings.save_banks) == (32 * MIB, None)
    assert settings.lookup_timeout_ms == 50
    assert settings.ticket_deadline_s == 60
    assert settings.restore_deadline_s == 30
    assert settings.close_deadline_s == 3
    assert settings.lock_wait_s == 15
    assert settings.placement == "auto"
    assert settings.load_mode == "auto"
    assert settings.admit == "all"
    assert settings.write_budget_per_day is None
    assert settings.allow_fail_policy is False


def test_reads_sizes_and_tags() -> None:
    settings = Settings.parse(
        {"store": "/c", "capacity": "2GiB", "save_bank": 4096, "tags": {"b": 2, "a": "x"}}
    )
    assert settings.capacity == 2 * 2**30
    assert settings.save_bank == 4096
    assert settings.tags == '{"a":"x","b":2}'


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store", ""),
        ("store", 3),
        ("capacity", "16G"),
        ("capacity", -1),
        ("read_bank", 5000),
        ("read_banks", 0),
        ("read_banks", True),
        ("read_workers", "8"),
        ("min_restore_tokens", -1),
        ("save_generated", "yes"),
        ("verify", "sometimes"),
        ("placement", "fast"),
        ("load_mode", "sync"),
        ("admit", "some"),
        ("write_budget_per_day", "1TB"),
        ("lookup_timeout_ms", 0),
        ("close_deadline_s", float("nan")),
        ("close_deadline_s", float("inf")),
        ("tags", ["a"]),
        ("tags", {"a": 1.5}),
        ("tags", {"a": True}),
        ("tags", {"a": "x" * 200}),
        ("tags", {str(n): n for n in range(17)}),
        ("allow_fail_policy", 1),
    ],
)
def test_refuses_by_name(key: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.parse({"store": "/c"} | {key: value})
    assert key in caught.value.message


def test_refuses_unknown_keys_with_a_hint() -> None:
    with pytest.raises(UsageError, match="'capasity'; did you mean 'capacity'") as caught:
        Settings.parse({"store": "/c", "capasity": "1GiB"})
    assert caught.value.code == "unknown-setting"
    with pytest.raises(UsageError, match="load_modus"):
        Settings.parse({"store": "/c", "load_modus": "async"})


def test_refuses_a_missing_store() -> None:
    with pytest.raises(UsageError, match="lacks 'store'"):
        Settings.parse({})


def test_save_banks_take_one_step() -> None:
    affinity = frozenset({0})
    settings = Settings.parse({"store": "/c"})

    def banks(step_bytes: int, chosen: Settings = settings) -> int:
        return chosen.engine_config(
            step_bytes=step_bytes, rank=0, world_size=1, affinity=affinity
        ).save_banks

    assert banks(1) == 8
    assert banks(9 * 32 * MIB + 1) == 10
    assert banks(2**40, Settings.parse({"store": "/c", "save_banks": 3})) == 3
