"""Owns transfer banks: their memory, their state and the evidence that frees them.

It never starts a read, copy or write, and never frees a bank because somebody stopped waiting.
"""

from __future__ import annotations

from enum import Enum

from rangekv.engine.devices.device import Memory
from rangekv.format.errors import ensure


class BankState(Enum):
    """Life of a bank: FREE → READ → SCATTER → FREE, or FREE → GATHER → WRITE → FREE.

    QUARANTINED: an operation on the bank is unproved; only its return brings the bank back.
    """

    FREE = "free"
    READ = "read"
    SCATTER = "scatter"
    GATHER = "gather"
    WRITE = "write"
    QUARANTINED = "quarantined"


class Evidence(Enum):
    """What proves that nothing touches a bank any more."""

    IO_RETURNED = "io-returned"
    FENCE_SETTLED = "fence-settled"


_STEPS = {
    BankState.FREE: {BankState.READ, BankState.GATHER},
    BankState.READ: {BankState.SCATTER},
    BankState.GATHER: {BankState.WRITE},
}
_PROOFS = {
    BankState.READ: Evidence.IO_RETURNED,
    BankState.SCATTER: Evidence.FENCE_SETTLED,
    BankState.GATHER: Evidence.FENCE_SETTLED,
    BankState.WRITE: Evidence.IO_RETURNED,
}


class Bank:
    """One transfer buffer; `memory` is uint8[bank_bytes] at a multiple of 4096."""

    __slots__ = ("index", "memory", "state")

    def __init__(self, index: int, memory: Memory) -> None:
        self.index = index
        self.memory = memory
        self.state = BankState.FREE


class BankSet:
    """A fixed number of equal banks, carved once from `memory`. Guarded by the engine's lock."""

    def __init__(self, count: int, bank_bytes: int, memory: Memory) -> None:
        """`memory` is uint8[count · bank_bytes], `bank_bytes` a multiple of 4096."""
        self.bank_bytes = bank_bytes
        self.quarantined_ever = 0
        self.banks = [
            Bank(index, memory[index * bank_bytes : (index + 1) * bank_bytes])
            for index in range(count)
        ]
        self._free = list(reversed(self.banks))

    @property
    def free_count(self) -> int:
        """Number of banks that can be taken now."""
        return len(self._free)

    @property
    def quarantined_count(self) -> int:
        """Number of banks whose last operation is unproved now."""
        return sum(bank.state is BankState.QUARANTINED for bank in self.banks)

    def take(self, state: BankState) -> Bank | None:
        """Return a free bank in `state` (READ or GATHER), or None."""
        if not self._free:
            return None
        bank = self._free.pop()
        self.advance(bank, state)
        return bank

    def advance(self, bank: Bank, state: BankState) -> None:
        """Move a bank to the next state of its life."""
        ensure(
            state in _STEPS.get(bank.state, set()),
            f"bank {bank.index} went from {bank.state.value} to {state.value}",
        )
        bank.state = state

    def release(self, bank: Bank, evidence: Evidence) -> None:
        """Free a bank on the evidence that its state needs; one in quarantine takes either."""
        ensure(
            bank.state is BankState.QUARANTINED or _PROOFS.get(bank.state) is evidence,
            f"bank {bank.index} in {bank.state.value} was released on {evidence.value}",
        )
        bank.state = BankState.FREE
        self._free.append(bank)

    def let_go(self) -> None:
        """Give the memory of all banks back; only for banks that nothing touches any more."""
        ensure(len(self._free) == len(self.banks), "the memory of a used bank was given back")
        for bank in self.banks:
            bank.memory = None

    def quarantine(self, bank: Bank) -> None:
        """Keep a bank from any use until the return of its operation is seen."""
        if bank.state is not BankState.QUARANTINED:
            ensure(bank.state is not BankState.FREE, f"free bank {bank.index} was quarantined")
            bank.state = BankState.QUARANTINED
            self.quarantined_ever += 1
