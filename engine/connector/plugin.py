"""The `vllm.general_plugins` entry point: makes vLLM know `RangeConnector` by its name.

Registers the name only; the connector itself is imported when somebody asks for it.
"""

from __future__ import annotations

NAME = "RangeConnector"


def register() -> None:
    """Register the connector; vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "rangekv.engine.vllm_connector", NAME)
