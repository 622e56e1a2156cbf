"""Owns what one save has claimed before it is published: its records, extents and parent chain.

It is plain data; the catalog alone changes it.
"""

from __future__ import annotations

from enum import Enum

from rangekv.engine.index.directory import Record
from rangekv.engine.index.extents import Extent
from rangekv.engine.index.leases import Lease


class ReservationState(Enum):
    """OPEN while writing, PROVED when all bytes are written, then VISIBLE; or VOID."""

    OPEN = "open"
    PROVED = "proved"
    VISIBLE = "visible"
    VOID = "void"


class Reservation:
    """Reserved records for tokens [token_begin, token_end), one per extent, in token order.

    Every part's record hangs in the token tree as RESERVED, so that later saves continue behind it
    and lookups do not see it. `lease` keeps the parent chain until the outcome is known. The
    reservation holds its extents until `settled`: a write may still land in them.
    """

    __slots__ = (
        "clock",
        "extents",
        "grown",
        "lease",
        "parts",
        "settled",
        "state",
        "token_begin",
        "token_end",
    )

    def __init__(
        self,
        parts: list[Record],
        grown: Extent | None,
        lease: Lease,
        token_begin: int,
        token_end: int,
        clock: int | None = None,
    ) -> None:
        self.parts = parts
        self.extents = [record.extent for record in parts]
        self.grown = grown
        self.lease = lease
        self.token_begin = token_begin
        self.token_end = token_end
        self.clock = clock
        self.state = ReservationState.OPEN
        self.settled = False
