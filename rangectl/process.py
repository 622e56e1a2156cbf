"""What a process is given from outside: its standard streams, and signals that ask it to stop.

Owns making both safe before a verb runs; never prints and knows no verb.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def settle_streams() -> None:
    """Give closed standard streams a harmless end, and let every character be printed."""
    # A closed descriptor would go to the next file that is opened, and that may be a store.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    sys.stdin = sys.stdin or os.fdopen(0, "r")
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def interrupt_once() -> None:
    """Let Ctrl-C, a kill and a lost terminal raise one KeyboardInterrupt between them.

    Benchmarks hold gigabytes of temporary files: a second Ctrl-C must not stop the clean-up.
    What the caller has ignored, as nohup does, stays ignored.
    """
    _handle(_interrupt)


def ignore_interrupts() -> None:
    """From here on the process ends by itself, and with its own exit status."""
    # Not SIG_IGN at once: Python complains about a signal that came in just before.
    _handle(_nothing)
    _handle(signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _handle(_nothing)
    raise KeyboardInterrupt


def _nothing(number: int, frame: FrameType | None) -> None:
    """Take the place of a handler once the process is about to end anyway."""


def _handle(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in _STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
