"""All that differs between vLLM releases, and every look at vLLM's internals.

Answers plain questions with plain values; decides nothing. Run with 0.32.0 on the CPU; 0.25.1 and
0.33.0 are read from source only.
"""

from __future__ import annotations

from typing import Any

from vllm.version import __version__ as vllm_version


def vllm_release() -> str:
    """Return major.minor of the running vLLM."""
    return ".".join(vllm_version.split(".")[:2])


def disk_hit_source() -> Any:
    """Return vLLM's label for tokens that came from disk, or None where it has no such labels."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # before 0.32
        return None
    return CacheHitSource.DISK


def layer_specs(kv_cache_config: Any) -> list[Any]:
    """Return the KV specs of all layers of all groups."""
    specs = []
    for group in kv_cache_config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        specs += list(inner.values()) if inner else [group.kv_cache_spec]
    return specs


def spec_kind(spec: Any) -> str:
    """Return what a layer keeps: `full_attention`, or the name of something else."""
    from vllm.v1 import kv_cache_interface

    kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    if kind is not None:
        return str(kind(spec).value)
    # 0.25 has no kinds: the exact class says it, for its subclasses mean other layouts
    named = {
        kv_cache_interface.FullAttentionSpec: "full_attention",
        kv_cache_interface.MLAAttentionSpec: "mla_attention",
    }
    return named.get(type(spec), type(spec).__name__)


def replica_number(vllm_config: Any) -> int:
    """Return which data-parallel replica of a dense model this engine is, 0 for the first or only.

    vLLM lets each replica believe that it is alone, but for this number.
    """
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))


def kv_layout(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the name of the physical KV layout, or `unnamed` before 0.32."""
    for config in (kv_cache_config, vllm_config.cache_config):
        layout = getattr(config, "kv_cache_layout", None)
        if layout is not None:
            return str(getattr(layout, "name", layout))
    return "unnamed"


def attention_layer(vllm_config: Any, layer_name: str) -> tuple[str, str]:
    """Return (backend name, instruction set) of one attention layer; `none` where it has none."""
    layer = vllm_config.compilation_config.static_forward_context[layer_name]
    backend = getattr(layer, "attn_backend", None)
    return (
        "unknown" if backend is None else str(backend.get_name()),
        str(getattr(layer, "isa", "none")),
    )
