"""JSON that strangers wrote, read in bounded memory and time.

A few bytes of JSON can stand for a large object: `[],` is 3 bytes and 64 in memory, and `{"a":[]}`
nested a hundred thousand times ends the interpreter's stack. So what is there is counted before it
is parsed.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import numpy as np

from glm5next_jax.errors import printable

_MAX_DEPTH = 64


@dataclasses.dataclass(frozen=True)
class Limits:
    """How large a JSON text may be.

    Attributes:
      num_bytes: of the file, and of its text in memory, where a single character beyond U+FFFF
        makes all of them 4 bytes wide.
      num_values: values and keys, counted by the characters that stand before each (`[{,:`), also
        where these are part of a string. A value takes some 100 bytes at most beside its text.
    """

    num_bytes: int
    num_values: int


def parse(data: bytes, limits: Limits, *, objects: Literal["dict", "unique", "pairs"]) -> Any:
    """The value of a JSON text in UTF-8.

    Args:
      data: the text.
      limits: what it may take.
      objects: what objects become: "dict", of whose equal keys the last counts; "unique", dicts
        whose equal keys are an error; or "pairs", tuples of (key, value), which are no lists.

    Raises:
      ValueError: it is not JSON (which knows no NaN and no Infinity), or larger or deeper than it
        may be. The message is short and says where.
    """
    widest = int(np.frombuffer(data, np.uint8).max(initial=0))
    width = 1 if widest < 0x80 else 2 if widest < 0xF0 else 4
    if len(data) * width > limits.num_bytes:
        raise ValueError(
            f"{len(data)} bytes of text, {width} in memory for each, where {limits.num_bytes} "
            "bytes are allowed"
        )
    num_values = sum(data.count(character) for character in (b",", b"[", b"{", b":"))
    if num_values > limits.num_values:
        raise ValueError(f"{num_values} values, where {limits.num_values} are allowed")
    hook = {"dict": None, "unique": _unique, "pairs": tuple}[objects]
    try:
        # Bytes would be taken for UTF-16 where they look like it.
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=hook, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        # Also integers of more digits than Python converts, with advice that is not for users.
        raise ValueError(printable(str(error).partition("; use ")[0])) from None
    if objects != "pairs" and _is_deeper(value, _MAX_DEPTH):
        raise ValueError(f"nested too deeply: more than {_MAX_DEPTH} levels")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"two values for the key {key!r}")
            seen.add(key)
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _is_deeper(value: Any, limit: int) -> bool:
    """Level by level: only a parser may recurse into what a stranger nested."""
    level = [value]
    for _ in range(limit + 1):
        outer = [item for item in level if isinstance(item, dict | list)]
        if not outer:
            return False
        level = [x for item in outer for x in (item.values() if isinstance(item, dict) else item)]
    return True
