"""Namespace of a model: what changes its KV changes it, what does not leaves it alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


def a_model(config: dict[str, Any] | None = None, **fields: Any) -> Any:
    plain = {"model_type": "llama", "rope_theta": 1e4, "num_hidden_layers": 4} | (config or {})
    return SimpleNamespace(
        **{
            "hf_config": SimpleNamespace(to_dict=lambda: plain),
            "hf_text_config": SimpleNamespace(to_dict=lambda: plain.get("text_config", plain)),
            "dtype": "torch.float32",
            "quantization": None,
            "disable_sliding_window": False,
            "max_model_len": 4096,
        }
        | fields
    )


def digest(*arguments: Any, **fields: Any) -> str:
    from rangekv.engine.connector.identity import semantic_config_digest

    return semantic_config_digest(a_model(*arguments, **fields))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"rope_theta": 5e5}, {}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {}),
        ({"text_config": {"head_dim": 3}}, {}),
        ({}, {"dtype": "torch.bfloat16"}),
        ({}, {"quantization": "fp8"}),
        ({}, {"disable_sliding_window": True}),
    ],
)
def test_what_the_model_computes_counts(config: dict[str, Any], fields: dict[str, Any]) -> None:
    assert digest(config, **fields) != digest()


@pytest.mark.parametrize(
    "config",
    [
        {"_name_or_path": "/elsewhere"},
        {"transformers_version": "9"},
        {"torch_dtype": "bfloat16"},
        {"use_cache": False},
    ],
)
def test_names_and_provenance_do_not(config: dict[str, Any]) -> None:
    assert digest(config) == digest()


@pytest.mark.parametrize(
    ("rope_type", "counts"),
    [
        ("default", False),
        ("linear", False),
        ("llama3", False),
        ("yarn", False),
        ("longrope", True),
        ("dynamic", True),
        ("a-new-one", True),
    ],
)
def test_longest_sequence_counts_where_rope_depends_on_it(rope_type: str, counts: bool) -> None:
    for key in ("rope_type", "type"):
        config = {"rope_parameters": {key: rope_type}}
        assert (digest(config) != digest(config, max_model_len=8192)) is counts
    by_layer = {"rope_scaling": {"full": {"rope_type": rope_type}}}
    inner = {"text_config": by_layer}
    for nested in (by_layer, inner):
        assert (digest(nested) != digest(nested, max_model_len=8192)) is counts


def weights_of(**fields: Any) -> dict[str, str]:
    from rangekv.engine.connector.identity import _weights

    config = SimpleNamespace(architectures=["LlamaForCausalLM"], _commit_hash=None)
    model = {"model": "org/name", "model_weights": "", "hf_config": config, "seed": 0} | fields
    return _weights(
        SimpleNamespace(
            model_config=SimpleNamespace(**model),
            load_config=SimpleNamespace(load_format=fields.get("load_format", "auto")),
        )
    )


def test_hub_model_is_its_resolved_commit() -> None:
    config = SimpleNamespace(architectures=["LlamaForCausalLM"], _commit_hash="abc")
    assert weights_of(hf_config=config) == {
        "model": "org/name",
        "revision": "abc",
        "weights": "",
    }


def test_hub_model_of_unknown_commit_is_refused() -> None:
    from rangekv.format.errors import UsageError

    with pytest.raises(UsageError, match="--revision"):
        weights_of()


def test_dummy_weights_are_their_seed() -> None:
    assert weights_of(load_format="dummy")["weights"] == "dummy seed 0"
