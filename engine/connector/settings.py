"""The connector's settings: what `kv_connector_extra_config` may say, with defaults and checks.

Reads one mapping and refuses what it does not know by name; never looks at vLLM or at the disk.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rangekv.engine.config import EngineConfig
from rangekv.engine.sizes import parse_size
from rangekv.format.errors import UsageError

PAGE_BYTES = 4096
TAG_COUNT_MAX = 16
TAG_CHARACTERS_MAX = 128
SAVE_BANKS_MIN = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """One field per key of `kv_connector_extra_config`. Sizes in bytes, `_s` seconds, `_ms` ms.

    `capacity` is the total of one namespace over its ranks and None when the user gave none;
    `write_budget_per_day` is over all ranks too, and None for no limit; `save_banks` None means: as
    many as one step's KV needs.
    """

    store: str
    capacity: int | None = None
    dir_capacity: int | None = None
    tags: str = "{}"  # canonical JSON: a namespace value
    min_restore_tokens: int = 0
    save_generated: bool = True
    admit: str = "all"
    write_budget_per_day: int | None = None
    verify: str = "always"
    read_bank: int = 32 << 20
    read_banks: int = 8
    read_workers: int = 8
    save_bank: int = 32 << 20
    save_banks: int | None = None
    lookup_timeout_ms: float = 50
    ticket_deadline_s: float = 60
    restore_deadline_s: float = 30
    close_deadline_s: float = 3
    lock_wait_s: float = 15
    placement: str = "auto"
    payload: str = "posix"
    load_mode: str = "auto"
    recovery: str = "journal"
    commit_interval_s: float = 5
    allow_fail_policy: bool = False

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> Settings:
        """Return the checked settings; raises UsageError that names the first key that is wrong."""
        for key in extra_config:
            if key not in _READERS:
                close = difflib.get_close_matches(str(key), _READERS, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(_READERS)}"
                raise UsageError(
                    "unknown-setting", f"kv_connector_extra_config has {str(key)[:40]!r}; {hint}"
                )
        if "store" not in extra_config:
            raise UsageError(
                "bad-setting",
                "kv_connector_extra_config lacks 'store'; set it to the directory of the cache",
            )
        return cls(**{key: _READERS[key](key, value) for key, value in extra_config.items()})

    def engine_config(
        self, *, step_bytes: int, rank: int, world_size: int, affinity: frozenset[int]
    ) -> EngineConfig:
        """Return what one rank's engine needs; `step_bytes` is the KV that one step can produce.

        Without a `save_banks` of the user there are enough banks to take a whole step at once.
        """
        banks = self.save_banks or max(SAVE_BANKS_MIN, -(-step_bytes // self.save_bank))
        return EngineConfig(
            verify=self.verify,
            read_bank=self.read_bank,
            read_banks=self.read_banks,
            read_workers=self.read_workers,
            save_bank=self.save_bank,
            save_banks=banks,
            ticket_deadline_s=self.ticket_deadline_s,
            restore_deadline_s=self.restore_deadline_s,
            close_deadline_s=self.close_deadline_s,
            lock_wait_s=self.lock_wait_s,
            placement=self.placement,
            payload=self.payload,
            recovery=self.recovery,
            commit_interval_s=self.commit_interval_s,
            rank=rank,
            world_size=world_size,
            affinity=affinity,
        )


def _bad(key: str, value: object, expected: str) -> UsageError:
    return UsageError("bad-setting", f"{key} is {str(value)[:40]!r}, expected {expected}")


def _path(key: str, value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _bad(key, value, "the path of a directory")
    return value


def _size(key: str, value: Any) -> int:
    return parse_size(value, name=key)


def _bank(key: str, value: Any) -> int:
    return parse_size(value, name=key, multiple_of=PAGE_BYTES)


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _bad(key, value, "true or false")
    return value


def _whole(least: int) -> Callable[[str, object], int]:
    def read(key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _bad(key, value, f"a whole number of {least} or more")
        return value

    return read


def _time(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
        raise _bad(key, value, "a positive number of " + ("ms" if key.endswith("_ms") else "s"))
    return value


def _one_of(*choices: str) -> Callable[[str, object], str]:
    def read(key: str, value: object) -> str:
        # YAML and some shells turn a bare `off` into false
        value = "off" if value is False and "off" in choices else value
        if not isinstance(value, str) or value not in choices:
            raise _bad(key, value, f"one of {', '.join(choices)}")
        return value

    return read


def _tags(key: str, value: object) -> str:
    expected = f"at most {TAG_COUNT_MAX} names with short strings or whole numbers"
    if not isinstance(value, Mapping) or len(value) > TAG_COUNT_MAX:
        raise _bad(key, value, expected)
    for name, tag in value.items():
        if not isinstance(name, str) or isinstance(tag, bool) or not isinstance(tag, (str, int)):
            raise _bad(key, value, expected)
        if max(len(name), len(str(tag))) > TAG_CHARACTERS_MAX:
            raise _bad(f"{key}.{name[:40]}", tag, f"at most {TAG_CHARACTERS_MAX} characters")
    return json.dumps(dict(value), sort_keys=True, separators=(",", ":"))


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "store": _path,
    "capacity": _size,
    "dir_capacity": _size,
    "tags": _tags,
    "min_restore_tokens": _whole(0),
    "save_generated": _flag,
    "admit": _one_of("all", "second-touch"),
    "write_budget_per_day": _size,
    "verify": _one_of("always", "first-touch", "off"),
    "read_bank": _bank,
    "read_banks": _whole(1),
    "read_workers": _whole(1),
    "save_bank": _bank,
    "save_banks": _whole(1),
    "lookup_timeout_ms": _time,
    "ticket_deadline_s": _time,
    "restore_deadline_s": _time,
    "close_deadline_s": _time,
    "lock_wait_s": _time,
    "placement": _one_of("auto", "direct", "banks"),
    "payload": _one_of("posix", "compat", "gds"),
    "load_mode": _one_of("auto", "layerwise", "async"),
    "recovery": _one_of("journal", "discard"),
    "commit_interval_s": _time,
    "allow_fail_policy": _flag,
}
