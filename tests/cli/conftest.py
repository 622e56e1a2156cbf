"""What the command line tests share: a way to run a verb, and a small store with content."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine.testing.scene import Scene

from rangectl.cli import run


@dataclass(frozen=True)
class Result:
    """One run of a verb."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout, or on stderr after an error."""
        fields: dict[str, Any] = json.loads(self.out or self.err)
        return fields


Invoke = Callable[..., Result]


@pytest.fixture
def rangectl(capfd: pytest.CaptureFixture[str]) -> Invoke:
    """Run one command line in this process."""

    def invoke(*arguments: object) -> Result:
        capfd.readouterr()
        status = run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Result(status, captured.out, captured.err)

    return invoke


@pytest.fixture
def scatter_backwards(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that lets a class of devices put blocks in the places of others."""

    def break_it(device: Any) -> None:
        scatter = device.scatter
        monkeypatch.setattr(
            device,
            "scatter",
            lambda self, lane, source, strips, ids: scatter(
                self, lane, source, strips, ids[::-1].copy()
            ),
        )

    return break_it


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A closed store of two prompts, 256 tokens each; `scene.store` is its directory."""
    scene = Scene.new(tmp_path, seed=0)
    with scene.engine() as engine:
        for _ in range(2):
            assert scene.save(engine, scene.prompt())
    return scene
