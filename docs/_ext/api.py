"""Markdown of a package's or module's public names, for autodoc.

A package is documented by what its `__init__` imports from this library (or by `__all__`), a module
by the classes and functions that it defines.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
import tokenize
from typing import Any

from fields import plain, row

PACKAGE = "fp8rl_jax"


def public_names(name: str) -> list[str]:
    """Names that a package or module offers, in the order of its source."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return list(module.__all__)
    tree = ast.parse(inspect.getsource(module))
    if hasattr(module, "__path__"):
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        imported = [alias for node in imports for alias in _own(node)]
        names = [alias.asname or alias.name for alias in imported]
    else:
        kinds = (ast.FunctionDef, ast.ClassDef)
        names = [node.name for node in tree.body if isinstance(node, kinds)]
    return [x for x in names if not x.startswith("_") and not inspect.ismodule(getattr(module, x))]


def _own(node: ast.ImportFrom) -> list[ast.alias]:
    return node.names if (node.module or "").startswith(PACKAGE) else []


def is_constant(value: Any) -> bool:
    """Whether a public value is neither a class nor a function: its meaning is a comment."""
    return not (inspect.isclass(value) or hasattr(value, "__wrapped__") or inspect.isroutine(value))


def comment(package: str, name: str) -> str:
    """The comment beside or above the definition of a constant, '' without one."""
    path = _definition(package, name)
    with tokenize.open(path) as file:
        lines = file.read().splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(rf"{name}\b.*=", line))
    beside = re.search(r"  # (.*)$", lines[start])
    if beside:
        return beside[1]
    above: list[str] = []
    while start and lines[start - 1].startswith("# "):
        start -= 1
        above.insert(0, lines[start][2:])
    return " ".join(above)


def _definition(package: str, name: str) -> pathlib.Path:
    """The file that defines a constant, found through the imports of packages."""
    module = importlib.import_module(package)
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and any(name == alias.name for alias in _own(node)):
            return _definition(str(node.module), name)
    return pathlib.Path(str(module.__file__))


def package_page(name: str) -> str:
    """The package's own text, a table of its names, and an entry for each."""
    module = importlib.import_module(name)
    names = sorted(public_names(name), key=str.casefold)
    constants = [x for x in names if is_constant(getattr(module, x))]
    others = [x for x in names if x not in constants]
    lines = ["```{eval-rst}", f".. automodule:: {name}", f".. currentmodule:: {name}", "```", ""]
    lines += [row("name", "summary"), row("---", "---")]
    for x in others:
        summary = plain((inspect.getdoc(getattr(module, x)) or "").split("\n\n")[0])
        lines.append(row(f"[`{x}`](#{name}.{x})", " ".join(summary.split())))
    lines += [row(f"`{x}`", plain(comment(name, x))) for x in constants]
    lines += ["", "```{eval-rst}"]
    for x in others:
        kind = "autoclass" if inspect.isclass(getattr(module, x)) else "autofunction"
        lines += [f".. {kind}:: {name}.{x}"] + ["   :members:"] * (kind == "autoclass") + [""]
    return "\n".join([*lines, "```", ""])
