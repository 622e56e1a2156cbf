"""What RANGE_REQUIRE names: where it is missing, tests that need it fail and are not skipped."""

from __future__ import annotations

import os


def required(name: str) -> bool:
    return name in os.environ.get("RANGE_REQUIRE", "").split(",")
