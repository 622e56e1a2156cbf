"""Owns the settings of one engine and their validation; it never reads files or the environment."""

from __future__ import annotations

from dataclasses import dataclass

from rangekv.format.errors import UsageError

MIB = 1 << 20
VERIFY_POLICIES = ("always", "first-touch", "off")
PLACEMENTS = ("auto", "direct", "banks")
RECOVERIES = ("journal", "discard")
PAYLOADS = ("posix", "compat", "gds")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; sizes in bytes, times in seconds.

    `read_bank` and `save_bank` are upper bounds: an engine never holds a bank larger than one pack.
    `device` says where paged KV and banks lie: `cpu`, or `cuda` for torch's current GPU. Without a
    `save_bank` it is 32 MiB, on a GPU 256 MiB or what there is room for.
    `affinity` names the CPUs that Range's threads may use (None = those of the opening thread).
    `placement` says how restored bytes reach paged KV: `banks` copies them out of banks, `direct`
    reads them straight into their blocks and refuses paged KV that does not allow it, `auto` does
    the latter where it is possible and blocks are large enough for it to pay.
    `payload` says which way bytes take between the pack and memory: `posix` is the kernel's own
    direct I/O, `compat` the same calls made by KvikIO, `gds` cuFile past the host, or no start.
    `recovery` says what a killed session leaves: with `journal` what was published up to the last
    commit, one at most every `commit_interval_s` seconds, with `discard` nothing.
    `join_pieces` False makes every announced piece a record of its own; it exists for tests.
    """

    verify: str = "always"
    read_bank: int = 32 * MIB
    read_banks: int = 8
    read_workers: int = 8
    save_bank: int | None = None
    save_banks: int = 8
    ticket_deadline_s: float = 60.0
    restore_deadline_s: float = 30.0
    close_deadline_s: float = 3.0
    lock_wait_s: float = 15.0
    placement: str = "auto"
    device: str = "cpu"
    payload: str = "posix"
    recovery: str = "journal"
    commit_interval_s: float = 5.0
    join_pieces: bool = True
    allow_buffered: bool = False
    rank: int = 0
    world_size: int = 1
    affinity: frozenset[int] | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("verify", VERIFY_POLICIES),
            ("placement", PLACEMENTS),
            ("payload", PAYLOADS),
            ("device", DEVICES),
            ("recovery", RECOVERIES),
        ):
            word = getattr(self, name)
            if word not in known:
                raise UsageError(
                    "bad-setting", f"{name} is {word!r}, expected one of {', '.join(known)}"
                )
        if not self.commit_interval_s > 0:
            raise UsageError(
                "bad-setting",
                f"commit_interval_s is {self.commit_interval_s}, expected more than 0 seconds",
            )
        for name in ("read_banks", "read_workers", "save_banks", "world_size"):
            if getattr(self, name) < 1:
                raise UsageError(
                    "bad-setting", f"{name} is {getattr(self, name)}, expected at least 1"
                )
        for name in ("read_bank", "save_bank"):
            size = getattr(self, name)
            if size is not None and (size < 4096 or size % 4096):
                raise UsageError(
                    "bad-setting", f"{name} is {size} bytes, expected a multiple of 4096"
                )
        for name in (
            "ticket_deadline_s",
            "restore_deadline_s",
            "close_deadline_s",
            "lock_wait_s",
        ):
            if getattr(self, name) < 0:
                raise UsageError(
                    "bad-setting", f"{name} is {getattr(self, name)}, expected 0 or more seconds"
                )
