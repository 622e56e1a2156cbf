"""Native reads of one object each: what a span costs when it is read object by object.

Owns the splitting and the count of its calls; everything else is the engine's own path to files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rangekv.engine.files import Files

if TYPE_CHECKING:
    from rangekv.engine.files import Segments


class ShortReads(Files):
    """Reads of at most `read_bytes_max` bytes, a multiple of 4096; `calls` has a size for each."""

    def __init__(self, read_bytes_max: int) -> None:
        self._read_bytes_max = read_bytes_max
        self.calls: list[int] = []

    def preadv(self, fd: int, buffers: Segments, offset: int) -> int:
        """Fill one buffer piece by piece; several, which banks never are, as they come."""
        if len(buffers) != 1:
            return super().preadv(fd, buffers, offset)
        memory = np.frombuffer(buffers[0], dtype=np.uint8)  # type: ignore[arg-type]
        done = 0
        while done < len(memory):
            piece = memory[done : done + self._read_bytes_max]
            count = super().preadv(fd, [piece], offset + done)
            self.calls.append(count)  # by threads of the engine: appending is atomic
            done += count
            if count < len(piece):
                break
        return done
