"""One call of a reward or of its `extract`: the value that it returned, or how it failed.

Used in the run's own process and in the worker processes (`worker`), so it imports neither JAX nor
numpy.
"""

from __future__ import annotations

import inspect
import operator
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

BEYOND_FLOAT32 = "beyond float32's range"
_LONGEST_TEXT, _LONGEST_TRACEBACK = 300, 6000  # characters


class Failure(NamedTuple):
    """How a call failed.

    Attributes:
      kind: name of the exception's type; 'time limit'; of a process that ended, how it did.
      text: what happened, in one line.
      place: 'FILE, line N, in NAME' of the user's code; '' if it is not known.
      traceback: of the user's code, in several lines.
    """

    kind: str
    text: str
    place: str = ""
    traceback: str = ""


def attempt(function: Callable, arguments: tuple, named: dict[str, Any], file: str) -> Any:
    """What the function returns, or a Failure for whatever it raises, SystemExit included.

    Args:
      function: of a user.
      arguments, named: of the call.
      file: where the user's code is, for `Failure.place`.
    """
    try:
        return function(*arguments, **named)
    except BaseException as error:  # a user's function may raise anything; the run goes on
        return failure_of(error, file)


def failure_of(error: BaseException, file: str) -> Failure:
    """The failure for an exception that was caught in the function that called user code."""
    of_user = error.__traceback__ and error.__traceback__.tb_next
    frames = traceback.extract_tb(of_user)
    own = [frame for frame in frames if frame.filename == file] or frames
    place = f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}" if own else ""
    lines = traceback.format_exception(type(error), error, of_user)
    last = traceback.format_exception_only(type(error), error)[-1]
    return Failure(
        type(error).__name__,
        _printable(" ".join(last.split())[:_LONGEST_TEXT]),
        place,
        _printable("".join(lines)[-_LONGEST_TRACEBACK:]),
    )


def _printable(text: str) -> str:
    """The text without what a terminal may obey: an exception may quote a response."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def definition(function: Any) -> str:
    """'FILE, line N, in NAME' where a function is defined; '' of one that is not written in
    Python."""
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}, in {code.co_name}" if code else ""


def as_number(value: Any) -> float | Failure:
    """What a reward returned as a float, not necessarily a finite one. What float() would read as
    text is no number, nor what it would take the real part of."""
    try:
        if isinstance(value, (str, complex)) or not hasattr(type(value), "__float__"):
            value = operator.index(value)  # a whole number of another class has no __float__
        elif dtype := getattr(value, "dtype", None):  # of numpy, JAX or torch
            if getattr(dtype, "kind", "f") in "SUO":
                return as_number(value.item())
            if "complex" in str(dtype):
                raise TypeError
        return float(value)
    except OverflowError:  # of an int
        return Failure(BEYOND_FLOAT32, f"it returned a number {BEYOND_FLOAT32}")
    except BaseException:  # a user's class may raise anything
        given = type(value).__name__
        return Failure("no number", f"it returned a value of type {given}, which is no number")
