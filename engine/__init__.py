"""The engine of Range: restores prompt prefixes from a store into paged KV, and saves them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rangekv.engine.config import EngineConfig
    from rangekv.engine.engine import Engine
    from rangekv.engine.index.tickets import RequestKey, Ticket
    from rangekv.engine.stats import Stats
    from rangekv.engine.transfer.restore import Restore
    from rangekv.engine.transfer.save import Save

_HOMES = {
    "Engine": "rangekv.engine.engine",
    "EngineConfig": "rangekv.engine.config",
    "RequestKey": "rangekv.engine.index.tickets",
    "Restore": "rangekv.engine.transfer.restore",
    "Save": "rangekv.engine.transfer.save",
    "Stats": "rangekv.engine.stats",
    "Ticket": "rangekv.engine.index.tickets",
}

__all__ = ["Engine", "EngineConfig", "RequestKey", "Restore", "Save", "Stats", "Ticket"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `rangectl` reads stores without loading numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
