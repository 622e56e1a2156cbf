"""A serving engine in miniature: requests that look up, claim, save and give up, one act at a time.

Owns paged KV and who holds which of its blocks; when anything happens is the simulation's.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rangekv.engine import Engine, RequestKey
from rangekv.engine.devices.device import BlockIds
from rangekv.engine.index.tickets import Ticket, TicketState
from rangekv.engine.testing.checks import POISON, Violation, require
from rangekv.engine.testing.oracle import Oracle, Tokens
from rangekv.engine.transfer.restore import Restore
from rangekv.engine.transfer.save import Save, SaveState
from rangekv.format.errors import RangeError
from rangekv.format.geometry import Geometry

KV_BLOCKS = 96
REQUESTS_MAX = 16
PROMPT_BLOCKS_MAX = 12
_PROMPTS_KEPT = 8


@dataclass(slots=True, eq=False)
class Asked:
    """One ticket, its query, and how much had been retired when it was given."""

    ticket: Ticket
    tokens: Tokens
    retired: int
    resets: int


@dataclass(slots=True, eq=False)
class Restoring:
    """One claimed restore; its blocks are its own until it has finished."""

    restore: Restore
    tokens: Tokens
    blocks: BlockIds
    first_block: int


@dataclass(slots=True, eq=False)
class Saving:
    """One save under way; `announced` counts blocks by layer, `extracted` those given back."""

    save: Save
    tokens: Tokens
    blocks: BlockIds
    announced: list[int]
    extracted: int


class Serving:
    """The requests of one engine. Every method is one act; what comes of it is checked at once."""

    def __init__(self, engine: Engine, oracle: Oracle, chance: random.Random) -> None:
        self.engine = engine
        self.oracle = oracle
        self.chance = chance
        self.counts: Counter[str] = Counter()
        self.geometry: Geometry = engine.geometry
        self.layers = range(self.geometry.layer_count)
        self.kv = paged_kv(self.geometry)
        self.free = list(range(KV_BLOCKS))
        self.prompts: list[Tokens] = []
        self.tickets: list[Asked] = []
        self.restores: list[Restoring] = []
        self.saves: list[Saving] = []
        self._keys = 0
        self._resets = 0

    # -- blocks and prompts ------------------------------------------------------------------------

    def take(self, count: int) -> BlockIds | None:
        """Take free blocks. Raises Violation if anything was written to them meanwhile."""
        if count > len(self.free):
            return None
        self.chance.shuffle(self.free)
        blocks = np.array(self.free[:count], dtype=np.int64)
        del self.free[:count]
        require(bool((self.kv[:, blocks] == POISON).all()), "a byte reached blocks that were free")
        return blocks

    def give(self, blocks: BlockIds) -> None:
        """Give blocks back to whoever comes next."""
        self.kv[:, blocks] = POISON
        self.free.extend(blocks.tolist())

    def new_prompt(self) -> Tokens:
        """Return a prompt: known, known and longer, branching off, or new."""
        chance = self.chance
        if self.prompts and chance.random() < 0.8:
            known = chance.choice(self.prompts)
            if chance.random() < 0.3:
                return known
            same = chance.randint(0, len(known)) if chance.random() < 0.4 else len(known)
        else:
            known, same = np.empty(0, np.uint32), 0
        size = self.geometry.block_tokens
        count = min(same + chance.randint(1, 5 * size), PROMPT_BLOCKS_MAX * size)
        tokens = np.array([chance.randrange(1 << 17) for _ in range(count)], dtype=np.uint32)
        tokens[:same] = known[:count][:same]
        self.prompts = [*self.prompts[1 - _PROMPTS_KEPT :], tokens]
        return tokens

    def known_prompt(self) -> Tokens:
        """Return a prompt that somebody has had before, mostly."""
        if self.prompts and self.chance.random() < 0.9:
            return self.chance.choice(self.prompts)
        return self.new_prompt()

    def key(self) -> RequestKey:
        """Return a request that nobody has used before."""
        self._keys += 1
        return RequestKey(f"request-{self._keys}", "simulation", 0)

    def _blocks_of(self, ticket: Ticket) -> BlockIds | None:
        count = (ticket.token_count - ticket.skip_tokens) // self.geometry.block_tokens
        return self.take(count)

    def _retired(self) -> int:
        """What may have made a ticket stale since: records that were retired, not evicted."""
        return self.engine._counters.checksum_failures + self.counts["retire"] + self._resets

    # -- tickets -----------------------------------------------------------------------------------

    def look_up(self) -> None:
        """Ask for a prompt, with a local hit or a limit now and then."""
        if len(self.tickets) + len(self.restores) >= REQUESTS_MAX:
            return
        tokens, size = self.known_prompt(), self.geometry.block_tokens
        skip = self.chance.choice([0, 0, 0, size, 2 * size])
        most = self.chance.choice([None, None, None, self.chance.randint(0, len(tokens))])
        ticket = self.engine.lookup(self.key(), tokens, skip_tokens=skip, max_tokens=most)
        limit = len(tokens) if most is None else most
        require(ticket.token_count <= limit, "no more is promised than was asked for")
        self._keep(ticket, tokens)

    def _keep(self, ticket: Ticket, tokens: Tokens) -> None:
        if ticket.token_count:
            self.counts["hit"] += 1
            self.tickets.append(Asked(ticket, tokens, self._retired(), self._resets))

    def look_up_again(self) -> None:
        """Repeat a lookup: the same ticket, or a new one if the old one has ended."""
        if not self.tickets:
            return
        asked = self.chance.choice(self.tickets)
        ticket = asked.ticket
        again = self.engine.lookup(
            ticket.key, asked.tokens, skip_tokens=ticket.skip_tokens, max_tokens=ticket.token_limit
        )
        if again is not ticket:
            require(ticket.state is TicketState.RELEASED, "one key has one ticket")
            self.tickets.remove(asked)
            self._keep(again, asked.tokens)

    def _take_ticket(self) -> tuple[Asked, BlockIds] | None:
        """Take a ticket and blocks for it; without blocks it is given back."""
        if not self.tickets:
            return None
        asked = self.tickets.pop(self.chance.randrange(len(self.tickets)))
        blocks = self._blocks_of(asked.ticket)
        if blocks is None:
            self.engine.release(asked.ticket)
            return None
        return asked, blocks

    def claim(self) -> None:
        """Claim a ticket; a refusal needs a reason."""
        taken = self._take_ticket()
        if taken is None:
            return
        asked, blocks = taken
        ticket = asked.ticket
        in_time = ticket.state is TicketState.OPEN
        try:
            restore = self.engine.claim(ticket, asked.tokens, blocks)
        except RangeError as refused:
            require(refused.code == "stale-ticket", f"only a stale ticket is refused: {refused}")
            require(ticket.state is TicketState.RELEASED, "a refused ticket is given back")
            require(
                not in_time or self._retired() > asked.retired,
                "a ticket in time is refused only if its records were retired",
            )
            self.counts["stale"] += 1
            self.give(blocks)
            return
        require(asked.resets == self._resets, "a ticket from before a reset is refused")
        first = ticket.skip_tokens // self.geometry.block_tokens
        self.restores.append(Restoring(restore, asked.tokens, blocks, first))

    def claim_wrongly(self) -> None:
        """Claim with other tokens, fewer blocks, or a ticket that is claimed already."""
        if self.restores and self.chance.random() < 0.3:
            one = self.chance.choice(self.restores)
            self._refused(one.restore.ticket, one.tokens, one.blocks)
            return
        taken = self._take_ticket()
        if taken is None:
            return
        asked, blocks = taken
        altered, wanted = asked.tokens.copy(), blocks
        if self.chance.random() < 0.5:
            altered[self.chance.randrange(asked.ticket.token_count)] += 1
        else:
            wanted = blocks[:-1]
        self._refused(asked.ticket, altered, wanted)
        self.give(blocks)

    def _refused(self, ticket: Ticket, tokens: Tokens, blocks: BlockIds) -> None:
        try:
            self.engine.claim(ticket, tokens, blocks)
        except RangeError:
            return
        raise Violation("a wrong claim was accepted")

    def release(self) -> None:
        """Give a ticket back, some of them twice."""
        if self.tickets:
            asked = self.tickets.pop(self.chance.randrange(len(self.tickets)))
            for _ in range(self.chance.choice([1, 1, 2])):
                self.engine.release(asked.ticket)

    # -- restores ----------------------------------------------------------------------------------

    def wait_layer(self) -> None:
        """Wait for a layer, or look whether it is there."""
        if self.restores:
            one = self.chance.choice(self.restores)
            layer = self.chance.choice(self.layers)
            if one.restore.wait_layer(layer, self.chance.choice([0.0, 0.0, 1.0])):
                self.require_layer(one, layer)

    def finish(self) -> None:
        """End a restore, most of them when all layers are there."""
        if not self.restores:
            return
        one = self.restores.pop(self.chance.randrange(len(self.restores)))
        if self.chance.random() < 0.7:
            for layer in self.layers:
                if one.restore.wait_layer(layer, 30.0):
                    self.require_layer(one, layer)
        elif self.chance.random() < 0.5:
            self.engine.release(one.restore.ticket)
        one.restore.finish()
        failed = set(one.restore.failed_blocks())
        for layer in self.layers:
            for index, block in enumerate(one.blocks.tolist()):
                if block not in failed:
                    self._require_rows(one, layer, index, index + 1)
        self.counts["delivered blocks"] += len(one.blocks) - len(failed)
        self.counts["failed blocks"] += len(failed)
        self.give(one.blocks)

    def require_layer(self, one: Restoring, layer: int) -> None:
        """Require that a layer that is ready is right."""
        self._require_rows(one, layer, 0, len(one.blocks))

    def _require_rows(self, one: Restoring, layer: int, first: int, last: int) -> None:
        rows = self.kv[layer][one.blocks[first:last]]
        wrong = self.oracle.check(one.tokens, layer, one.first_block + first, rows)
        require(wrong is None, f"layer {layer} was said to be delivered: {wrong}")

    def restore_whole(self, tokens: Tokens) -> None:
        """Restore what is stored of a prompt, without a fault."""
        ticket = self.engine.lookup(self.key(), tokens)
        if ticket.token_count == 0:
            return
        blocks = self._blocks_of(ticket)
        assert blocks is not None
        one = Restoring(self.engine.claim(ticket, tokens, blocks), tokens, blocks, 0)
        for layer in self.layers:
            require(one.restore.wait_layer(layer, 100.0), "every layer arrives")
            self.require_layer(one, layer)
        one.restore.finish()
        self.give(blocks)

    def hit(self, tokens: Tokens) -> int:
        """Return how much of a prompt is promised now."""
        ticket = self.engine.lookup(self.key(), tokens)
        self.engine.release(ticket)
        return ticket.token_count

    # -- saves -------------------------------------------------------------------------------------

    def save(self) -> None:
        """Begin a save, with the KV in place."""
        if len(self.saves) >= REQUESTS_MAX // 2:
            return
        tokens = self.new_prompt()
        whole = len(tokens) // self.geometry.block_tokens
        blocks = self.take(whole) if whole else None
        if blocks is None:
            return
        self.oracle.note_saved(tokens)
        save = self.engine.save(self.key(), tokens)
        if save is None:
            self.give(blocks)
            return
        first = save.start_token // self.geometry.block_tokens
        for layer in self.layers:
            self.kv[layer][blocks] = self.oracle.rows(tokens, layer, 0, whole)
        self.saves.append(Saving(save, tokens, blocks, [first for _ in self.layers], first))

    def save_at_once(self) -> None:
        """Save a whole prompt in one step."""
        before = len(self.saves)
        self.save()
        if len(self.saves) > before:
            one = self.saves[-1]
            for layer in self.layers:
                self._announce(one, layer, len(one.blocks))
            one.save.extracted(30.0)
            self._end(one)

    def _announce(self, one: Saving, layer: int, end: int) -> None:
        begin, size = one.announced[layer], self.geometry.block_tokens
        if begin < end:
            one.save.layer_ready(layer, (begin * size, end * size), one.blocks[begin:end])
            one.announced[layer] = end

    def layer_ready(self) -> None:
        """Announce a piece of one layer, or of all."""
        if not self.saves:
            return
        one = self.chance.choice(self.saves)
        layers = list(self.layers)
        if self.chance.random() < 0.5:
            layers = [self.chance.choice(layers)]
        more = self.chance.randint(1, 4)
        end = min(max(one.announced[layer] for layer in layers) + more, len(one.blocks))
        for layer in layers:
            self._announce(one, layer, end)

    def extracted(self) -> None:
        """End a step of a save; what was announced before it is the producer's again."""
        if not self.saves:
            return
        one = self.chance.choice(self.saves)
        one.save.extracted(self.chance.choice([0.0, 1.0, 30.0]))
        done = min(one.announced)
        if one.save.state is SaveState.OPEN and done > one.extracted:
            self.kv[:, one.blocks[one.extracted : done]] = self.chance.randrange(256)
            one.extracted = done

    def finish_save(self) -> None:
        """End a save, some with a piece that was never extracted."""
        if self.saves:
            one = self.chance.choice(self.saves)
            if self.chance.random() < 0.7:
                one.save.extracted(30.0)
            self._end(one)

    def _end(self, one: Saving) -> None:
        self.saves.remove(one)
        one.save.finish()
        self.give(one.blocks)

    def cancel_save(self) -> None:
        """Give a save up."""
        if self.saves:
            one = self.saves.pop(self.chance.randrange(len(self.saves)))
            one.save.cancel()
            self.give(one.blocks)

    # -- everything at once ------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything; nothing may be hit after it."""
        self.engine.reset()
        self._resets += 1
        if self.prompts:
            require(self.hit(self.chance.choice(self.prompts)) == 0, "a reset forgets everything")

    def retire(self) -> None:
        """Forget one prompt and all that goes on behind it."""
        if self.prompts:
            tokens = self.chance.choice(self.prompts)
            self.engine.retire(tokens)
            require(self.hit(tokens) == 0, "a retired prompt is no hit")


def paged_kv(geometry: Geometry) -> npt.NDArray[np.uint8]:
    """Return poisoned blocks, aligned for direct I/O: uint8[layers, blocks, block_bytes]."""
    shape = (geometry.layer_count, KV_BLOCKS, geometry.block_bytes)
    memory = np.full(np.prod(shape) + 4096, POISON, np.uint8)
    begin = -memory.ctypes.data % 4096
    return memory[begin : begin + np.prod(shape)].reshape(shape)
