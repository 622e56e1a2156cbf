"""All that differs between vLLM releases, and every look at vLLM's internals.

Answers plain questions with plain values; decides nothing. Run with 0.32.0 on the CPU; 0.25.1 and
0.33.0 are read from source only.
"""

from __future__ import annotations

from typing import Any

from vllm.version import __version__ as vllm_version

STORAGE = "STORAGE"  # the medium of KV events that vLLM's own file tier names, too


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


def wants_kv_events(vllm_config: Any) -> bool:
    """Say whether somebody is to hear what is stored and removed."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many tokens a hash of `Request.block_hashes` adds; one group's block before 0.32.

    It is a block of that group, unless context parallelism splits it, which is refused.
    """
    found = getattr(kv_cache_config, "hash_block_size", None)
    return int(found or vllm_config.cache_config.block_size)


def stored_event(hashes: list[bytes], parent: bytes | None, block_tokens: int, kind: str) -> Any:
    """Return vLLM's event for blocks that follow `parent` and have come to lie on disk.

    As OffloadingConnector's, it names no tokens: the event of the same blocks in memory does.
    """
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return BlockStored(
        block_hashes=[maybe_convert_block_hash(each) for each in hashes],
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=[],
        block_size=block_tokens,
        lora_id=None,
        medium=STORAGE,
        lora_name=None,
        **_known_fields(BlockStored, group_idx=0, kv_cache_spec_kind=kind, locality="LOCAL"),
    )


def removed_event(hashes: list[bytes]) -> Any:
    """Return vLLM's event for blocks that do not lie on disk any more."""
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return BlockRemoved(
        block_hashes=[maybe_convert_block_hash(each) for each in hashes],
        medium=STORAGE,
        **_known_fields(BlockRemoved, group_idx=0, locality="LOCAL"),
    )


def _known_fields(event: Any, **fields: Any) -> dict[str, Any]:
    """Return those of `fields` that this vLLM's event has."""
    return {name: value for name, value in fields.items() if name in event.__struct_fields__}


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
