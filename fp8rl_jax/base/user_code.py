"""Imports and calls functions that a configuration names as 'package.module:function'."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from fp8rl_jax.base.errors import UserError, raised


def load(text: str, what: str, form: str = "") -> Callable:
    """Imports the function that `text` names, as `find`.

    Args:
      text, what: as for `find`.
      form: ending of the error for what is no function: ' that ...'.

    Raises:
      UserError: it cannot be imported, or is no function.
    """
    function = find(text, what)
    if not callable(function):
        raise UserError(f"{what} {text!r} is not a function; name one{form}")
    return function


def find(text: str, what: str) -> Any:
    """Imports what `text` names; modules may also be in the current directory.

    Args:
      text: 'package.module:name'.
      what: beginning of error messages, such as 'scaling policy'.

    Raises:
      UserError: it cannot be imported, whatever the user's module raises.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise UserError(f"{what} {text!r}: write 'package.module:function'")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(
            f"{what} {text!r} cannot be imported ({raised(error)}); check that it "
            "is written 'package.module:function' and that the module is in the current "
            "directory or on PYTHONPATH"
        ) from None


def call(text: str, what: str, returns: type) -> Any:
    """Calls the function that `text` names without arguments; returns its result.

    Raises:
      UserError: the function cannot be imported, fails, or returns another type than `returns`.
    """
    wanted = f"{returns.__module__.rpartition('.')[0]}.{returns.__name__}"
    form = f"takes no argument and returns a {wanted}"
    function = load(text, what, f" that {form}")
    try:
        value = function()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(f"{what} {text!r} fails with {raised(error)}; it {form}") from None
    if not isinstance(value, returns):
        raise UserError(f"{what} {text!r} returned {type(value).__name__}; it {form}")
    return value
