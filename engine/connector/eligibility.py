"""What Range refuses at start, by the name of the setting, and which requests it leaves alone.

Reads vLLM's configuration and requests; never changes them and never degrades silently.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from rangekv.engine.connector.settings import Settings
from rangekv.format.errors import UsageError

logger = logging.getLogger("vllm.rangekv")

SHUTDOWN_MARGIN_S = 7  # of vLLM's own way down, besides the close of the stores


def refuse_unproved(vllm_config: Any, settings: Settings) -> None:
    """Raise UsageError for the first setting under which restored KV is not proved right."""
    for name, found, expected in _refusals(vllm_config, settings):
        raise UsageError(
            "not-supported",
            f"{name} is {found}, expected {expected}; change it or serve without the connector",
        )


def refuse_unproved_cache(specs: list[Any], kinds: list[str], group_count: int) -> None:
    """Raise UsageError unless the KV cache is one group of full attention, plain or latent."""
    for name, found, expected in _cache_refusals(specs, kinds, group_count):
        raise UsageError(
            "not-supported",
            f"{name} is {found}, expected {expected}; serve this model without the connector",
        )


def warn_of_kill(vllm_config: Any, settings: Settings) -> None:
    """Say so where a SIGTERM to the server would end the workers before their stores are closed."""
    timeout = getattr(vllm_config, "shutdown_timeout", None)
    wanted = math.ceil(settings.close_deadline_s) + SHUTDOWN_MARGIN_S
    if timeout is not None and timeout < wanted:
        logger.warning(
            "range: shutdown_timeout=%d lets SIGTERM kill the workers before their stores are "
            "closed, and the next start is %s; serve with --shutdown-timeout %d or more",
            timeout,
            "cold"
            if settings.recovery == "discard"
            else f"without what was saved in the last {2 * settings.commit_interval_s:g} s",
            wanted,
        )


def skip_reason(request: Any) -> str | None:
    """Return why a request is neither looked up nor saved, or None for an ordinary one.

    Its tokens alone do not determine its KV, or it may still change.
    """
    if request.lora_request is not None:
        return "lora_request"
    if request.mm_features:
        return "mm_features"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    if getattr(request, "resumable", False):
        return "resumable"
    return None


def _refusals(vllm_config: Any, settings: Settings) -> Iterator[tuple[str, object, str]]:
    """Yield (setting, what was found, what is expected) for everything that is wrong."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        yield "kv_role", transfer.kv_role, "kv_both"
    if transfer.kv_load_failure_policy != "recompute" and not settings.allow_fail_policy:
        yield (
            "kv_load_failure_policy",
            transfer.kv_load_failure_policy,
            "recompute (a failed load then costs time, not the request)",
        )
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "data_parallel_size",  # 1 in each replica of a dense model; experts go in lockstep
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
    ):
        if getattr(parallel, name, 1) != 1:
            yield name, getattr(parallel, name), "1"
    executor = parallel.distributed_executor_backend
    if parallel.tensor_parallel_size != 1 and executor != "mp":
        yield "distributed_executor_backend", executor, "mp (ranks of other hosts are not reached)"
    if getattr(parallel, "enable_dbo", False):
        yield "enable_dbo", True, "false"
    if vllm_config.lora_config is not None:
        yield "enable_lora", True, "false"
    if vllm_config.speculative_config is not None:
        yield "speculative_config", "set", "none"
    model = vllm_config.model_config
    if model.runner_type != "generate":
        yield "runner", model.runner_type, "generate"
    if model.is_encoder_decoder:
        yield "the model", "encoder-decoder", "decoder only"
    if getattr(model, "enable_sleep_mode", False):
        yield "enable_sleep_mode", True, "false"
    if model.use_mla and not vllm_config.scheduler_config.enable_chunked_prefill:
        # vLLM turns it off where its kernels for latent attention know no context.
        yield "enable_chunked_prefill", False, "true (prompts are continued behind restored KV)"
    cache = vllm_config.cache_config
    if str(cache.cache_dtype) not in ("auto", "float16", "bfloat16", "float32"):
        yield "kv_cache_dtype", cache.cache_dtype, "auto (quantised KV is not proved)"
    if cache.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill", True, "false"
    if vllm_config.device_config.device_type != "cpu":
        yield "device", vllm_config.device_config.device_type, "cpu (other devices come later)"


def _cache_refusals(
    specs: list[Any], kinds: list[str], group_count: int
) -> Iterator[tuple[str, object, str]]:
    if group_count != 1:
        yield "the number of KV cache groups", group_count, "1 (hybrid models are not proved)"
    for spec, kind in zip(specs, kinds, strict=True):
        if kind not in ("full_attention", "mla_attention"):
            yield "the attention of a layer", kind, "full_attention or mla_attention"
        quantization = getattr(spec, "kv_quant_mode", None)
        if quantization is not None and getattr(quantization, "name", "NONE") != "NONE":
            yield "kv_quant_mode", quantization.name, "NONE"
        for name, expected in (
            ("attention_chunk_size", None),
            ("page_size_padded", None),
            ("num_head_slots", None),
            ("state_content_bytes", None),
            ("tokens_per_state", 1),
            ("non_causal", False),
            ("model_version", None),
            # One latent vector of a token is its keys and its values.
            ("head_size_v", 0 if kind == "mla_attention" else spec.head_size),
        ):
            if getattr(spec, name, expected) != expected:
                yield name, getattr(spec, name), str(expected)
