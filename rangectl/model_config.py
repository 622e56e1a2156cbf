"""A model's `config.json` as Hugging Face writes it: what one rank keeps of a token.

Owns reading the geometry from it, and refusing what Range cannot keep; loads no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rangekv.format.errors import UsageError
from rangekv.format.geometry import ModelGeometry

CONFIG_BYTES_MAX = 16 << 20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Keys of models whose layers keep something else than the K and V of every token.
_STATE_KEYS = ("ssm_cfg", "mamba_d_state", "linear_num_value_heads", "hybrid_override_pattern")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a config says of the KV cache, before it is divided among ranks."""

    name: str
    layer_count: int
    kv_heads: int
    head_dim: int
    kv_dtype: str

    def geometry(self, block_tokens: int, tp_size: int) -> ModelGeometry:
        """Return one rank's share; raises UsageError where heads cannot be divided."""
        large, small = max(self.kv_heads, tp_size), min(self.kv_heads, tp_size)
        if large % small:
            raise UsageError(
                "bad-tp-size",
                f"{self.kv_heads} KV heads cannot be divided among {tp_size} ranks;"
                " give a --tp-size that divides them, or a multiple of them",
            )
        # With more ranks than heads each head is on several ranks.
        heads = max(1, self.kv_heads // tp_size)
        token_bytes = 2 * heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]
        return ModelGeometry(self.layer_count, token_bytes, block_tokens)


def read_model_config(path: str) -> ModelShape:
    """Return the shape in a `config.json`, or in that of a model's directory.

    Raises UsageError `bad-model-config` for what is no such file, and `model-not-supported` for a
    model that does not keep K and V of every token in every layer.
    """
    place = Path(path)
    if place.is_dir():
        place /= "config.json"
    whole = _read(place)
    config = whole.get("text_config") or whole
    if not isinstance(config, dict):
        raise _bad(place, "text_config is no object")
    _refuse(place, whole, config)
    layers = _number(place, config, "num_hidden_layers")
    heads = _number(place, config, "num_attention_heads")
    kv_heads = _number(place, config, "num_key_value_heads", heads)
    hidden = config.get("hidden_size")
    derived = hidden // heads if isinstance(hidden, int) else None
    head_dim = _number(place, config, "head_dim", derived)
    dtypes = [one.get(key) for one in (config, whole) for key in ("dtype", "torch_dtype")]
    dtype = str(next((one for one in dtypes if one), "none"))
    if dtype not in DTYPE_BYTES:
        raise _bad(place, f"dtype is {dtype}, expected one of {', '.join(DTYPE_BYTES)}")
    return ModelShape(_name(whole), layers, kv_heads, head_dim, dtype)


def _read(place: Path) -> dict[str, Any]:
    try:
        with place.open("rb") as file:
            text = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise _bad(place, f"it cannot be read: {error.strerror}") from None
    try:
        config = json.loads(text) if len(text) <= CONFIG_BYTES_MAX else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise _bad(place, "it is no JSON object")
    return config


def _refuse(place: Path, whole: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse the models whose KV is not one group of plain full attention, by name."""
    if config.get("kv_lora_rank"):
        latent = [config.get("kv_lora_rank"), config.get("qk_rope_head_dim")]
        numbers = sum(one for one in latent if isinstance(one, int))
        raise _unsupported(
            place,
            f"MLA keeps one latent vector of {numbers} numbers a token, and no engine of Range"
            " serves it yet; to measure, give --layers, --token-bytes and --block-tokens",
        )
    if whole.get("is_encoder_decoder"):
        raise _unsupported(place, "it is an encoder-decoder")
    kinds = config.get("layer_types") or []
    other = sorted({str(kind) for kind in kinds if kind != "full_attention"})
    if other:
        raise _unsupported(place, f"it has layers of {', '.join(other)}")
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and not kinds:
        raise _unsupported(place, f"its attention has a sliding window of {window} tokens")
    if config.get("num_kv_shared_layers"):
        raise _unsupported(place, "some of its layers share the KV of others")
    states = [key for key in _STATE_KEYS if config.get(key)]
    if states:
        raise _unsupported(place, f"it keeps state besides KV ({', '.join(states)})")


def _number(place: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad(place, f"{key} is {value!r}, expected a positive number")
    return value


def _name(whole: Mapping[str, Any]) -> str:
    architectures = whole.get("architectures") or ["unknown"]
    return str(whole.get("_name_or_path") or architectures[0])


def _bad(place: Path, problem: str) -> UsageError:
    return UsageError("bad-model-config", f"{problem}; give a model's config.json", path=str(place))


def _unsupported(place: Path, problem: str) -> UsageError:
    return UsageError("model-not-supported", f"{problem}; only full attention is", path=str(place))
