"""The options that bind a store to a model when it is made: geometry and namespace.

Owns their spelling and the rule that they come together; never touches a store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rangekv.format.errors import UsageError
from rangekv.format.geometry import ModelGeometry
from rangekv.format.namespace import Namespace, Value

if TYPE_CHECKING:
    from rangectl.model_config import ModelShape

BLOCK_TOKENS = 16  # what vLLM takes when it is not told
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Binding:
    """What a bound store is made for; both are None for a blank one."""

    model: ModelGeometry | None
    namespace: Namespace | None


def binding_options(function: _Function) -> _Function:
    """Add the options; the function receives layers, token_bytes, block_tokens and namespace."""
    for option in reversed(
        (
            click.option("--layers", type=int, help="Layers of the model on this rank."),
            click.option("--token-bytes", type=int, help="K and V of one token in one layer."),
            click.option("--block-tokens", type=int, help="Tokens of one block."),
            click.option(
                "--namespace",
                multiple=True,
                metavar="KEY=VALUE",
                help="A fact under which KV may be reused, such as model=NAME; repeatable.",
            ),
        )
    ):
        function = option(function)
    return function


def read_binding(
    layers: int | None, token_bytes: int | None, block_tokens: int | None, facts: tuple[str, ...]
) -> Binding:
    """Return what the options say; raises UsageError unless all or none of them are given."""
    if layers is None and token_bytes is None and block_tokens is None and not facts:
        return Binding(None, None)
    if layers is None or token_bytes is None or block_tokens is None or not facts:
        raise UsageError(
            "half-bound",
            "a store is bound with --layers, --token-bytes, --block-tokens and at least one"
            " --namespace KEY=VALUE; give all of them, or none for a blank store",
        )
    return Binding(ModelGeometry(layers, token_bytes, block_tokens), Namespace(_fields(facts)))


def model_binding(
    shape: ModelShape, tp_size: int, block_tokens: int, facts: tuple[str, ...]
) -> Binding:
    """Return one rank's binding to a model, its namespace from the config and `facts`.

    A fact of the same name stands in the place of the config's. Raises UsageError.
    """
    model = shape.geometry(block_tokens, tp_size)
    told: dict[str, Value] = {
        "model": shape.name,
        "kv_dtype": shape.kv_dtype,
        "layer_count": model.layer_count,
        "token_bytes": model.token_bytes,
        "block_tokens": block_tokens,
        "tp_size": tp_size,
    }
    return Binding(model, Namespace(told | _fields(facts)))


def _fields(facts: tuple[str, ...]) -> dict[str, Value]:
    fields: dict[str, Value] = {}
    for fact in facts:
        key, equals, value = fact.partition("=")
        if not (key and equals) or key in fields:
            raise UsageError(
                "bad-namespace", f"--namespace {fact!r}: expected KEY=VALUE, each KEY once"
            )
        fields[key] = value
    return fields
