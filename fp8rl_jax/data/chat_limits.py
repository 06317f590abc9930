"""Jinja's sandbox with limits on the time and memory of a template that comes with a model.

Jinja's sandbox protects the file system and Python, but neither time nor memory: a template of a
few characters can run for hours or fill the memory (nested loops, a macro that calls itself twice,
huge powers, text that doubles, nested lists, `center`, `slice`, `replace`, `format` with a width).
Three limits work together:

size
    Every value that an operator, a filter, a method, a slice or a literal makes has at most
    `_LONGEST` characters and elements, shared parts counted each time, and `_DEEPEST` levels. So
    the input of each operation is bounded.
reach
    The result of an operation is bounded before it runs, by the product of the sizes of its inputs
    (the value, for an integer). Filters of more than linear time take short texts only (`_SLOW`).
work
    Loops, calls and results are counted, up to `_MOST_WORK` for a rendering, which bounds its
    memory; the thread's computing time is limited to `_MOST_SECONDS`.

`random` and `lipsum` are removed: the same conversation always gives the same text.
"""

from __future__ import annotations

import collections
import functools
import re
import string
import time
from collections.abc import Callable, Iterable, Mapping, MappingView, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

_LONGEST_SOURCE = 2**17  # characters; published templates have up to 40 thousand
_LONGEST = 2**22  # characters; an element counts as _ELEMENT
_ELEMENT = 64  # bytes of an element of a container
_DEEPEST = 64  # levels of lists
_MOST_REACH = 2**26
_MOST_WORK = 2**25
_TURN = 64  # work of an iteration or a call
_WRITTEN = 8  # work of writing a reference
_READ = 16  # characters read per unit of work
_LOOK = 1024  # units of work between two reads of the clock
_MOST_SECONDS = 3.0  # computing time of this thread
_LARGEST_NUMBER = 4096  # bits
_WIDEST = 10_000
_WIDTH = re.compile(r"\d+|\*")  # in a format for %
_SLOW = {"pprint", "striptags", "sum", "title", "urlize", "wordwrap"}
_SLOW_LONGEST = 2**16
# Filters that treat a text as the list of its letters.
_OF_ELEMENTS = re.compile(
    "batch|dictsort|groupby|join|list|map|max|min|reject(attr)?|select(attr)?|slice|sort|unique"
)
# The results of these are no longer than their longest input.
_IN_PROPORTION = re.compile(
    "default|d|startswith|endswith|split|partition|removeprefix|removesuffix|find|index|count|get"
)
_CODECS = re.compile(r"utf-?8|ascii|latin-?1", re.IGNORECASE)  # other codecs may take for ever
_CONTAINERS = (dict, Mapping, list, tuple, set, frozenset, collections.deque, MappingView)
_NAMESPACE = jinja2.utils.Namespace
_DATA = (str, bytes, int, float, range, *_CONTAINERS)


class TooMuch(Exception):
    """A template exceeds a limit."""


def _own_size(x: Any) -> int:
    """Returns the size of a value, without the sizes of its elements."""
    if type(x) is _NAMESPACE or isinstance(x, jinja2.Undefined):
        return _ELEMENT
    if isinstance(x, str | bytes | range):
        return len(x)
    if isinstance(x, int):
        if x.bit_length() > _LARGEST_NUMBER:
            raise TooMuch("it makes a number that is too large")
        return 0
    return _ELEMENT * len(x) if isinstance(x, _CONTAINERS) else _ELEMENT


def _new_size(x: Any) -> int:
    """Returns the memory of a new value, whose elements count as references."""
    if isinstance(x, str | bytes):
        return len(x)
    return _WRITTEN * len(x) if isinstance(x, _CONTAINERS) else 0


def _inside(x: Any) -> Any:
    """Returns the elements of a value, keys and values for a mapping; () if it has none."""
    if type(x) is _NAMESPACE:
        return x._Namespace__attrs.values()
    if isinstance(x, Mapping):
        return (*x, *x.values())
    if isinstance(x, _CONTAINERS):
        return x
    return ()


