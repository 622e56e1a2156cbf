"""Owns tickets: what a lookup promised, to whom, on which generations. It never moves bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from rangekv.engine.events import Deadline
from rangekv.engine.index.directory import TOKEN_BYTES, Match, RecordState
from rangekv.engine.index.leases import Lease
from rangekv.format.errors import TicketError, UsageError


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Who asks: one attempt of one request in one session of the serving engine."""

    request_id: str
    session_id: str
    attempt: int = 0


class TicketState(Enum):
    """OPEN until it is claimed or released; a claimed ticket is released by its restore."""

    OPEN = "open"
    CLAIMED = "claimed"
    RELEASED = "released"


class Ticket:
    """A promise: the first `token_count` tokens of this query can be restored.

    `token_count` is 0 on a miss, and `reason` then says why. The promise holds until the deadline,
    renewed by each repeated lookup, and covers tokens from `skip_tokens` on.
    """

    __slots__ = (
        "deadline",
        "epoch",
        "key",
        "lease",
        "matches",
        "rank",
        "reason",
        "restore",
        "root",
        "session",
        "skip_tokens",
        "state",
        "ticket_id",
        "token_count",
        "token_limit",
        "tokens",
    )

    def __init__(
        self,
        *,
        ticket_id: int,
        key: RequestKey,
        root: int,
        rank: int,
        session: str,
        epoch: int,
        tokens: bytes,
        token_limit: int,
        token_count: int,
        skip_tokens: int,
        reason: str | None,
    ) -> None:
        self.ticket_id = ticket_id
        self.key = key
        self.root = root
        self.rank = rank
        self.session = session
        self.epoch = epoch
        self.tokens = tokens
        self.token_limit = token_limit
        self.token_count = token_count
        self.skip_tokens = skip_tokens
        self.reason = reason
        self.state = TicketState.RELEASED if reason is not None else TicketState.OPEN
        self.matches: list[Match] = []
        self.lease: Lease | None = None
        self.restore: Any = None
        self.deadline: Deadline | None = None

    def check(self, *, tokens: bytes, rank: int, session: str, epoch: int) -> None:
        """Raise TicketError unless this claim is exactly what the lookup promised.

        Envelope, generations, tokens and endpoint are compared; `tokens` may go on behind the
        endpoint. `session` names store and epoch: a ticket of another engine is worth nothing.
        """
        if self.state is not TicketState.OPEN:
            raise TicketError(
                "stale-ticket",
                f"ticket {self.ticket_id} is {self.state.value}, not open; look up again",
            )
        if (self.rank, self.session, self.epoch) != (rank, session, epoch):
            raise TicketError(
                "foreign-ticket",
                f"ticket {self.ticket_id} is of rank {self.rank}, epoch {self.epoch} in session "
                f"{self.session}; this engine is rank {rank}, epoch {epoch} in session {session}",
            )
        promised = self.token_count * TOKEN_BYTES
        if tokens[:promised] != self.tokens[:promised]:
            raise TicketError(
                "tokens-changed",
                f"the claim's tokens differ from the {self.token_count} that were looked up",
            )
        if not self.valid():
            raise TicketError(
                "stale-ticket",
                f"a record behind ticket {self.ticket_id} was retired; look up again",
            )

    def valid(self) -> bool:
        """Whether every selected record is still visible in the generation that was selected."""
        if self.lease is None:
            return False
        pairs = zip(self.matches, self.lease.generations, strict=True)
        return all(
            match.record.state is RecordState.VISIBLE
            and match.record.extent.generation == generation
            for match, generation in pairs
        )


def pack_tokens(tokens: Any) -> bytes:
    """Join one buffer of uint32 token ids, or a sequence of such buffers, into packed bytes."""
    pieces = _pieces(tokens, "tokens")
    if len(pieces) > 1 and set(map(type, pieces)) == {np.ndarray}:
        # One call for thousands of pieces: the cost follows bytes, not pieces.
        pieces = [_joined(pieces)]
    only = pieces[0] if len(pieces) == 1 else None
    if isinstance(only, bytes):
        _flat(only)  # refuses what is not whole token ids
        return only
    return b"".join([_flat(piece) for piece in pieces])


def _joined(pieces: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    joined: np.ndarray[Any, Any]
    try:
        joined = np.concatenate(pieces).reshape(-1)
    except ValueError:  # of several shapes
        joined = np.concatenate([piece.reshape(-1) for piece in pieces])
    return joined


def pack_block_ids(block_ids: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Join one integer array, or a sequence of them, into int64[n]."""
    pieces = [np.asarray(piece) for piece in _pieces(block_ids, "block_ids")]
    if any(piece.dtype.kind not in "iu" and piece.size for piece in pieces):
        raise UsageError("bad-block-id", "block ids are not integers")
    if not pieces:
        return np.empty(0, dtype=np.int64)
    joined: np.ndarray[Any, np.dtype[np.int64]] = np.concatenate(
        [piece.reshape(-1) for piece in pieces]
    ).astype(np.int64, copy=False)
    return joined


def _pieces(value: Any, name: str) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int):
            if name == "tokens":
                return [np.asarray(value, dtype=np.uint32)]
            return [np.asarray(value, dtype=np.int64)]
        return value
    return [value]


def _flat(piece: Any) -> memoryview:
    view = memoryview(piece)
    if view.format in ("i", "l", "q", "L", "Q") or view.itemsize not in (1, TOKEN_BYTES):
        raise UsageError(
            "bad-tokens",
            f"token buffer has format {view.format!r}, expected uint32 ids (array('I'), numpy "
            "uint32) or their bytes",
        )
    if view.nbytes % TOKEN_BYTES:
        raise UsageError("bad-tokens", f"token buffer has {view.nbytes} bytes, not a multiple of 4")
    return view.cast("B") if view.contiguous else memoryview(view.tobytes())
