r"""Reads numbers as people and policies write them: 1,072, -₹72, 2 1/2, 1e5, 10^{3}, \frac12, 50%.

Unfinished calculations are not numbers: a quotient that is an integer (8/2), a sum, a product other
than with a power of ten. Numbers are exact fractions. The time is linear in a text's length.
"""

from __future__ import annotations

import fractions
import re
import unicodedata
from typing import NamedTuple

_MOST_DIGITS = 100  # of a number; more are noise, and slow
_LONGEST = 200  # characters of a text that is nothing but a number

_VULGAR = {c: unicodedata.normalize("NFKC", c).replace("⁄", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_SPELLINGS = (  # (ASCII, other spellings), replaced in this order
    ("-", ("−", "–", "－")),
    ("", ("\u2009", "\u202f")),
    (",", ("{,}", r",\! ", r",\!")),
    ("", (r"\,", r"\!")),
    (" ", (r"\;", "\\ ", "~", "\xa0")),
    ("$", (r"\$",)),
    ("%", (r"\%",)),
    ("/", ("⁄",)),
    ("+", ("＋",)),
    (".", ("．",)),
    ("*", ("×", r"\times", r"\cdot", "·")),
    ("=", (r"\approx", "≈")),
    ("°", (r"^\circ", r"^{\circ}")),
    ("", (r"\left", r"\right")),
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,9}")
_WORDS_IN_LATEX = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]{0,80})\}")
_ARGUMENT = r"\s*(?:\{\s*([-+]?[\d.,]{1,120})\s*\}|(\d))"
_FRACTION = re.compile(rf"(?:(\d)\s*)?\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}")
_REPEATING = re.compile(r"(\d{1,15})\.(\d{0,15})\\(?:overline|bar|dot)\s*(?:\{(\d{1,15})\}|(\d))")
_THIN_GROUP = re.compile("(?<=\\d)[\xa0\u202f\u2009](?=\\d{3}(?!\\d))")
_POWER = re.compile(r"(?<!\d)10\s?(?:\^|\*\*)\s?[{(]\s?([-+]?\d{1,3})\s?[})]")
_SIGN_APART = re.compile(r"(^|[=:(]|\bis)(\s*[-+])\s+(?=[\d.$])")

# Groups of two digits are Indian. Bounded repetitions keep a search linear.
_DIGITS = r"(?:\d{1,3}(?:[,_'’]\d{3}){1,33}(?!\d)|\d{1,2}(?:,\d{2}){1,33},\d{3}(?!\d)|\d+)"
_CURRENCY = r"(?:(?:\b(?:US|CA|AU|NZ|HK|[ACRS]))?[$€£₹¥₩₽₺₱]|\b(?:Rs\.?|USD|EUR|GBP|INR|CNY))\s?"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])?(?:{_CURRENCY})?(?P<late_sign>(?<=[$€£₹¥₩₽₺₱])[-+])?(?<![A-Za-z_])"
    rf"(?:(?<!\d)10\s?(?:\^|\*\*)\s?(?P<power>[-+]?\d{{1,3}})(?!\d)"
    rf"|(?P<top>{_DIGITS}(?:\.\d+)?|(?<![\w.])\.\d+)"
    rf"(?:[eE](?P<e>[-+]?\d{{1,3}})(?!\w)"
    r"|\s?[*x]\s?10\s?(?:\^|\*\*)\s?(?P<ten>[-+]?\d{1,3})(?!\d)"
    rf"|\s?/\s?(?P<bottom>{_DIGITS})"
    r"|\s+(?:and\s+)?(?P<part>\d{1,9})\s?/\s?(?P<parts>\d{1,9})(?![\d/]))?)"
)
# What may stand before and after the number in an answer that is one number.
_NAMED = re.compile(
    r"(?:(?:(?P<name>[^=,;]{0,80})=|[A-Za-z][A-Za-z' ]{0,60}(?::|\b(?:is|are|equals)\b:?))\s*)?"
    r"(?:(?:about|approximately|exactly)\s+)?"
)
_NAME = re.compile(
    r"\s*(?:\\?[A-Za-z]+(?:_\{?\w{1,9}\}?)?(?:\([A-Za-z]\))?|[A-Za-z][A-Za-z' ]*"
    r"|[\d\s+\-*/().,$%^]*)\s*"
)
_OUTSIDE = re.compile(r"^(?:\\[(\[]|[*_`\"“”\s{(])+|(?:\\[)\]]|[*_`\"“”\s})])+$")
_PAIR = re.compile(r"\s*\\?\(.*,.*\\?\)\s*")
_NO_MARK = r"[^\d=+*<>?!^\\|&@#\[\]{}₀-₉∞‰α-ωΑ-Ω]*"
_UNIT = re.compile(rf"{_NO_MARK}(?:(?<=[A-Za-z])\^\{{?[23]\}}?{_NO_MARK})?")
_MOST_WORDS = 5  # of a unit
# What continues the number and is no unit: a scale, an operation, or a variable, as in 5x.
_SCALE = (
    r"(?i:(?:k|hundred|thousand|million|billion|trillion|quadrillion|milliard|mill?ion|mille|mil|mio|"
    r"bn|tn|lakh|crore|dozen|gross|score)(?:s|en|es)?\b|millones\b|[万萬亿億千百十]|тысяч|миллион|миллиард|हज़ार|"
    r"लाख|करोड़)"
)
_SCALED = re.compile(rf"\s*{_SCALE}")
_NO_UNIT = re.compile(
    rf"\s*(?:[-/:]|{_SCALE}|(?:[abdeijknp-rt-zABDEG-KM-Z]|pi|sqrt|sin|cos|tan|log|ln|exp|mod|half|"
    r"halves|thirds?|quarters?|\w+ths|percentage|bps|per mille|squared|cubed|factorial)\b)"
)
_GOES_ON = re.compile(
    r"\b(?:is|are|was|not|no|or|and|to|plus|minus|times|over|more|less|than|out|divided|multiplied|"
    r"wait|wrong|but|below|above|fewer|und|et|y|oder|ou|o)\b",
    re.IGNORECASE,
)


