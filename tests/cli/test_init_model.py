"""`init --model config.json` and `--zero`: geometry from a model, progress, nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rangekv.engine.inspection import read_store
from rangekv.engine.stores import resolve

COMMAND = [sys.executable, "-c", "from rangectl.cli import main; main()"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path):
    """Write a config with changes; None takes a key away."""

    def write(**changes: object) -> Path:
        fields = {key: value for key, value in (LLAMA | changes).items() if value is not None}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return path

    return write


@pytest.mark.parametrize(
    ("changes", "layers", "token_bytes"),
    [
        ({}, 32, 4096),
        ({"torch_dtype": None, "dtype": "float32"}, 32, 8192),
        ({"num_key_value_heads": None}, 32, 16384),
        ({"head_dim": 256}, 32, 8192),
        ({"num_hidden_layers": 61, "num_key_value_heads": 1}, 61, 512),
        ({"sliding_window": 4096, "use_sliding_window": False}, 32, 4096),
        ({"sliding_window": 512, "layer_types": ["full_attention"] * 32}, 32, 4096),
    ],
)
def test_the_geometry_is_that_of_the_model(
    rangectl, tmp_path: Path, config, changes: dict, layers: int, token_bytes: int
) -> None:
    shown = rangectl(
        *("init", tmp_path / "kv", "--capacity", "4GiB", "--model", config(**changes)),
        *("--dry-run", "--json"),
    )
    assert shown.status == 0, shown.err
    geometry = shown.json["stores"][0]["geometry"]
    assert (geometry["layers"], geometry["token_bytes"]) == (layers, token_bytes)
    assert geometry["block_tokens"] == 16


def test_a_model_of_several_media_is_its_text_part(rangectl, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Seeing"], "text_config": LLAMA, "vision_config": {}})
    )
    shown = rangectl(
        *("init", tmp_path / "kv", "--capacity", "1GiB", "--model", tmp_path),
        *("--block-tokens", 32, "--dry-run"),
    )
    assert shown.out.startswith("model        Seeing   32 layers, 8 KV heads of 128, bfloat16\n")


def test_it_is_bound_in_path_and_says_to_what(rangectl, tmp_path: Path, config) -> None:
    made = rangectl(
        *("init", tmp_path / "kv", "--capacity", "64MiB", "--namespace", "model=mine"),
        *("--model", config(num_hidden_layers=2)),
    )
    assert made.status == 0, made.err
    report = read_store(str(tmp_path / "kv"))
    assert report.namespace is not None
    assert report.namespace.fields == {
        "block_tokens": 16,
        "kv_dtype": "bfloat16",
        "layer_count": 2,
        "model": "mine",
        "token_bytes": 4096,
        "tp_size": 1,
    }


@pytest.mark.parametrize(("tp_size", "token_bytes"), [(2, 2048), (8, 512), (16, 512)])
def test_ranks_share_the_heads_and_an_engine_finds_them(
    rangectl, tmp_path: Path, config, tp_size: int, token_bytes: int
) -> None:
    made = rangectl(
        *("init", tmp_path / "kv", "--capacity", "64MiB", "--json"),
        *("--model", config(num_hidden_layers=2), "--tp-size", tp_size),
    )
    assert made.status == 0, made.err
    assert len(made.json["stores"]) == tp_size
    last = read_store(made.json["stores"][-1]["path"])
    assert last.geometry is not None
    assert last.geometry.token_bytes == token_bytes
    found = resolve(
        str(tmp_path / "kv"),
        namespace=last.namespace,
        geometry=last.geometry.model,
        rank=tp_size - 1,
        world_size=tp_size,
    )
    assert found == last.path


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "latent vector of 576 numbers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"sliding_window": 4096}, "sliding window of 4096"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"linear_num_value_heads": 4}, "state besides KV"),
        ({"num_kv_shared_layers": 10}, "share the KV"),
    ],
)
def test_what_range_cannot_keep_is_refused_by_name(
    rangectl, tmp_path: Path, config, changes: dict, word: str
) -> None:
    refused = rangectl("init", tmp_path / "kv", "--capacity", "1GiB", "--model", config(**changes))
    assert (refused.status, refused.out) == (2, "")
    assert word in refused.err
    assert "[model-not-supported]" in refused.err
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": None},
        {"num_hidden_layers": "32"},
        {"num_attention_heads": 0},
        {"hidden_size": None},
        {"torch_dtype": "int8"},
        {"torch_dtype": None},
        {"text_config": [1]},
    ],
)
def test_a_config_that_does_not_say_it(rangectl, tmp_path: Path, config, changes: dict) -> None:
    refused = rangectl("init", tmp_path / "kv", "--capacity", "1GiB", "--model", config(**changes))
    assert (refused.status, refused.out) == (2, "")
    assert "[bad-model-config]" in refused.err


@pytest.mark.parametrize("text", ["", "[]", "nothing", "[" * 100_000])
def test_a_file_that_is_no_config(rangectl, tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for place in (path, tmp_path / "nope"):
        refused = rangectl("init", tmp_path / "kv", "--capacity", "1GiB", "--model", place)
        assert (refused.status, refused.out) == (2, "")
        assert "[bad-model-config]" in refused.err


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--layers", 4], "two-geometries"),
        (["--world-size", 2], "half-bound"),
        (["--tp-size", 3], "bad-tp-size"),
        (["--tp-size", 12], "bad-tp-size"),
    ],
)
def test_what_does_not_go_together(rangectl, tmp_path, config, more: list, code: str) -> None:
    refused = rangectl("init", tmp_path / "kv", "--capacity", "1GiB", "--model", config(), *more)
    assert (refused.status, f"[{code}]" in refused.err) == (2, True)
    alone = rangectl("init", tmp_path / "kv", "--capacity", "1GiB", "--tp-size", 2)
    assert "[no-model]" in alone.err


def test_zero_writes_every_byte_with_a_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "init", str(tmp_path / "kv"), "--capacity", "128MiB", "--zero"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        assert b"init" in terminal.read(65536)
    assert done.stdout.startswith("created ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_init_that_is_stopped_leaves_nothing(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [*COMMAND, "init", str(tmp_path / "kv"), "--capacity", "4GiB", "--zero"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not list(tmp_path.glob("kv/blank/*/.range.pack.*.tmp")):
            assert process.poll() is None
        process.send_signal(number)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said.count("\n")) == (130, 1)
    assert list(tmp_path.iterdir()) == []
