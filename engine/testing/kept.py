"""What a killed session with a journal must have left, told from what its process said.

Owns the account of every block: published when, gone, forgotten, shown by the store, hit by the
next process. It never looks at a store itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rangekv.engine.testing.checks import require
from rangekv.engine.testing.scene import MODEL
from rangekv.engine.testing.victim import COMMIT_INTERVAL_S, name_of, prompt

KEPT_PERCENT_MIN = 95
_TOKEN_BYTES = 4
_BLOCK_BYTES = MODEL.block_tokens * _TOKEN_BYTES
_OLD_NS = int(2 * COMMIT_INTERVAL_S * 1e9)

Block = str
"""The name of the prefix that ends with it."""


class Account:
    """All blocks that ever were, across the processes of one store.

    Of the blocks of a dead process those count that were published more than two intervals of
    commits before its death, and two commits where those take long, and were not gone by then. The
    next process is asked for them.
    """

    def __init__(self) -> None:
        self.old_tokens = 0
        self.hit_tokens = 0
        self._place: dict[Block, tuple[int, int]] = {}
        """Of a block: number of the first prompt that has it, and its place in that prompt."""
        self._prompts: dict[int, list[Block]] = {}
        self._shown: set[Block] = set()
        self._inherited: set[Block] = set()
        """What the process found at its open and has not said to be gone."""
        self._fresh: dict[Block, int] = {}
        """What it published itself, and when on CLOCK_MONOTONIC, in nanoseconds."""
        self._slowest_ns = 0
        """How long the slowest commit of that process took."""
        self._begun_ns: int | None = None
        """When the one began that was under way at its death."""
        self._forgotten: set[Block] = set()
        self._asked: set[Block] = set()

    @property
    def percent(self) -> float:
        """How much of what had to be hit was, where there was anything."""
        return 100 * self.hit_tokens / self.old_tokens if self.old_tokens else 100.0

    @property
    def shown_tokens(self) -> int:
        """Tokens that the store showed last."""
        return len(self._shown) * MODEL.block_tokens

    def line(self) -> str:
        """Return the outcome as one line."""
        return (
            f"{self.hit_tokens:,} of {self.old_tokens:,} tokens older than two commit intervals "
            f"were hit ({self.percent:.1f} %)"
        )

    def require_kept(self) -> None:
        """Require that enough of what was old was hit. Raises Violation."""
        require(self.percent >= KEPT_PERCENT_MIN, f"at least {KEPT_PERCENT_MIN} %: {self.line()}")

    def add_prompts(self, numbers: Iterable[int]) -> None:
        """Note prompts that the next process may save."""
        for number in numbers:
            data = prompt(number).tobytes()
            ends = range(_BLOCK_BYTES, len(data) + 1, _BLOCK_BYTES)
            self._prompts[number] = [name_of(data[:end]) for end in ends]
            for index, block in enumerate(self._prompts[number]):
                self._place.setdefault(block, (number, index))

    def asks(self) -> list[int]:
        """Return the prompts that the next process is to answer for."""
        return sorted({self._place[block][0] for block in self._asked})

    def hear(self, lines: Iterable[str]) -> None:
        """Take what a process said from its open to its death. Raises Violation."""
        self._inherited, self._fresh = set(self._shown), {}
        self._slowest_ns, self._begun_ns = 0, None
        going: set[Block] | None = None
        for word, *rest in (line.split() for line in lines):
            if word == "hit":
                self._answer(int(rest[0]), int(rest[1]))
            elif word == "published":
                for block in self._blocks(*rest[1:]):
                    self._fresh[block] = int(rest[0])
                    self._forgotten.discard(block)
            elif word == "gone":
                for block in self._blocks(*rest):
                    self._fresh.pop(block, None)
                    self._inherited.discard(block)
                    if going is not None:
                        going.add(block)
            elif word == "committing":
                self._begun_ns = int(rest[0])
            elif word == "committed" and self._begun_ns is not None:
                self._slowest_ns = max(self._slowest_ns, int(rest[0]) - self._begun_ns)
                self._begun_ns = None
            elif word == "forgetting":
                going = set()
            elif word == "forgotten" and going is not None:
                self._forgotten |= going
                going = None

    def _blocks(self, name: Block, token_count: str) -> Iterator[Block]:
        """Return the blocks of a record, given its last one."""
        number, index = self._place[name]
        count = int(token_count) // MODEL.block_tokens
        return iter(self._prompts[number][index + 1 - count : index + 1])

    def _answer(self, number: int, token_count: int) -> None:
        hit = token_count // MODEL.block_tokens
        for block in [block for block in self._asked if self._place[block][0] == number]:
            self._asked.remove(block)
            found = self._place[block][1] < hit
            require(found == (block in self._shown), "a process hits what its store showed")
            self.old_tokens += MODEL.block_tokens
            self.hit_tokens += found * MODEL.block_tokens

    def see(self, prefixes: Iterable[bytes], killed_ns: int | None, *, opened: bool) -> None:
        """Compare with what the store shows now: the prefix of each visible block.

        `killed_ns` is None for a process that closed cleanly. Raises Violation.
        """
        shown = {name_of(prefix) for prefix in prefixes}
        before, self._shown = self._shown, shown
        if not opened:
            require(shown == before, "a death in an open changes nothing")
        back = len(shown & self._forgotten)
        require(not back, f"{back} blocks are back that were forgotten for good")
        lost = len(self._inherited - shown)
        require(not lost, f"{lost} blocks that an open had found are lost")
        if killed_ns is None:
            whole = self._inherited | self._fresh.keys()
            require(shown == whole, "a clean close keeps all that was visible, and nothing else")
            return
        if self._begun_ns is not None:
            self._slowest_ns = max(self._slowest_ns, killed_ns - self._begun_ns)
        # Who just missed one commit waits for it and for the next, however long they take.
        old_ns = killed_ns - _OLD_NS - 2 * self._slowest_ns
        self._asked |= {block for block, ns in self._fresh.items() if ns < old_ns}
