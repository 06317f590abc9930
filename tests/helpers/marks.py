"""Which cases of a test are quick: the others run with --slow. See the table in CONTRIBUTING.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest

# A case of `pytest.mark.parametrize` that is slow; several arguments are one case of several names.
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def quick_if(quick: Callable[..., bool], cases: Iterable) -> list:
    """All cases, those that are not `quick` as slow ones; a tuple is a case of several names."""
    return [
        case if quick(case) else slow(*case) if isinstance(case, tuple) else slow(case)
        for case in cases
    ]
