"""Turns answers of any type into the text that a response is compared with.

Integral floats are written without a point, since pandas turns a column of integers with a gap into
floats. Numbers that are not finite, and lists and mappings without a value, count as no answer. A
list of one value becomes that value; other lists, and mappings, become JSON.
"""

from __future__ import annotations

import decimal
import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

_MOST_DIGITS = 400  # of an integer that is written out


def has_value(value: Any) -> bool:
    """Returns whether a value is not empty. Empty values are None, blank texts, numbers that are
    not finite, and lists and mappings of empty values only."""
    try:
        if isinstance(value, Mapping):
            return any(map(has_value, value.values()))
        if isinstance(value, list | tuple):
            return any(map(has_value, value))
    except RecursionError:
        return True
    if isinstance(value, str | bytes):
        return bool(value.strip())
    if isinstance(value, numbers.Number):
        return isinstance(value, numbers.Rational) or _number_text(value) != ""
    return value is not None


def answer_text(value: Any) -> Any:
    """Writes an answer as text if it is a number, list or mapping; returns others unchanged.

    Raises:
      ValueError, RecursionError: the answer is too large, or too deeply nested, for a text.
    """
    one = value[0] if isinstance(value, list | tuple) and len(value) == 1 else None
    if isinstance(one, str | numbers.Number):
        value = one
    if isinstance(value, numbers.Number):
        return _number_text(value)
    if isinstance(value, list | tuple | Mapping):
        return text_of_json(with_integers(value)) if has_value(value) else ""
    return value


def text_of_json(value: Any) -> str:
    """Writes a value as JSON, with types that JSON lacks as texts."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _number_text(value: Any) -> str:
    if isinstance(value, decimal.Decimal):
        if not value.is_finite():
            return ""
        if abs(value.adjusted()) > _MOST_DIGITS:
            return str(value)
        text = format(value, "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return "0" if text in ("-0", "") else text
    if isinstance(value, numbers.Rational) or not isinstance(value, numbers.Real):
        return str(value)
    if not math.isfinite(value):
        return ""
    text = str(value)  # the shortest decimal of its own type
    number = decimal.Decimal(text)
    return _number_text(number) if number == number.to_integral_value() else text


def with_integers(value: Any) -> Any:
    """Copies a value of JSON, with floats that are integers as int, at any depth: 2 for 2.0."""
    if isinstance(value, Mapping):
        return {key: with_integers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_integers(part) for part in value]
    whole = isinstance(value, float) and value.is_integer()
    return int(decimal.Decimal(str(value))) if whole else value
