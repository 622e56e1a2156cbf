"""One fault case: its name, the rule it tests, how it is played and what came of it.

Owns the playing of a case in a fresh store; the cases themselves are the cells' and cases.py's.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from rangekv.engine.testing.checks import Absent, Violation
from rangekv.engine.testing.scene import MODEL, PATIENCE_S, Scene
from rangekv.format.errors import RangeError
from rangekv.format.geometry import ModelGeometry

Play = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the fault table. `absent` says why this engine cannot have the fault."""

    case_id: str
    owner: str
    rule: str
    play: Play
    model: ModelGeometry = MODEL
    absent: str | None = None


class Verdict(Enum):
    """What a case showed; ABSENT where there is nothing to show."""

    HELD = "held"
    VIOLATED = "VIOLATED"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case. `calls` are the last operations on files, oldest first."""

    case: Case
    verdict: Verdict
    states: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    violation: str | None = None
    milliseconds: float = 0.0
    calls: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """Whether no rule was broken."""
        return self.verdict is not Verdict.VIOLATED


class Table:
    """The cells of one owner, in the order in which they are written down.

    A cell is `state.fault`; its rule is the docstring of the function that plays it.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.cases: list[Case] = []

    def cell(self, name: str, *, model: ModelGeometry = MODEL) -> Callable[[Play], Play]:
        """Name the one cell that a function plays."""
        return self.cells({name: {}}, model=model)

    def cells(
        self, variants: Mapping[str, Mapping[str, Any]], *, model: ModelGeometry = MODEL
    ) -> Callable[[Play], Play]:
        """Name the cells that a function plays, with its arguments in each."""

        def add(play: Play) -> Play:
            rule = " ".join((play.__doc__ or "").split())
            for name, arguments in variants.items():
                case_id = f"{self.owner}.{name}"
                self.cases.append(
                    Case(case_id, self.owner, rule, partial(play, **arguments), model)
                )
            return play

        return add

    def absent(self, name: str, rule: str, why: str) -> None:
        """Name a cell that this engine has no state for."""
        self.cases.append(Case(f"{self.owner}.{name}", self.owner, rule, _nothing, absent=why))


def run_case(
    case: Case, folder: Path, seed: int, *, patience_s: float = PATIENCE_S, device: str = "cpu"
) -> Outcome:
    """Play one case in a fresh store below `folder`, which the caller removes.

    `device` is the engine's setting.

    Raises EnvironmentFault where no store can be made there: that violates no rule.
    """
    if case.absent is not None:
        return Outcome(case, Verdict.ABSENT, evidence=(case.absent,))
    start = time.monotonic()
    scene = Scene.new(folder, seed, model=case.model, patience_s=patience_s, device=device)
    violation = None
    try:
        with _quiet():
            case.play(scene)
    except Absent as absent:
        return Outcome(case, Verdict.ABSENT, evidence=(str(absent),))
    except Violation as broken:
        violation = f"broken: {broken}"
    except RangeError as refused:
        violation = f"refused where the rule says it must not be: {refused.line()}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"raised {error!r} in {place.name} ({place.filename}:{place.lineno})"
    return Outcome(
        case,
        Verdict.HELD if violation is None else Verdict.VIOLATED,
        tuple(scene.states),
        tuple(scene.evidence),
        violation,
        (time.monotonic() - start) * 1000,
        tuple(scene.files.calls),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Let the engine keep to itself what it has to say of faults that are injected."""
    log = logging.getLogger("rangekv")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def _nothing(scene: Scene) -> None:
    """Stand in the place of a play that there is not."""
