"""What scheduler side and worker side tell each other: the plan of a step, and framed answers.

Plain data and its framing; knows neither vLLM nor the engine and decides nothing.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack
from rangekv.format.records import NO_SALT

REQUEST_BYTES_MAX = 64 << 20  # 16 M tokens
ANSWER_BYTES_MAX = 64 << 10
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class RestoreBinding:
    """Tickets with their destination: the request's blocks of tokens [begin_token, end_token).

    `ticket_ids[r]` is rank r's own; no rank can claim another's.
    """

    ticket_ids: tuple[int, ...]
    begin_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class RequestStep:
    """What one step does with one request.

    `tokens` (packed uint32, native order) and `save_tokens` come with the first step of an
    attempt, and `root` names the tenant by its digest; from then on the worker holds them.
    `hashes` are vLLM's of the full blocks of `tokens`, from the first on, where it wants KV events.
    `block_ids` (packed int32) replace what the worker holds when `tokens` are given and continue it
    otherwise. After the step's forward the KV of
    tokens [0, end_token) is in paged memory; `last` says that no later step of this attempt adds
    to what is saved.
    """

    request_id: str
    block_ids: bytes
    end_token: int
    last: bool
    tokens: bytes | None = None
    save_tokens: int = 0
    root: bytes = NO_SALT
    restore: RestoreBinding | None = None
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has ended with generated tokens: what its blocks hold, whole blocks only.

    `tokens` (packed uint32) are prompt and answer, `block_ids` (packed int32) theirs from the
    first on. The blocks are free already; nothing overwrites them before this step's forward.
    `hashes` are as in RequestStep.
    """

    request_id: str
    tokens: bytes
    block_ids: bytes
    root: bytes = NO_SALT
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class BackgroundLoad:
    """A restore beside the steps of others, into blocks that no step reads before it is reported.

    `tokens` (packed uint32) are all of the request's, `block_ids` (packed int32) the destination;
    `root` and `hashes` are as in RequestStep.
    """

    request_id: str
    tokens: bytes
    block_ids: bytes
    restore: RestoreBinding
    root: bytes = NO_SALT
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank holds `tokens` (packed uint32) of a tenant only up to `start_token` any more."""

    root: bytes
    tokens: bytes
    start_token: int


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks that follow each other, by vLLM's hashes; `parent` is the one before, if any."""

    parent: bytes | None
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class HoldingsChange:
    """What has changed in one rank's store: first `removed` left it, then `stored` was found in it.

    Both are vLLM's block hashes. No rank names a block as stored twice without a removal between.
    """

    removed: list[bytes]
    stored: list[BlockRun]


@dataclass(slots=True)
class StepPlan:
    """Everything the workers are told for one step; never changed after it was handed to vLLM.

    `preempted` and `finished` are requests whose blocks may be overwritten from this step on;
    `answered` are those of the finished ones whose answers are to be saved; `released` are tickets
    (rank, ticket id) that nobody will claim. It is known how the steps up to `settled_step` went;
    in `void_steps` some rank, or another connector beside this one, could not load KV. `lost` is to
    be retired on every rank, and `clock` is when the step's saves were asked for, so that all ranks
    go on to hold the same. `scheduled_tokens` is how many tokens the step computes.
    """

    requests: list[RequestStep] = field(default_factory=list)
    loads: list[BackgroundLoad] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    step: int = 0
    settled_step: int = 0
    void_steps: list[int] = field(default_factory=list)
    lost: list[Loss] = field(default_factory=list)
    clock: int = 0
    scheduled_tokens: int = 0


@dataclass(slots=True)
class StepReport:
    """What ranks tell the scheduler side: the step they have done, and what they have lost.

    `failed_loads` are background loads, by request, with the blocks that hold no proved KV.
    `computed` is (tokens, seconds) of the step without its loads; each of `loads` is (tokens,
    seconds) that a step waited for its loads, or that one in the background took. `written_bytes`
    went to disk since the last report. `holdings` is by rank, and `is_saving` says that some rank
    has saves under way which will change it; both only where vLLM wants KV events.
    """

    step: int
    lost: list[Loss] = field(default_factory=list)
    failed_loads: dict[str, list[int]] = field(default_factory=dict)
    computed: tuple[int, float] = (0, 0.0)
    loads: list[tuple[int, float]] = field(default_factory=list)
    written_bytes: int = 0
    holdings: dict[int, HoldingsChange] = field(default_factory=dict)
    is_saving: bool = False

    def joined(self, other: StepReport) -> StepReport:
        """Return the report of both ranks."""
        failed = dict(self.failed_loads)
        for request_id, block_ids in other.failed_loads.items():
            failed[request_id] = failed.get(request_id, []) + block_ids
        return StepReport(
            min(self.step, other.step),
            [*self.lost, *other.lost],
            failed,
            max(self.computed, other.computed, key=lambda each: each[1]),
            [*self.loads, *other.loads],
            self.written_bytes + other.written_bytes,
            self.holdings | other.holdings,
            self.is_saving or other.is_saving,
        )


class FrameError(ValueError):
    """The peer sent something that is no frame of this protocol; the connection is closed."""


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Return token ids as packed native uint32; `array` is several times faster than numpy here."""
    return array("I", token_ids).tobytes()


def pack_block_ids(block_ids: Iterable[int]) -> bytes:
    """Return block ids as packed native int32."""
    return array("i", block_ids).tobytes()


def encode_frame(message: list[Any]) -> bytes:
    """Return length and msgpack body of one message."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages; keeps an incomplete one until the rest arrives."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._buffer = bytearray()
        self._frame_bytes_max = frame_bytes_max

    def feed(self, chunk: bytes) -> None:
        """Add what was received."""
        self._buffer += chunk

    def next_message(self) -> list[Any] | None:
        """Return the next whole message, or None; raises FrameError for anything malformed."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._frame_bytes_max:
            raise FrameError(f"frame of {length} bytes, at most {self._frame_bytes_max} expected")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            message = msgpack.unpackb(body, raw=False, strict_map_key=True)
        except ValueError as error:  # every msgpack error is one
            raise FrameError(f"frame is not msgpack: {error}") from None
        if not isinstance(message, list) or len(message) < 2 or not isinstance(message[0], int):
            raise FrameError("frame is not [sequence, kind, ...]")
        return message