class Limits(jinja2.ext.Extension):
    """Counts the work and measures the values of one rendering, which begins with `start`."""

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.start()

    def start(self, given: Any = None) -> None:
        """Begins a rendering; measures its constant input `given` once, for all later uses."""
        self._known: dict[int, tuple[int, int]] = {}
        self._work, self._next_look = 0, 0
        self._until = time.thread_time() + _MOST_SECONDS
        self._learn(given)

    def _learn(self, value: Any) -> None:
        if isinstance(value, dict | list):
            for inner in _inside(value):
                self._learn(inner)
            self._known[id(value)] = self.measure(value)

    def measure(self, value: Any) -> tuple[int, int]:
        """Returns the size and the number of levels of a value.

        Raises:
          TooMuch: the size or the number of levels exceeds its limit.
        """
        size, levels, deepest, level = 0, 0, 0, [value]
        while level:
            inside: list[Any] = []
            for x in level:
                if type(x) is str:
                    size += len(x)
                elif id(x) in self._known:
                    known, below = self._known[id(x)]
                    size, deepest = size + known, max(deepest, levels + below)
                elif not (x is None or x is True or x is False):
                    size += _own_size(x)
                    if size <= _LONGEST:
                        inside.extend(_inside(x))
                if size > _LONGEST:
                    raise TooMuch(f"it makes a value of more than {_LONGEST:,} characters")
            levels, level = levels + 1, inside
            if max(levels, deepest) > _DEEPEST:
                raise TooMuch(f"it makes a value of more than {_DEEPEST} levels")
        return size, max(levels, deepest)

    def _counted(self, argument: Any) -> int:
        """Returns the largest factor by which an argument can multiply a result's size."""
        if isinstance(argument, int):
            return abs(argument)
        return self.measure(argument)[0]

    def spend(self, work: int) -> None:
        """Counts work.

        Raises:
          TooMuch: the work or the computing time exceeds its limit.
        """
        self._work += work
        if self._work > _MOST_WORK:
            raise TooMuch(f"it takes more than {_MOST_WORK:,} steps")
        if self._work >= self._next_look:
            self._next_look = self._work + _LOOK
            if time.thread_time() > self._until:
                raise TooMuch(f"it takes more than {_MOST_SECONDS:g} seconds")

    def turn(self, outputs: int) -> None:
        """Counts an iteration of a loop, or a call of a macro, with this many outputs."""
        self.spend(_TURN + _WRITTEN * outputs)

    def seen(self, value: Any) -> Any:
        """Counts a value that is about to be read completely; returns it."""
        self.measure(value)
        self.spend(_WRITTEN + _new_size(value) // _READ)
        return value

    def made(self, value: Any) -> Any:
        """Counts a new value; returns it."""
        self.measure(value)
        self.spend(_WRITTEN + _new_size(value))
        return value

    def join(self, *parts: Any) -> str:
        return self.concat(str(self.seen(part)) for part in parts)

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the parts to one text."""
        found, size = [], 0
        for part in parts:
            found.append(part)
            size += len(part)
            if size > _LONGEST:
                raise TooMuch(f"it makes a text of more than {_LONGEST:,} characters")
        self.spend(size)
        return "".join(found)

    def check_reach(self, name: str, value: Any, arguments: Iterable[Any]) -> None:
        """Checks a call of a filter or a method before it is made.

        Raises:
          TooMuch: the result may be too large, or take too long.
        """
        size, levels = self.measure(value)
        self.spend(_TURN + _new_size(value) // _READ)
        short = name in _SLOW or (isinstance(value, str) and _OF_ELEMENTS.fullmatch(name))
        if short and size > _SLOW_LONGEST:
            raise TooMuch(f"it gives {name} a value of more than {_SLOW_LONGEST:,} characters")
        if not _IN_PROPORTION.fullmatch(name):
            self._check_product(max(size, 1) * levels, sum(map(self._counted, arguments)))

    def _check_product(self, size: int, times: int) -> None:
        if size * max(times, 1) > _MOST_REACH:
            raise TooMuch(f"it makes a value of more than {_LONGEST:,} characters")

    def check_percent(self, text: str, arguments: Any) -> None:
        """Checks `text % arguments` as `check_reach` does."""
        self._check_widths(text, _WIDTH.findall(text), arguments)

    def check_braces(self, text: str, arguments: Any) -> None:
        """Checks `text.format(arguments)` as `check_reach` does."""
        specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(text)]
        widths = [width for spec in specs for width in re.findall(r"\d+|\{", spec)]
        self._check_widths(text, widths, arguments)

    def _check_widths(self, text: str, widths: Sequence[str], arguments: Any) -> None:
        """Checks the widths in a format: digits, or '*' or '{' if the width is an argument."""
        self.spend(_TURN)
        if any(len(w) > 4 or not w.isdecimal() for w in widths):
            raise TooMuch(f"it fills a text up to a width of {_WIDEST:,} or more")
        widest = max(map(int, widths), default=1)
        self._check_product(max(len(text), 1), max(widest, self.measure(arguments)[0]))


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose templates are made by `limited_template`.

    Args:
      filters: functions by name, added to Jinja's filters or replacing them.
      options: keyword arguments of Jinja's environment.
    """

    # Also keeps Jinja from folding these operators while it compiles.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any):
        super().__init__(**options)
        self.add_extension(Limits)
        limits = self.extensions[Limits.identifier]
        assert isinstance(limits, Limits)
        self.limits = limits
        self.concat = limits.concat  # type: ignore[misc, assignment]
        self.finalize = limits.seen  # called for every value that is written
        del self.globals["lipsum"], self.filters["random"]
        for name, function in {**self.filters, **filters}.items():
            self.filters[name] = self._limited(name, function)
        for name, function in self.tests.items():
            self.tests[name] = self._limited("", function)  # type: ignore[arg-type]

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a filter to measure input and output, or a test (`name` '') to measure input."""
        first = int(getattr(function, "jinja_pass_arg", None) is not None)  # a context precedes it

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            value, *others = args[first:]
            if not name:
                self.limits.seen(value)
                return function(*args, **kwargs)
            self.limits.check_reach(name, value, (*others, *kwargs.values()))
            if name == "format":
                self.limits.check_percent(str(value), kwargs or others)
            return self.limits.made(function(*args, **kwargs))

        return limited

    def call(__self, __context, __obj, *args: Any, **kwargs: Any) -> Any:
        # Named as in Jinja: a template's keyword argument may have any other name.
        owner, limits = getattr(__obj, "__self__", None), __self.limits
        if owner is limits:
            return __obj(*args)  # without the keyword arguments that Jinja adds
        limits.spend(_TURN)
        if isinstance(owner, _DATA):
            name = __obj.__name__
            given = [v for k, v in kwargs.items() if not k.startswith("_")]  # no _: Jinja's
            limits.check_reach(name, owner, (*args, *given))
            if name in ("encode", "decode") and not all(
                isinstance(codec, str) and _CODECS.fullmatch(codec) for codec in (*args, *given)
            ):
                raise TooMuch(f"it calls {name} with another codec than utf-8")
        return limits.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def limited(*args: Any, **kwargs: Any) -> str:
            self.limits.check_braces(value.__self__, [args, kwargs])
            return self.limits.made(wrapped(*args, **kwargs))

        return limited

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        limits, numbers = self.limits, isinstance(left, int) and isinstance(right, int)
        if operator == "%" and isinstance(left, str):
            limits.check_percent(left, right)
        elif operator == "*" and not numbers:
            if isinstance(left, int):
                limits.check_reach(operator, right, [left])
            else:
                limits.check_reach(operator, left, [right])
        elif operator in ("*", "**") and numbers:
            bits = left.bit_length() + right.bit_length()
            if (left.bit_length() * abs(right) if operator == "**" else bits) > _LARGEST_NUMBER:
                raise TooMuch("it makes a number that is too large")
        return limits.made(super().call_binop(context, operator, left, right))

    def limited_template(self, source: str) -> jinja2.Template:
        """Compiles a template whose loops, macros and values are counted, with `join` for `~`."""
        if len(source) > _LONGEST_SOURCE:
            raise TooMuch(f"it has more than {_LONGEST_SOURCE:,} characters")
        self.limits.start()
        tree = self.parse(source)
        _measure_values(tree, self.limits)
        nodes = jinja2.nodes
        for node in tree.find_all(nodes.Stmt):
            if not isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
                continue
            outputs = sum(len(output.nodes) for output in node.find_all(nodes.Output))
            count = self.limits.call_method("turn", [nodes.Const(outputs)], lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        tree.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))


def _measure_values(node: jinja2.nodes.Node, limits: Limits) -> None:
    """Wraps values below a node in calls of `limits`: `a ~ b` in `join`, literals and slices in
    `made`, and what a loop or comparison reads completely in `seen`."""
    for name, value in node.iter_fields():
        values = value if isinstance(value, list) else [value]
        for i, child in enumerate(values):
            if not isinstance(child, jinja2.nodes.Node):
                continue
            _measure_values(child, limits)
            method = _method(node, name, child)
            if method:
                parts: Any = child.nodes if isinstance(child, jinja2.nodes.Concat) else [child]
                values[i] = limits.call_method(method, parts, lineno=child.lineno)
        if not isinstance(value, list):
            setattr(node, name, values[0])


def _method(parent: jinja2.nodes.Node, name: str, child: jinja2.nodes.Node) -> str | None:
    """Returns the method of Limits that must get the value, or None if none must."""
    nodes = jinja2.nodes
    if isinstance(child, nodes.Concat):
        return "join"
    literal = isinstance(child, nodes.List | nodes.Tuple | nodes.Dict)
    if literal and getattr(child, "ctx", "load") == "load":
        return "made"
    if isinstance(child, nodes.Getitem) and isinstance(child.arg, nodes.Slice):
        return "made"
    if isinstance(parent, nodes.Compare) and name == "expr":
        [first, *others] = parent.ops
        equal = not others and first.op not in ("in", "notin")
        literal = isinstance(child, nodes.Const) or isinstance(first.expr, nodes.Const)
        return None if equal and literal else "seen"  # a literal is small, so little is read
    return "seen" if isinstance(parent, nodes.For) and name == "iter" else None