class Number(NamedTuple):
    """A number as it is written: 50% has the value 50 and is a percentage."""

    value: fractions.Fraction
    percent: bool = False

    @property
    def plain(self) -> fractions.Fraction:
        """The value without a percent sign: 1/2 for 50%."""
        return self.value / 100 if self.percent else self.value

    def equals(self, other: Number) -> bool:
        """Returns whether both are equal; as for math-verify, 50% equals 0.5 and 50."""
        if self.value == other.value:
            return True
        return self.percent != other.percent and self.plain == other.plain

    def is_about(self, other: Number) -> bool:
        """Returns whether this is a repeating decimal, and `other` its first 6 or more decimals."""
        rest = self.value.denominator
        for factor in (2, 5):
            while rest % factor == 0:
                rest //= factor
        digits = next((k for k in range(6, 40) if 10**k % other.value.denominator == 0), 0)
        near = abs(self.value - other.value) * 10**digits <= 1
        return rest > 1 and other.value.denominator >= 10**5 and digits > 0 and near


def whole_number(text: str) -> Number | None:
    """Returns the number of a text that holds nothing else but a name, a sign, a currency, a unit
    and punctuation ('x = 72', 'The answer is $72.', '72 km/h'); None for any other text, such as a
    list, a calculation, or a sentence with several numbers."""
    if len(text) > _LONGEST:
        return None
    text = plain(_WORDS_IN_LATEX.sub(r" \1", text))
    if _PAIR.fullmatch(text):
        return None
    text = _OUTSIDE.sub("", _OUTSIDE.sub("", text).lstrip("$"))
    named = _NAMED.match(text)
    if named is None or not _NAME.fullmatch(named["name"] or ""):
        return None
    text = _OUTSIDE.sub("", text[named.end() :])
    match = _NUMBER.match(_SIGN_APART.sub(r"\1\2", text))
    if not match:
        return None
    rest = match.string[match.end() :]
    percent = bool(re.match(r"\s*(?:%|percent\b)", rest))
    if not _UNIT.fullmatch(rest) or _NO_UNIT.match(rest) or _GOES_ON.search(rest):
        return None
    value = _value(match)
    if value is None or len(rest.split()) > _MOST_WORDS:
        return None
    return Number(value, percent)


def last_number(text: str) -> Number | None:
    """Returns the last number in a text; None if it holds none."""
    text, found = plain(text), None
    for match in _NUMBER.finditer(text):
        scaled = _SCALED.match(text, match.end())
        if not scaled and (value := _value(match)) is not None:
            found = Number(value, text[match.end() : match.end() + 1] == "%")
    return found


def plain(text: str) -> str:
    """Rewrites LaTeX's and Unicode's signs, spaces, powers and fractions in ASCII."""
    text = in_ascii(_THIN_GROUP.sub("", text))
    for ascii_, spellings in _SPELLINGS:
        for written in spellings:
            text = text.replace(written, ascii_)
    text = _FRACTION.sub(_fraction, text)
    text = _POWER.sub(r"10^\1", text)
    return _SIGN_APART.sub(r"\1\2", text)


def in_ascii(text: str) -> str:
    r"""Rewrites ½ as 1/2, 5² as 5^{2} and 0.1\overline{6} as 1/6."""
    for written, fraction in _VULGAR.items():
        if written in text:
            text = re.sub(rf"(?<=\d)\s*{written}", f" {fraction}", text)
            text = text.replace(written, fraction)
    text = _SUPERSCRIPT.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    return _REPEATING.sub(_repeating, text)


def _repeating(match: re.Match) -> str:
    whole, before, group, digit = match.groups()
    again = group or digit
    value = int(whole) + fractions.Fraction(
        int(before + again) - int(before or 0), 10 ** len(before) * (10 ** len(again) - 1)
    )
    return str(value)


def _fraction(match: re.Match) -> str:
    digit, top, top_digit, bottom, bottom_digit = match.groups()
    space = f"{digit} " if digit else ""
    return f"{space}{top or top_digit}/{bottom or bottom_digit}"


def _value(match: re.Match) -> fractions.Fraction | None:
    """Returns the value of a match of _NUMBER; None for an unfinished division or a huge number."""
    found = match.groupdict()
    sign = -1 if "-" in (found["sign"], found["late_sign"]) else 1
    if found["power"]:
        return sign * fractions.Fraction(10) ** int(found["power"])
    top = re.sub("[,_'’]", "", found["top"])
    bottom = re.sub("[,_'’]", "", found["bottom"] or "1")
    if len(top) + len(bottom) > _MOST_DIGITS or not int(bottom):
        return None
    value = fractions.Fraction(top) / int(bottom)
    if found["bottom"] and value.denominator == 1:
        return None
    if exponent := found["e"] or found["ten"]:
        value *= fractions.Fraction(10) ** int(exponent)
    if found["part"]:
        part, parts = int(found["part"]), int(found["parts"])
        if value.denominator != 1 or not 0 < part < parts:
            return None
        value += fractions.Fraction(part, parts)
    return sign * value
