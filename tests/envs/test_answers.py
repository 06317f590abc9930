"""Answers of every type as text."""

from __future__ import annotations

import decimal
import fractions
import json

import numpy as np
import pytest

from fp8rl_jax.envs.answers import answer_text


@pytest.mark.parametrize(
    ("json_text", "expected"),
    [
        ("42.0", "42"),
        ("1e2", "100"),
        ("42", "42"),
        ("-0.0", "0"),
        ("1e23", "1" + "0" * 23),
        ("0.1", "0.1"),
        ("-2.50", "-2.5"),
        ("1e-7", "1e-07"),
        ("NaN", ""),
        ("-Infinity", ""),
        ("1e400", ""),
        ("1" + "0" * 400, "1" + "0" * 400),
        ("true", "True"),
        ('"42.0"', "42.0"),
        ("[42.0]", "42"),
        ('["a"]', "a"),
        ("[[5]]", "[[5]]"),
        ("[null, 5]", "[null, 5]"),
        ("[false]", "False"),
        ('{"a": 0}', '{"a": 0}'),
        ("[2.0, 4.5]", "[2, 4.5]"),
        ("[[1.0, 2]]", "[[1, 2]]"),
        ('{"a": 1.0}', '{"a": 1}'),
        ('["a", "b"]', '["a", "b"]'),
    ],
)
def test_of_json(json_text, expected):
    """Whole floats are integers, what is not finite is no answer, a list of one is its value."""
    assert answer_text(json.loads(json_text)) == expected


@pytest.mark.parametrize(
    "json_text",
    [
        "[]",
        "{}",
        "[null]",
        "[[]]",
        "[{}]",
        '[""]',
        '["", " "]',
        '{"a": null, "b": []}',
        "[NaN, null]",
    ],
)
def test_of_nothing(json_text):
    """What holds no value is no answer, at any depth."""
    assert answer_text(json.loads(json_text)).strip() == ""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.1), "0.1"),
        (np.float32(3), "3"),
        (np.float16(0.1), "0.1"),
        (np.float64(1e6), "1000000"),
        (np.int64(7), "7"),
        (np.float32("nan"), ""),
        (decimal.Decimal("42.00"), "42"),
        (decimal.Decimal("0.10"), "0.1"),
        (decimal.Decimal("-0.00"), "0"),
        (decimal.Decimal("NaN"), ""),
        (
            decimal.Decimal("12345678901234567890123456789012345678.50"),
            "12345678901234567890123456789012345678.5",
        ),
        (decimal.Decimal("1E+999999999"), "1E+999999999"),
        (fractions.Fraction(1, 2), "1/2"),
        (fractions.Fraction(4, 2), "2"),
        (1 + 2j, "(1+2j)"),
    ],
)
def test_of_other_types(value, expected):
    assert answer_text(value) == expected
