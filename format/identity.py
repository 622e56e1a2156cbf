"""Owns what makes a pack file the same file as before: inode, size, birth time, generation.

It compares; how the figures are obtained from the kernel is not its business.
"""

from __future__ import annotations

from dataclasses import dataclass

BTIME_VALID = 1
GENERATION_VALID = 2


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Identity of a pack file on its file system; `identity_flags` says which fields hold."""

    inode: int
    file_bytes: int
    btime_sec: int = 0
    btime_nsec: int = 0
    inode_generation: int = 0
    identity_flags: int = 0

    def __str__(self) -> str:
        return (
            f"inode {self.inode} generation {self.inode_generation}, {self.file_bytes} bytes,"
            f" born {self.btime_sec}.{self.btime_nsec:09d}"
        )

    def mismatch(self, found: FileIdentity) -> str | None:
        """Return the reason code why `found` is not proved to be this file, or None.

        An inode number alone proves nothing (file systems hand the same one out again), so at
        least one of birth time and generation must be known on both sides and agree.
        """
        common = self.identity_flags & found.identity_flags
        if found.file_bytes != self.file_bytes:
            return "size-mismatch"
        if found.inode != self.inode:
            return "inode-mismatch"
        if common & BTIME_VALID and (found.btime_sec, found.btime_nsec) != (
            self.btime_sec,
            self.btime_nsec,
        ):
            return "birth-time-mismatch"
        if common & GENERATION_VALID and found.inode_generation != self.inode_generation:
            return "generation-mismatch"
        return None if common & (BTIME_VALID | GENERATION_VALID) else "no-identity"
