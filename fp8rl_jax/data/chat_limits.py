"""Jinja's sandbox with limits: a template that comes with a model ends soon and stays small.

The sandbox keeps a template from the file system and from Python; it bounds neither time nor
memory. Nested loops, a macro that calls itself twice, huge powers and text that doubles run for
hours or fill the machine. So loops and macros are counted, and arithmetic and joined
texts are bounded.

Not done: one call that makes a long text of a short one (`center`, `indent`, `replace`) takes what
it takes; the sandbox bounds `range`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

_MOST_TURNS = 1_000_000  # of loops and macros in one rendering
_LONGEST = 2**24  # characters of a text, elements of a list
_LARGEST_POWER = 4096  # bits
_WIDTH = re.compile(r"\d{5}|\*")  # in a format for %


class TooMuch(Exception):
    """A template exceeds a limit."""


class Limits(jinja2.ext.Extension):
    """Counts turns, and joins texts, on behalf of a template."""

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1
        if self.turns > _MOST_TURNS:
            raise TooMuch(f"its loops have more than {_MOST_TURNS:,} turns")

    def join(self, *parts: Any) -> str:
        return join(map(str, parts))


def join(parts: Iterable[str]) -> str:
    """The parts as one text."""
    found = list(parts)
    if sum(map(len, found)) > _LONGEST:
        raise TooMuch(f"it makes a text of more than {_LONGEST:,} characters")
    return "".join(found)


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose templates come from `limited_template`."""

    # Not computed while a template is compiled, either.
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(join)  # type: ignore[assignment]

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.add_extension(Limits)
        limits = self.extensions[Limits.identifier]
        assert isinstance(limits, Limits)
        self.limits = limits
        del self.globals["lipsum"]  # makes as much text as it is asked for

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) if isinstance(x, str | list | tuple) else 0 for x in (left, right)]
        if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise TooMuch("it fills a text up to a large width")
        if operator == "+" and sum(sizes) > _LONGEST:
            raise TooMuch(f"it makes a value of more than {_LONGEST:,} parts")
        if operator == "*" and any(sizes):
            times = [x for x in (left, right) if isinstance(x, int)]
            if times and max(sizes) * times[0] > _LONGEST:
                raise TooMuch(f"it makes a value of more than {_LONGEST:,} parts")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if (left.bit_length() * abs(right) if operator == "**" else bits) > _LARGEST_POWER:
                raise TooMuch("it makes a number that is too large")
        return super().call_binop(context, operator, left, right)

    def limited_template(self, source: str) -> jinja2.Template:
        """A template whose loops and macros are counted, and whose `~` is `join`."""
        tree = self.parse(source)
        nodes = jinja2.nodes
        for node in tree.find_all(nodes.Node):
            if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
                count = self.limits.call_method("turn", lineno=node.lineno)
                node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        _replace_joins(tree, self.limits)
        tree.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))


def _replace_joins(node: jinja2.nodes.Node, limits: jinja2.ext.Extension) -> None:
    """`a ~ b` anywhere below a node -> `limits.join(a, b)`."""
    for name, value in node.iter_fields():
        values = value if isinstance(value, list) else [value]
        for i, child in enumerate(values):
            if not isinstance(child, jinja2.nodes.Node):
                continue
            _replace_joins(child, limits)
            if isinstance(child, jinja2.nodes.Concat):
                values[i] = limits.call_method("join", child.nodes, lineno=child.lineno)
        if not isinstance(value, list):
            setattr(node, name, values[0])
