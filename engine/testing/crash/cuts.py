"""The images that a power cut could leave: unsynced writes old, new or torn, names in any subset.

Owns the enumeration. Choices about metadata are combined in every way, and so are those about
payload while they are few; of many, each one differs from all the others in turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from rangekv.engine.folder import TEMP_PREFIX
from rangekv.engine.testing.crash.image import EMPTY, Image
from rangekv.engine.testing.crash.medium import Medium, PendingData, apply_data
from rangekv.engine.testing.crash.operations import PAGE_BYTES, Allocate, Move, Write
from rangekv.format.geometry import DATA_OFFSET

Choice = Callable[[Image], None]
Picks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """One unsynced thing and what may have become of it: nothing, all, or parts of it."""

    line: str
    choices: Sequence[Choice]


@dataclass(frozen=True, slots=True)
class Cut:
    """One image, and what was picked for each unsynced thing."""

    image: Image
    factors: Sequence[Factor]
    picks: Picks

    def lines(self) -> Iterator[str]:
        """Say what became of everything that was not synced."""
        for factor, pick in zip(self.factors, self.picks, strict=True):
            yield f"{('lost', 'kept')[pick] if pick < 2 else 'torn'}: {factor.line}"


@dataclass(frozen=True, slots=True)
class Breadth:
    """How many cuts are looked at where not all can be."""

    metadata_max: int = 512
    payload_all: int = 2
    """Up to so many payload writes are combined in every way."""
    random_cuts: int = 4
    cuts_max: int = 400
    """Above so many cuts at one point, payload varies under the two extremes of metadata only, and
    metadata under those of payload."""


def cuts(medium: Medium, breadth: Breadth, seed: str) -> Iterator[Cut]:
    """Yield the cuts; the first keeps nothing that is unsynced, all of it is among the others."""
    data, payload = _data_factors(medium)
    metadata = [*data, *_time_factors(medium), *_name_factors(medium)]
    factors = [*payload, *metadata]
    chance = random.Random(seed)
    few = len(payload) <= breadth.payload_all
    payload_picks = list(_picks(payload, few, breadth.random_cuts, chance))
    few = prod(len(factor.choices) for factor in metadata) <= breadth.metadata_max
    metadata_picks = list(_picks(metadata, few, breadth.metadata_max, chance))
    pairs = dict.fromkeys(product(payload_picks, metadata_picks))
    if len(pairs) > breadth.cuts_max:
        pairs = dict.fromkeys(product(payload_picks, _extremes(metadata)))
        pairs.update(dict.fromkeys(product(_extremes(payload), metadata_picks)))
    kept: tuple[Picks, Image] | None = None
    for first, rest in pairs:
        if kept is None or kept[0] != first:
            kept = first, _picked(medium.durable, payload, first)
        yield Cut(_picked(kept[1], metadata, rest), factors, first + rest)


def _picked(start: Image, factors: Sequence[Factor], picks: Picks) -> Image:
    image = start.copy()
    for factor, pick in zip(factors, picks, strict=True):
        factor.choices[pick](image)
    return image


def _extremes(factors: Sequence[Factor]) -> tuple[Picks, Picks]:
    return (0,) * len(factors), (1,) * len(factors)


def _picks(
    factors: Sequence[Factor], few: bool, random_cuts: int, chance: random.Random
) -> Iterator[Picks]:
    """Combine in every way if they are few; else nothing, everything, each one apart, and some."""
    sizes = [len(factor.choices) for factor in factors]
    if few:
        yield from product(*map(range, sizes))
        return
    picks: dict[Picks, None] = {}
    for common in _extremes(factors):
        picks[common] = None
        for at, size in enumerate(sizes):
            for pick in range(size):
                picks[(*common[:at], pick, *common[at + 1 :])] = None
    for _ in range(random_cuts):
        picks[tuple(map(chance.randrange, sizes))] = None
    yield from picks


def _data_factors(medium: Medium) -> tuple[list[Factor], list[Factor]]:
    """Return the choices about unsynced data: (metadata, payload)."""
    metadata: list[Factor] = []
    payload: list[Factor] = []
    growing: dict[int, list[PendingData]] = {}
    allocated = {one.operation.key for one in medium.data if isinstance(one.operation, Allocate)}
    for one in medium.data:
        operation = one.operation
        if isinstance(operation, Allocate):
            metadata.append(Factor(operation.line(), [_nothing, _all_of([one])]))
        elif operation.key not in allocated and not medium.durable.nodes[operation.key].data.size:
            growing.setdefault(operation.key, []).append(one)
        else:
            is_payload = operation.offset >= DATA_OFFSET
            (payload if is_payload else metadata).append(_overwriting(one, operation))
    metadata += [_growing(medium, key, group) for key, group in growing.items()]
    return metadata, payload


def _overwriting(pending: PendingData, operation: Write) -> Factor:
    """A write into an existing file: torn between pages, or in the middle of its only page."""
    middle = len(operation.data) // 2
    if len(operation.data) > PAGE_BYTES:
        middle -= middle % PAGE_BYTES
    front = replace(operation, data=operation.data[:middle])
    back = replace(operation, offset=operation.offset + middle, data=operation.data[middle:])
    parts = (operation, front, back)
    if pending.dropped or (operation.offset | middle | len(operation.data)) % PAGE_BYTES:
        return Factor(
            operation.line(),
            [_nothing, *(_all_of([replace(pending, operation=part)]) for part in parts)],
        )
    return Factor(operation.line(), [_nothing, *(_whole_pages(part) for part in parts)])


def _growing(medium: Medium, key: int, group: Sequence[PendingData]) -> Factor:
    """A new file: nothing, everything, or its whole length with zeros for what is missing.

    Nobody reads a file that can only have a temp's name: then nothing or everything will do.
    """
    choices: list[Choice] = [_nothing, _all_of(group)]
    writes = [one.operation for one in group if isinstance(one.operation, Write)]
    moved = {
        pending.operation.key for pending in medium.names if isinstance(pending.operation, Move)
    }
    named = {
        found
        for entries in medium.durable.entries.values()
        for name, found in entries.items()
        if not name.startswith(TEMP_PREFIX)
    }
    if key in moved | named:
        size = max(write.offset + len(write.data) for write in writes)
        torn = [[_front(write) if write is one else write for write in writes] for one in writes]
        torn += [writes[: len(writes) // 2], writes[len(writes) // 2 :]]
        choices += [_with_gaps(key, size, kept) for kept in torn]
    return Factor(f"{len(writes)} writes to {writes[0].name}", choices)


def _front(write: Write) -> Write:
    return replace(write, data=write.data[: len(write.data) // 2])


def _with_gaps(key: int, size: int, writes: Sequence[Write]) -> Choice:
    content = EMPTY
    for write in writes:
        content = content.written(write.offset, write.data)
    content = content.resized(size)
    return lambda image: image.update(key, content)


def _time_factors(medium: Medium) -> Iterator[Factor]:
    def later(key: int) -> Choice:
        def choose(image: Image) -> None:
            image.nodes[key] = replace(image.nodes[key], mtime_ns=medium.times[key])

        return choose

    for key in medium.timed():
        yield Factor("modification time of the pack file", [_nothing, later(key)])


def _name_factors(medium: Medium) -> Iterator[Factor]:
    def happened(index: int) -> Choice:
        return lambda image: image.rename(medium.names[index].operation)

    for index, pending in enumerate(medium.names):
        yield Factor(pending.operation.line(), [_nothing, happened(index)])


def _nothing(image: Image) -> None:
    """Keep nothing of it."""


def _whole_pages(operation: Write) -> Choice:
    """A write of whole pages, prepared once for many images."""
    pages = EMPTY.pages_of(operation.offset, operation.data)
    end = operation.offset + len(operation.data)

    def choose(image: Image) -> None:
        content = image.nodes[operation.key].data
        image.update(operation.key, content.with_pages(pages, end))

    return choose


def _all_of(group: Sequence[PendingData]) -> Choice:
    def choose(image: Image) -> None:
        for one in group:
            apply_data(image, one)

    return choose
