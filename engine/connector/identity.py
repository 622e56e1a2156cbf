"""The namespace of a running model: everything under which its KV may be used again.

Collects resolved facts (never defaults such as `auto`); when one cannot be known it refuses.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from rangekv.engine.connector import versions
from rangekv.engine.connector.fingerprint import weights_fingerprint
from rangekv.engine.connector.layout import PagedLayers
from rangekv.engine.connector.settings import Settings
from rangekv.format.errors import UsageError
from rangekv.format.namespace import Namespace

# Names, provenance and output settings of a Hugging Face config: none of them changes KV.
_NOT_SEMANTIC = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "id2label",
        "label2id",
        "problem_type",
    }
)
# Rotary embeddings whose values do not depend on the longest sequence that is configured.
_LENGTH_FREE_ROPE = frozenset({"default", "linear", "llama3", "yarn", "none"})


def model_namespace(
    vllm_config: Any, kv_cache_config: Any, layers: PagedLayers, settings: Settings
) -> Namespace:
    """Return the namespace of the model that this worker has loaded."""
    model = vllm_config.model_config
    spec = versions.layer_specs(kv_cache_config)[0]
    backend, isa = versions.attention_layer(vllm_config, layers.names[0])
    block_tokens = vllm_config.cache_config.block_size
    return Namespace(
        {
            **_weights(vllm_config),
            "config": semantic_config_digest(model),
            "kv_dtype": str(spec.dtype).removeprefix("torch."),
            "layout": versions.kv_layout(vllm_config, kv_cache_config),
            "attention_backend": backend,
            "vllm": versions.vllm_release(),
            "kernel_block": layers.kernel_block_tokens,
            "isa": isa,
            "block_tokens": block_tokens,
            "layer_count": len(layers.names),
            "token_bytes": layers.block_bytes // block_tokens,
            "tp_size": vllm_config.parallel_config.tensor_parallel_size,
            "tags": settings.tags,
        }
    )


def semantic_config_digest(model: Any) -> str:
    """Return the SHA-256 of what the model computes: config with overrides, dtype, quantisation.

    The longest sequence counts where the rotary embedding is scaled by it.
    """
    config = _semantic(model.hf_config.to_dict())
    text_config = model.hf_text_config.to_dict()  # of a model of several media, its inner part
    facts = {
        "config": config,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "disable_sliding_window": model.disable_sliding_window,
        "max_model_len": None if _is_length_free(text_config) else model.max_model_len,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _weights(vllm_config: Any) -> dict[str, str]:
    """Return the fields `model`, `revision` and `weights`.

    A hub model is its name and resolved commit; a local one is what its files hold, wherever they
    lie and however the model is served.
    """
    model = vllm_config.model_config
    path = str(model.model_weights or model.model)
    name = str(model.hf_config.architectures[0])
    if str(vllm_config.load_config.load_format) == "dummy":
        return {"model": name, "revision": "", "weights": f"dummy seed {model.seed}"}
    if os.path.exists(path):
        return {"model": name, "revision": "", "weights": weights_fingerprint(path)}
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise UsageError(
            "unknown-revision",
            f"the commit of model {path!r} is not known, expected a resolved hub revision; "
            "set --revision to a commit or serve the model from a local directory",
        )
    return {"model": path, "revision": str(commit), "weights": ""}


def _semantic(value: Any) -> Any:
    """Return a config without what does not change KV, nested configs included."""
    if isinstance(value, dict):
        return {
            str(key): _semantic(item) for key, item in value.items() if key not in _NOT_SEMANTIC
        }
    return value


def _is_length_free(config: dict[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = {
        str(each.get("rope_type") or each.get("type") or "none")
        for each in (rope, *rope.values())
        if isinstance(each, dict)
    }
    return kinds <= _LENGTH_FREE_ROPE
