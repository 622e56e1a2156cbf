"""What is refused at start, by the name of the setting, on vLLM's own configuration objects."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rangekv.engine.connector.settings import Settings
from rangekv.format.errors import UsageError
from support.vllm_process import IN_PROCESS, run_vllm

SETTINGS = Settings.parse({"store": "/cache"})


@pytest.fixture(scope="module")
def good_config(model: Path) -> Any:
    """The configuration of a model that Range serves."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        max_model_len=1024,
        kv_transfer_config={
            "kv_connector": "RangeConnector",
            "kv_connector_module_path": "rangekv.engine.vllm_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": "/cache"},
        },
    ).create_engine_config()


def test_good_config_is_taken(good_config: Any) -> None:
    from rangekv.engine.connector.eligibility import refuse_unproved

    refuse_unproved(good_config, SETTINGS)


@pytest.mark.parametrize(
    ("setting", "value", "name"),
    [
        ("kv_transfer_config.kv_role", "kv_producer", "kv_role"),
        ("kv_transfer_config.kv_role", "kv_consumer", "kv_role"),
        ("kv_transfer_config.kv_load_failure_policy", "fail", "kv_load_failure_policy"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size"),
        ("parallel_config.data_parallel_size", 2, "data_parallel_size"),
        (
            "parallel_config.decode_context_parallel_size",
            2,
            "decode_context_parallel_size",
        ),
        ("parallel_config.nnodes", 2, "nnodes"),
        ("parallel_config.enable_dbo", True, "enable_dbo"),
        ("lora_config", object(), "enable_lora"),
        ("speculative_config", object(), "speculative_config"),
        ("cache_config.cache_dtype", "fp8", "kv_cache_dtype"),
        ("cache_config.cache_dtype", "fp8_e5m2", "kv_cache_dtype"),
        ("cache_config.kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("model_config.runner_type", "pooling", "runner"),
        ("model_config.enable_sleep_mode", True, "enable_sleep_mode"),
        ("device_config.device_type", "cuda", "device"),
    ],
)
def test_setting_is_refused_by_name(good_config: Any, setting: str, value: Any, name: str) -> None:
    from rangekv.engine.connector.eligibility import refuse_unproved

    config = copy.copy(good_config)
    *owner, last = setting.split(".")
    place = config
    for part in owner:
        object.__setattr__(place, part, copy.copy(getattr(place, part)))
        place = getattr(place, part)
    object.__setattr__(place, last, value)
    with pytest.raises(UsageError) as caught:
        refuse_unproved(config, SETTINGS)
    assert caught.value.code == "not-supported"
    assert caught.value.message.startswith(f"{name} is ")


def test_ranks_of_other_hosts_are_refused_and_those_of_this_one_taken(good_config: Any) -> None:
    from rangekv.engine.connector.eligibility import refuse_unproved

    config = copy.copy(good_config)
    parallel = copy.copy(config.parallel_config)
    object.__setattr__(config, "parallel_config", parallel)
    object.__setattr__(parallel, "tensor_parallel_size", 2)
    refuse_unproved(config, SETTINGS)
    object.__setattr__(parallel, "distributed_executor_backend", "ray")
    with pytest.raises(UsageError, match="distributed_executor_backend is ray"):
        refuse_unproved(config, SETTINGS)


def test_latent_attention_needs_kernels_that_continue_a_prompt(good_config: Any) -> None:
    from rangekv.engine.connector.eligibility import refuse_unproved

    config = copy.copy(good_config)
    object.__setattr__(config, "model_config", SimpleNamespace(**vars(config.model_config)))
    object.__setattr__(config, "scheduler_config", copy.copy(config.scheduler_config))
    config.model_config.runner_type = "generate"
    config.model_config.is_encoder_decoder = False
    config.model_config.use_mla = True
    refuse_unproved(config, SETTINGS)
    config.scheduler_config.enable_chunked_prefill = False
    with pytest.raises(UsageError, match="enable_chunked_prefill is False"):
        refuse_unproved(config, SETTINGS)


def test_fail_policy_is_taken_where_it_is_asked_for(good_config: Any) -> None:
    from rangekv.engine.connector.eligibility import refuse_unproved

    config = copy.copy(good_config)
    transfer = copy.copy(config.kv_transfer_config)
    transfer.kv_load_failure_policy = "fail"
    object.__setattr__(config, "kv_transfer_config", transfer)
    refuse_unproved(config, Settings.parse({"store": "/c", "allow_fail_policy": True}))


def full_attention(**fields: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    plain = {"block_size": 32, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float32}
    return FullAttentionSpec(**plain | fields)


def other_spec(kind: str) -> Any:
    from vllm.v1 import kv_cache_interface as specs

    plain = dataclasses.asdict(full_attention())
    common = {key: plain[key] for key in ("block_size", "num_kv_heads", "head_size", "dtype")}
    match kind:
        case "sliding_window":
            return specs.SlidingWindowSpec(**common, sliding_window=256)
        case "chunked_local_attention":
            return specs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=256)
        case "mla_attention":
            return specs.MLAAttentionSpec(**common)
    return specs.CrossAttentionSpec(**common)


def refuse(specs: list[Any], group_count: int = 1) -> None:
    from rangekv.engine.connector import versions
    from rangekv.engine.connector.eligibility import refuse_unproved_cache

    refuse_unproved_cache(specs, [versions.spec_kind(spec) for spec in specs], group_count)


def test_full_attention_is_taken() -> None:
    refuse([full_attention()])
    refuse([full_attention(sliding_window=256)])  # blocks of all tokens are kept
    refuse([other_spec("mla_attention")])


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local_attention", "cross_attention"])
def test_other_attention_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=f"the attention of a layer is {kind}"):
        refuse([other_spec(kind)])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_chunk_size", 128),
        ("head_size_v", 32),
        ("tokens_per_state", 2),
        ("page_size_padded", 1 << 20),
        ("non_causal", True),
    ],
)
def test_unusual_full_attention_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        refuse([full_attention(**{field: value})])


def test_latent_attention_of_another_making_is_refused() -> None:
    with pytest.raises(UsageError, match="model_version"):
        refuse([dataclasses.replace(other_spec("mla_attention"), model_version="deepseek_v4")])


def test_quantised_cache_is_refused() -> None:
    from vllm.v1.kv_cache_interface import KVQuantMode

    mode = next(each for each in KVQuantMode if each.name != "NONE")
    with pytest.raises(UsageError, match="kv_quant_mode"):
        refuse([full_attention(kv_quant_mode=mode)])


def test_hybrid_models_are_refused() -> None:
    with pytest.raises(UsageError, match="number of KV cache groups is 2"):
        refuse([full_attention(), full_attention()], group_count=2)


def test_refusal_is_one_line_of_the_log_and_touches_nothing(tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    run = run_vllm(
        tmp_path / "run",
        model,
        [],
        connector={"store": str(cache), "capasity": "1GiB"},
        environment=IN_PROCESS,
    )
    assert run.returncode not in (0, -9)
    (line,) = [line for line in run.log.splitlines() if "range: refused to start" in line]
    assert "'capasity'; did you mean 'capacity'? [unknown-setting]" in line
    assert not any(cache.iterdir())
