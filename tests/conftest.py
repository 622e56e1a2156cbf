"""What the tests measured, printed at the end of the run: the figures that the README quotes."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests interrupt processes that they start; a run in the background would hand down "ignored".
# (Not in the child between fork and exec: this process may have threads.)
for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

FIGURES = pytest.StashKey[dict[str, str]]()


@pytest.fixture
def figure(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """Return a function that notes one figure: (what, how much). Noted again, it is replaced."""

    def note(what: str, how_much: str) -> None:
        pytestconfig.stash.setdefault(FIGURES, {})[what] = how_much

    return note


@pytest.fixture(scope="module")
def module_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder for what the tests of a module share; their stores do not outlive it."""
    path = tmp_path_factory.mktemp("module")
    yield path
    shutil.rmtree(path, ignore_errors=True)  # a killed server may still be at its end


@pytest.fixture(autouse=True)
def banks_are_let_go() -> Iterator[None]:
    """Keep a run of all tests within some GiB of memory."""
    yield
    if "support.rig" in sys.modules:
        sys.modules["support.rig"].forget_all()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the figures of a worker to the process that prints them (pytest -n)."""
    handed = getattr(session.config, "workeroutput", None)
    if handed is not None:
        handed["figures"] = session.config.stash.get(FIGURES, {})


class Workers:
    """Takes what workers hand over; registered only where there are workers."""

    @pytest.hookimpl
    def pytest_testnodedown(self, node: Any) -> None:
        handed = getattr(node, "workeroutput", {}).get("figures", {})
        node.config.stash.setdefault(FIGURES, {}).update(handed)


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(Workers(), "range-figures")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    figures = config.stash.get(FIGURES, {})
    if figures:
        terminalreporter.section("figures")
        width = max(map(len, figures))
        for what, how_much in figures.items():
            terminalreporter.write_line(f"{what:<{width}}  {how_much}")
