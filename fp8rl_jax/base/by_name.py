"""Chooses functions by text: NAME, NAME(arguments), several with commas, or 'module:function'."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fp8rl_jax.base import user_code
from fp8rl_jax.base.bounds import takes_auto
from fp8rl_jax.base.errors import UserError


def choose(
    text: str, factories: Mapping[str, Callable], what: str, *, most: int = 0, **defaults: Any
) -> list[tuple[str, Any]]:
    """Parses `text` into pairs (name, result of the name's factory), in the order of the text.

    Args:
      text: such as ``tis``, ``tis(cap=2.0)``, ``mask_geometric(0.999, 1.001), tis``, or
        ``my_module:my_function``, which is returned unchanged. Arguments are numbers, or `auto`
        where a factory's parameter takes it.
      factories: functions by name.
      what: beginning of error messages, such as 'algo.loss'.
      most: largest number of names; 0 for any number.
      **defaults: arguments for factories with a parameter of that name, unless the text has them.

    Raises:
      UserError: there are no names or too many, one is unknown, or its arguments do not fit.
    """
    if ":" in text and "(" not in text:
        return [(text.strip(), user_code.load(text.strip(), f"{what}:"))]
    known = ", ".join(factories)
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # deep nesting raises the last two
        raise UserError(
            f"{what} is {text!r}, which is not understood: write one of {known}, with arguments "
            "in parentheses if any, or 'module:function'"
        ) from None
    nodes = body.elts if isinstance(body, ast.Tuple) else [body]
    if not nodes or (most and len(nodes) > most):
        count = f"{most} of" if most else "one or several of"
        raise UserError(f"{what} is {text!r}, which names {len(nodes)}: write {count} {known}")
    return [_call(node, text, factories, what, known, defaults) for node in nodes]


def _value(node: ast.expr) -> Any:
    is_auto = isinstance(node, ast.Name) and node.id == "auto"
    return "auto" if is_auto else ast.literal_eval(node)


def _call(node: ast.expr, text: str, factories, what: str, known: str, defaults: dict):
    function = node.func if isinstance(node, ast.Call) else node
    name = (
        function.id
        if isinstance(function, ast.Name)
        else ast.get_source_segment(text.strip(), function)
    )
    if name not in factories:
        raise UserError(f"{what} is {text!r}; {name!r} is unknown: write one of {known}")
    signature = inspect.signature(factories[name])
    usage = (
        f"{name}("
        + ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        + ")"
    )
    try:
        arguments = [_value(x) for x in getattr(node, "args", [])]
        named = {str(k.arg): _value(k.value) for k in getattr(node, "keywords", [])}
        if len(named) < len(getattr(node, "keywords", [])):
            raise TypeError("an argument is there twice")
        given = signature.bind_partial(*arguments, **named).arguments
    except RecursionError:
        raise UserError(f"{what} is {text!r}: arguments are numbers; write {usage}") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} is {text!r}: {error}; write {usage}") from None
    if not all(
        type(value) in (int, float) or (value == "auto" and takes_auto(signature.parameters[name]))
        for name, value in given.items()
    ):
        raise UserError(f"{what} is {text!r}: arguments are numbers; write {usage}")
    filled = {k: v for k, v in defaults.items() if k in signature.parameters}
    try:
        return name, factories[name](**{**filled, **given})
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} is {text!r}: {error}") from None
