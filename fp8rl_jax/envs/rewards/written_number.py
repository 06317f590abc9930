r"""Reads numbers as people and policies write them: 1,072, -₹72, 2 1/2, 1e5, 10^{3}, \frac12, 50%.

The number may have a name, be the value of an equation (`answer_form.sides`), and be followed by a
unit. Unfinished calculations are not numbers: a quotient that is an integer (8/2), a sum, a product
other than with a power of ten. Numbers are exact fractions. The time is linear in a text's length.
"""

from __future__ import annotations

import fractions
import re
import unicodedata
from typing import NamedTuple

from fp8rl_jax.envs.rewards.answer_form import WRAPPED, sides

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
    ("°", (r"^\circ", r"^{\circ}")),
    ("", (r"\left", r"\right")),
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,9}")
_ARGUMENT = r"\s*(?:\{\s*([-+]?[\d.,]{1,120})\s*\}|(\d))"
_FRACTION = re.compile(rf"(?:(\d)\s*)?\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}")
_REPEATING = re.compile(r"(\d{1,15})\.(\d{0,15})\\(?:overline|bar|dot)\s*(?:\{(\d{1,15})\}|(\d))")
_THIN_GROUP = re.compile("(?<=\\d)[\xa0\u202f\u2009](?=\\d{3}(?!\\d))")
_SPACE_GROUPS = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d/ ])")
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
_EXPONENT = re.compile(r"(?:\^[{(]?|[\w)}]\*\*)\Z")
# What may stand before and after the number in an answer that is one number.
_NAMED = re.compile(
    r"(?:[A-Za-z][A-Za-z' ]{0,60}(?::|\b(?:is|are|equals)\b:?)\s*)?"
    r"(?:(?:about|approximately|exactly)\s+)?"
)
_OUTSIDE = re.compile(r"^(?:\\[(\[]|[*_`\"“”\s{(])+|(?:\\[)\]]|[*_`\"“”\s})])+$")
_AROUND = ' \t\n*_`"“”'
_PAIR = re.compile(r"\s*\\?\(.*,.*\\?\)\s*")
_NO_MARK = r"[^\d=+*<>?!^\\|&@#\[\]{}₀-₉∞‰α-ωΑ-Ω]*"
_UNIT = re.compile(rf"{_NO_MARK}(?:(?<=[A-Za-z])\^\{{?[23]\}}?{_NO_MARK})?")
_MOST_WORDS = 5  # of a unit
# What continues the number and is no unit: a scale, an operation, or a variable, as in 5x.
_SCALE = (
    r"(?:(?i:(?:hundred|quadrillion|milliard|mille|mio|bn|tn|lakh|crore|dozen|gross|score)"
    r"(?:s|en|es)?\b|mil\b|millones\b|millionen\b|[万萬亿億千百十]|тысяч|миллион|миллиард|हज़ार|लाख|करोड़))"
)
_SCALED = re.compile(rf"\s*{_SCALE}|[kK]\b")
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWER_WORD = re.compile(rf"[\s~]*({'|'.join(_POWERS)})s?\b", re.IGNORECASE)
# Capital letters are units behind a space: 100 N, but 5N is a product.
_NO_UNIT = re.compile(
    rf"\s*(?:[-/:]|{_SCALE}|(?:[a-fijknopqrt-zBDEGHIMO-SUX-Z]|pi|sqrt|sin|cos|tan|log|ln|exp|mod|half|"
    r"halves|thirds?|quarters?|\w+ths|percentage|bps|per mille|squared|cubed|factorial)\b)"
    r"|[kAJKNTVW]\b"
)
_GOES_ON = re.compile(
    r"\b(?:is|are|was|not|no|or|and|to|plus|minus|times|over|more|less|than|out|divided|multiplied|"
    r"wait|wrong|but|below|above|fewer|und|et|y|oder|ou|o)\b",
    re.IGNORECASE,
)


# Units of one kind and different sizes: (unit, its spellings in the singular).
_UNITS = {
    spelling: unit
    for unit, spellings in (
        ("mm", "mm millimeter millimetre"),
        ("cm", "cm centimeter centimetre"),
        ("m", "m meter metre"),
        ("km", "km kilometer kilometre"),
        ("in", "in inch inche"),
        ("ft", "ft foot feet"),
        ("yd", "yd yard"),
        ("mi", "mi mile"),
        ("mg", "mg milligram"),
        ("g", "g gram"),
        ("kg", "kg kilogram"),
        ("oz", "oz ounce"),
        ("lb", "lb pound"),
        ("ml", "ml milliliter millilitre"),
        ("l", "l liter litre"),
        ("s", "s sec second"),
        ("min", "min minute"),
        ("h", "h hr hour"),
        ("d", "d day"),
        ("week", "week"),
        ("month", "month"),
        ("year", "yr year"),
        ("cent", "cent ¢"),
        ("dollar", "dollar $ usd"),
    )
    for spelling in spellings.split()
}


