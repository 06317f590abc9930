"""Calls a reward or its `extract`; returns the value, or how the call failed.

This module runs in the run's process and in workers, so it imports neither JAX nor numpy.
"""

from __future__ import annotations

import inspect
import operator
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

BEYOND_FLOAT32 = "beyond float32's range"
_LONGEST_TEXT = 300
_LONGEST_TRACEBACK = 6000  # characters


class Failure(NamedTuple):
    """The failure of a call.

    Attributes:
      kind: name of the exception's type, 'time limit', or how the process ended.
      text: a line that says what happened.
      place: 'FILE, line N, in NAME' in the user's code; '' if unknown.
      traceback: traceback of the user's code, in several lines.
    """

    kind: str
    text: str
    place: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


def attempt(function: Callable, arguments: tuple, named: dict[str, Any], file: str) -> Any:
    """Calls a user's function. Returns its result, or a Failure for any exception, even SystemExit.

    Args:
      function: the user's function.
      arguments, named: positional and named arguments of the call.
      file: file of the user's code, for `Failure.place`.
    """
    try:
        return function(*arguments, **named)
    except BaseException as error:  # the run continues
        return failure_of(error, file)


def failure_of(error: BaseException, file: str) -> Failure:
    """Returns the failure for an exception; its caller must be what called the user's code."""
    of_user = error.__traceback__ and error.__traceback__.tb_next
    frames = traceback.extract_tb(of_user)
    of_file = [frame for frame in frames if frame.filename == file] or frames
    place = (
        f"{of_file[-1].filename}, line {of_file[-1].lineno}, in {of_file[-1].name}"
        if of_file
        else ""
    )
    lines = traceback.format_exception(type(error), error, of_user)
    last = traceback.format_exception_only(type(error), error)[-1]
    return Failure(
        type(error).__name__,
        _printable(" ".join(last.split())[:_LONGEST_TEXT]),
        place,
        _printable("".join(lines)[-_LONGEST_TRACEBACK:]),
    )


def _printable(text: str) -> str:
    """Escapes control characters, since an exception may quote a response."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def definition(function: Any) -> str:
    """Returns a function's definition as 'FILE, line N, in NAME'; '' if not written in Python."""
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):  # a callable object
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}, in {code.co_name}" if code else ""


def as_number(value: Any) -> float | Failure:
    """Converts a reward's result to a float, perhaps not finite. Texts and complex numbers, which
    float() would accept in part, are a Failure."""
    try:
        if isinstance(value, (str, complex)) or not hasattr(type(value), "__float__"):
            value = operator.index(value)  # an integer class without __float__
        elif dtype := getattr(value, "dtype", None):  # of numpy, JAX or torch
            if getattr(dtype, "kind", "f") in "SUO":
                return as_number(value.item())
            if "complex" in str(dtype):
                raise TypeError
        return float(value)
    except OverflowError:  # of an int
        return Failure(BEYOND_FLOAT32, f"it returned a number {BEYOND_FLOAT32}")
    except BaseException:  # a user's class may raise anything
        return Failure(
            "no number", f"it returned a value of type {type(value).__name__}, which is no number"
        )
