"""What in a JSON object is no value of a row: the fields' own annotations say what each may be."""

import dataclasses
import json
import math
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

LARGEST = 10**20
"""No counter of bytes, nanoseconds or FLOPs of a step reaches it."""
POSITIVE = ("step_ns", "repeat")
"""Fields whose numbers are above zero."""
_SHOWN_CHARS = 60
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}


def misfit(kind: Any, data: dict[str, Any]) -> str | None:
    """What is wrong with the first value of `data` that no field of `kind` can have, in words: `step_ns is "abc", not a
    list`; None where all fit. Keys that `kind` does not know may hold anything."""
    return next(_misfits(kind, data), None)


def _misfits(kind: Any, data: dict[str, Any], above: str = "") -> Iterator[str]:
    hints = _hints(kind)
    for field in dataclasses.fields(kind):
        key = above + field.name
        if field.name in data:
            yield from _value(key, data[field.name], hints[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield f"it has no {key}"


def _value(key: str, value: Any, hint: Any) -> Iterator[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return
    if origin in (Union, types.UnionType):
        if value is not None:
            yield from _value(key, value, arguments[0])
    elif origin is dict or dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            yield f"{key} is {_shown(value)}, not an object"
        elif origin is not dict:
            yield from _misfits(hint, value, f"{key}.")
        else:
            for name, inner in value.items():
                yield from _value(f"{key}.{_shown(name)[1:-1]}", inner, arguments[1])
    elif origin is tuple:
        if not isinstance(value, list | tuple):
            yield f"{key} is {_shown(value)}, not a list"
        else:
            for inner in value:
                yield from _value(key, inner, arguments[0])
    elif not _fits(value, hint):
        yield f"{key} is {_shown(value)}, not {_WORDS[hint]}"
    elif hint in (int, float):
        yield from _range(key, value)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(value, bool):  # which Python takes for whole numbers
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _range(key: str, value: int | float) -> Iterator[str]:
    if isinstance(value, float):  # a loss may be anything, and no number at all where training diverged
        if key == "peak_flops" and not (math.isfinite(value) and value >= 0):
            yield f"{key} is {_shown(value)}"
    elif value < 0 or (value == 0 and key.rpartition(".")[2] in POSITIVE):
        yield f"{key} is {value}, not above zero" if value == 0 else f"{key} is {_shown(value)}, below zero"
    elif value > LARGEST:
        yield f"{key} is {_shown(value)}, more than there is"


@lru_cache(maxsize=16)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
