"""What every payload path can do, as the coordinators see it; it does nothing itself.

Implementations are `posix` and `kvikio`; which one runs is the choice of `path`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from rangekv.engine.devices.cpu import Bytes


class PayloadIO(Protocol):
    """Blocking transfers between the pack and memory: all bytes, or TransferError.

    A return of either kind proves that nothing touches the memory any more.
    """

    @property
    def path(self) -> str:
        """The way that bytes are known to have taken; the name of a setting is no evidence."""
        ...

    def account(self) -> str:
        """Return what is known of that way, as one line of key=value."""
        ...

    def register(self, memory: Any) -> None:
        """Make memory of a device known to the way, once, before it is moved to or from there."""

    def close(self) -> None:
        """Close what was opened for it, once the last transfer has returned. Idempotent."""
        ...

    def read(self, offset: int, buffers: Sequence[Bytes]) -> int:
        """Fill `buffers` from byte `offset`; return the number of native calls."""
        ...

    def read_scattered(self, offset: int, iovec: npt.NDArray[np.uint64]) -> int:
        """Fill the places of `iovec` (uint64[n, 2]: address, bytes); return the native calls."""
        ...

    def write(self, offset: int, buffers: Sequence[Bytes]) -> int:
        """Write `buffers` at byte `offset`; return the number of native calls."""
        ...