class Number(NamedTuple):
    """A number as it is written: 50% has the value 50 and is a percentage; the unit is one of those
    that have another size beside them (cm and m), or ''."""

    value: fractions.Fraction
    percent: bool = False
    unit: str = ""

    @property
    def plain(self) -> fractions.Fraction:
        """The value without a percent sign: 1/2 for 50%."""
        return self.value / 100 if self.percent else self.value

    def equals(self, other: Number) -> bool:
        """Returns whether both are equal, or `other` is this one's first 6 or more decimals; as for
        math-verify, 50% equals 0.5 and 50."""
        if self.value == other.value or self._begins_with(other):
            return True
        return self.percent != other.percent and self.plain == other.plain

    def _begins_with(self, other: Number) -> bool:
        """Returns whether this is a repeating decimal, and `other` its first 6 or more decimals."""
        repeats = 10**40 % self.value.denominator > 0
        digits = next((k for k in range(6, 40) if 10**k % other.value.denominator == 0), 0)
        near = abs(self.value - other.value) * 10**digits <= 1
        return repeats and other.value.denominator >= 10**5 and digits > 0 and near


def whole_number(text: str, right: bool = False) -> Number | None:
    """Returns the number that a text is; None for a list, a calculation, or other text.

    Beside the number the text may hold a name, a sign, a currency, a unit and punctuation: 'x =
    72', 'The answer is $72.', '72 km/h'. An equation is its value, 72 of '6 * 12 = 72'; `right` is
    as for `sides`.
    """
    if len(text) > _LONGEST:
        return None
    if (number := _alone(text)) is not None:
        return number
    text = text.replace("$", " ").strip(_AROUND).lstrip("= ")
    equation = sides(text, lambda side: _alone(side) is not None, right)
    return _alone(equation.value if equation else text)


def _alone(text: str) -> Number | None:
    """Returns the number of a text that is no equation."""
    currency = r"\$" in text or text.count("$") == 1
    text = plain(WRAPPED.sub(_unwrapped, text))
    text = _SPACE_GROUPS.sub(lambda m: m[0].replace(" ", ""), text)
    if _PAIR.fullmatch(text):
        return None
    text = _OUTSIDE.sub("", _OUTSIDE.sub("", text).lstrip("$"))
    named = _NAMED.match(text)
    text = _OUTSIDE.sub("", text[named.end() if named else 0 :])
    match = _NUMBER.match(_SIGN_APART.sub(r"\1\2", text))
    if not match:
        return None
    rest = match.string[match.end() :]
    power = _POWER_WORD.match(rest)
    rest = rest[power.end() :] if power else rest
    percent = bool(re.match(r"\s*(?:%|percent\b)", rest))
    if not _UNIT.fullmatch(rest) or _NO_UNIT.match(rest) or _GOES_ON.search(rest):
        return None
    value = _value(match)
    if value is None or len(rest.split()) > _MOST_WORDS:
        return None
    unit = "dollar" if currency else _unit(rest)
    return Number(value * _scale(power), percent, unit)


def _unwrapped(match: re.Match) -> str:
    inside = match[1].strip(" ~")
    return " days" if inside == "d" else f" {inside}"


def _unit(rest: str) -> str:
    word = re.sub(r"\^.*|^sq(?:uare|\.)?\s", "", rest.strip(" .~)}").casefold()).strip(" .")
    return _UNITS.get(word) or _UNITS.get(word.removesuffix("s"), "")


def _scale(power: re.Match | None) -> int:
    return 10 ** _POWERS[power[1].casefold()] if power else 1


def last_number(text: str) -> Number | None:
    """Returns the last number in a text that is no exponent; None if it holds none."""
    text = plain(text)
    last = None
    for match in _NUMBER.finditer(text):
        before = text[max(match.start() - 3, 0) : match.start()]
        if _EXPONENT.search(before) or _SCALED.match(text, match.end()):
            continue
        if (value := _value(match)) is not None:
            scale = _scale(_POWER_WORD.match(text, match.end()))
            last = Number(value * scale, text[match.end() : match.end() + 1] == "%")
    return last


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
    groups = match.groupdict()
    sign = -1 if "-" in (groups["sign"], groups["late_sign"]) else 1
    if groups["power"]:
        return sign * fractions.Fraction(10) ** int(groups["power"])
    top = re.sub("[,_'’]", "", groups["top"])
    bottom = re.sub("[,_'’]", "", groups["bottom"] or "1")
    if len(top) + len(bottom) > _MOST_DIGITS or not int(bottom):
        return None
    value = fractions.Fraction(top) / int(bottom)
    if groups["bottom"] and value.denominator == 1:
        return None
    if exponent := groups["e"] or groups["ten"]:
        value *= fractions.Fraction(10) ** int(exponent)
    if groups["part"]:
        part = int(groups["part"])
        parts = int(groups["parts"])
        if value.denominator != 1 or not 0 < part < parts:
            return None
        value += fractions.Fraction(part, parts)
    return sign * value
