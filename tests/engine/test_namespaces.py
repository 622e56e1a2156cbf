"""Whatever changes the meaning of KV gives zero hits, and the field that differs is named."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rangekv.engine import Engine, EngineConfig, RequestKey, stores
from rangekv.format.errors import OtherNamespace, UsageError
from rangekv.format.geometry import ModelGeometry
from rangekv.format.namespace import Namespace, Value
from support.rig import MIB, Rig, tokens_of

MODEL = ModelGeometry(layer_count=4, token_bytes=1024, block_tokens=16)
CAPACITY = 4 * MIB
PROMPT = tokens_of(1, 64)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


BASE: dict[str, Value] = {
    "model": "org/name",
    "revision": "8c22764a7e3675c50d4c7c9a4edb474456022b16",
    "weights": sha("weights"),
    "config": sha('{"rope_scaling": {"factor": 8.0}, "max_position_embeddings": 131072}'),
    "kv_dtype": "bfloat16",
    "layout": "NHD",
    "attention_backend": "FLASH_ATTN",
    "vllm": "0.32",
    "kernel_block": 16,
    "isa": "avx512",
    "block_tokens": 16,
    "layer_count": 4,
    "token_bytes": 1024,
    "tp_size": 1,
    "tags": "",
}
CHANGES: dict[str, tuple[str, Value]] = {
    "another model": ("model", "org/name-instruct"),
    "another revision": ("revision", "0e9e39f249a16976918f6564b8830bc894c89659"),
    "other weights": ("weights", sha("finetuned")),
    "another rope": (
        "config",
        sha('{"rope_scaling": {"factor": 4.0}, "max_position_embeddings": 131072}'),
    ),
    "another dtype of the same size": ("kv_dtype", "float16"),
    "another layout of the same size": ("layout", "HND"),
    "another backend": ("attention_backend", "FLASHINFER"),
    "another vllm": ("vllm", "0.33"),
    "another kernel block": ("kernel_block", 32),
    "another isa": ("isa", "amx"),
    "another block size": ("block_tokens", 32),
    "another layer count": ("layer_count", 2),
    "another token size": ("token_bytes", 2048),
    "another world size": ("tp_size", 2),
    "another tag": ("tags", "team=b"),
}
GEOMETRY_FIELDS = {"block_tokens", "layer_count", "token_bytes"}


def model_of(fields: dict[str, Value]) -> ModelGeometry:
    return ModelGeometry(**{name: int(fields[name]) for name in GEOMETRY_FIELDS})


def resolved(directory: Path, fields: dict[str, Value], **changes: object) -> Path:
    arguments = {"capacity_bytes": CAPACITY, "geometry": model_of(fields)} | changes
    return Path(stores.resolve(str(directory), namespace=Namespace(fields), **arguments))


def engine(path: Path, fields: dict[str, Value], **settings: object) -> Engine:
    return Engine.open(
        path,
        namespace=Namespace(fields),
        geometry=model_of(fields),
        config=EngineConfig(lock_wait_s=0.5, read_workers=1, **settings),
    )


def hit(opened: Engine) -> int:
    ticket = opened.lookup(RequestKey("request", "session"), PROMPT)
    opened.release(ticket)
    return ticket.token_count


@pytest.fixture(scope="module")
def directory(module_path: Path) -> Path:
    """A directory whose one store holds the prompt."""
    module_path.chmod(0o700)
    path = resolved(module_path, BASE)
    rig = Rig(path, model=MODEL, new=False, namespace=Namespace(BASE))
    assert rig.save(PROMPT)
    rig.engine.close(30)
    with engine(path, BASE) as again:
        assert hit(again) == 64
    return module_path


@pytest.mark.parametrize("change", CHANGES)
def test_it_hits_nothing_and_names_what_differs(directory, change):
    key, value = CHANGES[change]
    fields = BASE | {key: value}
    mine = Namespace(fields)
    assert mine.differences(Namespace(BASE)) == [(key, value, BASE[key])]
    path = resolved(directory, fields)
    assert path.parent != resolved(directory, BASE).parent
    with engine(path, fields) as opened:
        assert hit(opened) == 0
    nearest = stores.nearest_other(str(directory), mine)
    assert nearest.path == str(resolved(directory, BASE))
    assert nearest.differences == [(key, value, BASE[key])]
    with engine(resolved(directory, BASE), BASE) as opened:
        assert hit(opened) == 64, "its own store is untouched"


@pytest.mark.parametrize("change", CHANGES)
def test_its_own_path_is_refused_with_the_field_and_both_values(directory, change):
    key, value = CHANGES[change]
    path = resolved(directory, BASE)
    with pytest.raises(OtherNamespace, match="other-namespace") as caught:
        engine(path, BASE | {key: value})
    assert f"{key} {BASE[key]!r} (expected {value!r})" in caught.value.message
    named = re.findall(r"(\w+) \S+ \(expected", caught.value.message)
    assert named == [key], "and no other field"


def test_a_geometry_that_lies_about_its_namespace_is_refused(directory):
    path = resolved(directory, BASE)
    for name, value in (("block_tokens", 32), ("layer_count", 2), ("token_bytes", 2048)):
        with pytest.raises(OtherNamespace, match="other-geometry"):
            Engine.open(
                path,
                namespace=Namespace(BASE),
                geometry=model_of(BASE | {name: value}),
                config=EngineConfig(lock_wait_s=0.5),
            )


def test_each_rank_has_its_own_store(tmp_path):
    fields = BASE | {"tp_size": 2}
    paths = [
        resolved(tmp_path, fields, rank=rank, world_size=2, capacity_bytes=2 * CAPACITY)
        for rank in (0, 1)
    ]
    assert [path.name for path in paths] == ["rank-0-of-2", "rank-1-of-2"]
    with pytest.raises(OtherNamespace, match="other-rank"):
        engine(paths[0], fields, rank=1, world_size=2)
    for rank, path in enumerate(paths):
        with engine(path, fields, rank=rank, world_size=2) as opened:
            assert hit(opened) == 0


HOSTILE_TEXT = st.text(max_size=400) | st.sampled_from(
    ["../../etc", "/etc/passwd", "..", "\x00", "a" * 10_000, "\x1b[2J", "blank", "rank-0-of-1"]
)


@given(st.dictionaries(st.text(max_size=8), HOSTILE_TEXT, max_size=4))
def test_user_text_never_forms_a_path_or_an_unbounded_field(tags):
    try:
        namespace = Namespace(BASE | tags)
    except UsageError:
        return  # it is too long, or no text at all
    assert re.fullmatch("[0-9a-f]{12}", namespace.folder)
    assert len(namespace.encode()) <= 2048
    assert all(
        isinstance(value, int) or len(value.encode()) <= 256 for value in namespace.fields.values()
    )
    assert Namespace.decode(namespace.encode()) == namespace


def test_values_that_look_alike_are_told_apart():
    pairs = [({"tp_size": 1}, {"tp_size": "1"}), ({"a": "bc"}, {"ab": "c"}), ({"a": ""}, {})]
    pairs += [({"a": "x", "b": ""}, {"a": "", "b": "x"}), ({"a": "é"}, {"a": "e\u0301"})]
    for left, right in pairs:
        assert Namespace(left).digest != Namespace(right).digest
        assert Namespace(left).differences(Namespace(right))
