"""How hard the tests try: a fast tier for every change, a long one with RANGE_LONG=1."""

from __future__ import annotations

import os

LONG = os.environ.get("RANGE_LONG") == "1"


def effort(short: int, long: int) -> int:
    """Return how often to repeat something in this tier."""
    return long if LONG else short
