"""Files that no honest program writes, and what a reader may do with them: return, or UserError.

Inputs are hypothesis's bytes and JSON values, and good files with bits flipped, ends cut, slices
swapped or doubled, and numbers changed. A traceback fails the test, as does an input that takes
longer than `SECONDS`; the line that is printed says what was tried (`pytest -s`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
from hypothesis import strategies as st

from fp8rl_jax.base.errors import UserError

SECONDS = 10  # longer is a hang
MANY = 10_000  # inputs of a reader in a slow test
FEW = 100  # and in a quick one
_NUMBERS = (
    0,
    1,
    -1,
    2,
    127,
    128,
    255,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**9,
    10**18,
    10**30,
    10**400,
    1e-320,
    1e39,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
)
_TEXTS = (
    "",
    "\0",
    "../x",
    "/dev/zero",
    "a" * 300,
    "a.b",
    "\ud800",
    "\u202e",
    "\x1b[2J",
    "$\\frac{",
    "<script>",
    "NaN",
    "__proto__",
    "{{",
    "%s",
)
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_VALUES = st.recursive(
    _LEAVES | st.sampled_from(_NUMBERS) | st.sampled_from(_TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
_DEEP = (
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b"[" * 150 + b"]" * 150,
    b'{"a":' * 99 + b"1" + b"}" * 99,
)


class Hang(BaseException):
    """An input took longer than SECONDS."""


@dataclasses.dataclass
class Record:
    """What was tried: inputs, those that were refused, the slowest in seconds, memory in MB."""

    inputs: int = 0
    refused: int = 0
    slowest: float = 0.0
    memory: float = 0.0


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raises Hang within after SECONDS, in the main thread."""

    def stop(*_):
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(
    name: str, read: Callable[[bytes], Any], good: list[bytes], count: int, seed: int = 0
) -> Record:
    """Gives `read` about `count` inputs; fails with the input that it neither takes nor refuses.

    Args:
      name: of the reader, for the line that is printed.
      read: reads these bytes as a file.
      good: files that it takes.
      count: of inputs: a quarter hypothesis's, the rest made of `good`.
      seed: of what is random.
    """
    record, before = Record(), _peak()

    def attempt(content: bytes) -> None:
        start = time.perf_counter()
        try:
            with time_limit(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(content)
        except UserError:
            record.refused += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            text = f"{content[:2000]!r} of {len(content)} bytes: {type(error).__name__}: {error}"
            raise AssertionError(f"{name}: {text}") from error
        record.inputs += 1
        record.slowest = max(record.slowest, time.perf_counter() - start)

    for content in (*good, *_DEEP, b"", b"\xff", b"\0" * 64):
        attempt(content)
    for content in _of_hypothesis(count // 4):
        attempt(content)
    rng = random.Random(seed)
    while record.inputs < count:
        attempt(mutated(rng.choice(good), rng))
    record.memory = _peak() - before
    print(
        f"{name}: {record.inputs} inputs, {record.refused} refused, slowest {record.slowest:.3f} s,"
        f" peak memory +{record.memory:.0f} MB"
    )
    assert 0 < record.refused < record.inputs
    return record


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _of_hypothesis(count: int) -> list[bytes]:
    """Raw bytes, and texts of JSON values, half of each."""
    found: list[bytes] = []
    values = _VALUES.map(lambda value: json.dumps(value).encode())
    for strategy in (st.binary(max_size=64), values):

        @hypothesis.settings(
            max_examples=max(count // 2, 1),
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(content=strategy)
        def keep(content: bytes) -> None:
            found.append(content)

        keep()
    return found


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A good file with one to three things changed; of JSON often a value."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = _changed_value(content, rng) if rng.random() < 0.5 else _changed(content, rng)
    return content


def _changed(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content or b"\0")
    # Headers are at the beginning.
    start = rng.randrange(min(len(data), 4096) if rng.random() < 0.7 else len(data))
    stop = min(start + rng.choice((1, 2, 4, 8, 16, 64, 512)), len(data))
    other = rng.randrange(len(data))
    kind = rng.randrange(7)
    if kind == 0:
        data[start] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[start:]
    elif kind == 2:
        del data[start:stop]
    elif kind == 3:  # doubled, elsewhere
        data[other:other] = data[start:stop]
    elif kind == 4:  # over another
        data[other : other + stop - start] = data[start:stop]
    elif kind == 5:
        data[start:stop] = bytes([rng.choice((0, 0xFF, 0x80, 0x5B))]) * (stop - start)
    else:
        numbers = list(re.finditer(rb"\d+", data))
        if numbers:
            found = rng.choice(numbers)
            data[found.start() : found.end()] = json.dumps(rng.choice(_NUMBERS)).encode()
    return bytes(data)


def _changed_value(content: bytes, rng: random.Random) -> bytes:
    """A JSON text with a value, or a key, in the place of another; of other files as `_changed`."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _changed(content, rng)
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict | list):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            places += [(node, key) for key in keys]
            stack += [node[key] for key in keys]
    if not places:
        return json.dumps(rng.choice(_NUMBERS)).encode()
    node, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[rng.choice(_TEXTS)] = node.pop(key)
    elif kind == 2:
        other, there = rng.choice(places)
        node[key] = json.loads(json.dumps(other[there])) if there in _keys(other) else None
    else:
        options = (rng.choice(_NUMBERS), rng.choice(_TEXTS), None, True, [], {}, [[[]]], ["a"])
        node[key] = rng.choice(options)
    return json.dumps(value).encode()


def _keys(node: Any) -> Any:
    return node if isinstance(node, dict) else range(len(node))
