"""The two connectors of `serve-benchmark`: how vLLM is told of each, and where each one keeps KV.

Imports no vLLM; never starts a server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rangectl.measure import drop_residency

_EXAMPLE_FILE = "distributed/kv_transfer/kv_connector/v1/example_connector.py"


def range_transfer(store: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kv-transfer-config of Range with its store below `store`."""
    return {
        "kv_connector": "RangeConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(store), **settings},
    }


def example_transfer(folder: Path) -> dict[str, Any]:
    """Return the kv-transfer-config of vLLM's ExampleConnector: a file a layer and prompt."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def offers_example() -> bool:
    """Whether the installed vLLM has the ExampleConnector; it is looked for and not imported."""
    vllm = find_spec("vllm")
    places = [] if vllm is None else vllm.submodule_search_locations or []
    return any(Path(place, _EXAMPLE_FILE).exists() for place in places)


def leave_page_cache(folder: Path) -> None:
    """Write all files below `folder` to the disk and take them out of memory.

    Range reads the disk itself; files that memory still holds would be another comparison.
    """
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        drop_residency(str(path))
