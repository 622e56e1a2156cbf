"""`rangectl inspect PATH live`: what the engine that holds a store says of itself.

Asks through the engine's own lookup socket, which only its user can reach; never reads the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from rangekv.engine.connector.endpoint import private_folder, sockets
from rangekv.engine.connector.lookup_client import RankLink
from rangekv.format.errors import EnvironmentFault

from rangectl.output import counted, facts, human_bytes

ANSWER_S = 2.0


def live_stats(path: str) -> dict[str, Any]:
    """Return the counters and contents of the engine that serves the store at `path` now.

    Raises EnvironmentFault when no engine of this user answers for it.
    """
    folder = private_folder()
    for each in sockets(folder):
        link = RankLink(each)
        deadline = time.monotonic() + ANSWER_S
        try:
            answer = link.collect(deadline) if link.post("stats", deadline=deadline) else None
        finally:
            link.close()
        if answer is not None and _is_same(answer[0], path):
            stats: dict[str, Any] = answer[1]
            return stats
    raise EnvironmentFault(
        "no-live-engine",
        f"no engine answers for it in {folder}; ask as the user of the server and with its "
        "XDG_RUNTIME_DIR, or inspect the store without `live`",
        path=path,
    )


def _is_same(found: str, path: str) -> bool:
    try:
        return os.path.samefile(found, path)
    except OSError:
        return False


def live_lines(path: str, stats: dict[str, Any]) -> Iterator[str]:
    """Yield what an operator looks at first, then every counter that is not zero."""
    used, capacity = stats["used_bytes"], stats["capacity_bytes"]
    yield from facts(
        [
            ("state", f"live, opened {stats['state']}"),
            ("path", path),
            ("used", f"{human_bytes(used)} of {human_bytes(capacity)}"),
            ("holds", f"{counted(stats['records'], 'record')}   {stats['tokens']:,} tokens"),
        ]
    )
    yield ""
    counters = [(name, value) for name, value in stats.items() if isinstance(value, int) and value]
    width = max((len(name) for name, _ in counters), default=0)
    yield from (f"{name:<{width}}  {value:,}" for name, value in counters)
