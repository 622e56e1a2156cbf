"""Real vLLM with latent attention (MLA): the layout that Range restores is the one vLLM reads."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support.vllm_model import MLA_LATENT, MLA_LAYERS, MLA_ROPE, write_mla_model
from support.vllm_process import IN_PROCESS, Run, rangectl, run_vllm

RANDOM = random.Random(12)
BLOCK_TOKENS = 16  # the only size that vLLM's kernel for the CPU takes
PROMPT = [RANDOM.randrange(10, 2000) for _ in range(20 * BLOCK_TOKENS)]
ANSWER_COUNT = 6
TESTS = str(Path(__file__).parent.parent)


@pytest.fixture(scope="module")
def run(module_path: Path) -> Run:
    cache = module_path / "cache"
    rangectl("init", str(cache), "--capacity", "128MiB")
    return run_vllm(
        module_path / "run",
        write_mla_model(module_path / "model"),
        [
            {"prompts": [PROMPT], "max_tokens": ANSWER_COUNT, "extra": {"cache_salt": "plain"}},
            {"prompts": [PROMPT], "max_tokens": 1},
            {"continue": [], "max_tokens": ANSWER_COUNT - 1, "patience_s": 60},
        ],
        connector={"store": str(cache), "lookup_timeout_ms": 10_000},
        transfer={"kv_connector_module_path": "support.latent_connector"},
        environment=IN_PROCESS
        | {"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])},
        block_size=BLOCK_TOKENS,
    )


def test_restored_latents_decode_as_those_that_never_left_memory(run: Run) -> None:
    """The first answer is decoded by the kernel and from the KV that the second one gets back.

    Neither is compared with a prefill: on the CPU it rounds otherwise than decoding does.
    """
    (whole,), (first,), (rest,) = run.batches
    assert rest.cached == len(PROMPT)
    assert first.tokens == whole.tokens[:1]
    assert rest.tokens == whole.tokens[1:]
    assert rest.logprobs == pytest.approx(whole.logprobs[1:], abs=1e-5)
    assert len(set(whole.tokens)) > 1
    assert whole.cached == 0


def test_store_holds_one_latent_vector_a_token(run: Run) -> None:
    pages = run.counters
    assert int(pages["delivered_tokens"]) == len(PROMPT)
    token_bytes = MLA_LAYERS * (MLA_LATENT + MLA_ROPE) * 4
    assert int(pages["read_bytes"]) - int(pages["overread_bytes"]) == len(PROMPT) * token_bytes
    assert run.returncode == 0
    assert "range: close state=clean" in run.log
