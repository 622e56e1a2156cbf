"""`RangeConnector` without its refusals, for the test of one layout.

On the CPU vLLM's kernels for latent attention know no context, so Range refuses them; a prompt of
which one token is left to compute is decoded, which they can do.
"""

from __future__ import annotations

import rangekv.engine.vllm_connector as connector

RangeConnector = connector.RangeConnector
connector.refuse_unproved = lambda vllm_config, settings: None
