"""Packages import one way: kernels <- quant <- models <- rollout, learner <- programs <- cli.

Every import statement is read from the source, those inside functions included, so a forbidden
one fails here even if nothing runs it.
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest
import size

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PACKAGE = "fp8rl_jax"
_LIBRARY = {"kernels", "quant", "sharding", "models", "rl", "data", "envs", "rollout"}
_LIBRARY |= {"batch", "micro_batches", "learner"}
_PROGRAM = _LIBRARY | {"config", "plan", "report", "training", _PACKAGE}
# Package (or module beside it) -> what it may import beside `base`. `fp8rl_jax` stands for the
# package itself.
_MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "base": {"kernels", _PACKAGE},
    "quant": {"kernels"},
    "sharding": set(),
    "models": {"kernels", "quant", "sharding"},
    "rl": {"kernels"},  # sums in a fixed order
    "data": set(),
    "envs": set(),
    "rollout": {"kernels", "quant", "models", "sharding", "batch", "micro_batches"},
    "batch": {"models", "rl"},
    "micro_batches": {"models", "batch"},
    "learner": {"kernels", "quant", "models", "rl", "batch", "micro_batches"},
    "config": {"kernels", "quant", "models", "rl", "envs", "batch"},
    "report": set(),
    "plan": {"quant", "sharding", "models", "data", "rollout", "config", "batch"},
    "training": _LIBRARY | {"config", "plan", "report"},
    "policy": _PROGRAM,
    "drift": _PROGRAM | {"policy"},
    "train": _PROGRAM | {"drift"},
    "replay": _PROGRAM | {"drift", "policy", "train"},
    "bench": _PROGRAM | {"train"},
    "benchmarks": _PROGRAM | {"bench", "cli", "train"},
    "studies": _PROGRAM | {"cli", "policy", "train"},
    "api": _PROGRAM | {"drift", "policy", "train"},
    "cli": _PROGRAM | {"bench", "drift", "policy", "replay", "train"},
    "__main__": {"cli"},
    _PACKAGE: {"api", "config"},  # when a name is first used
}
# What a program asks of its surroundings, by the last name of a call or an attribute; and the files
# that may, beside the packages `base` and `cli`.
_MESH = {"get_abstract_mesh", "get_mesh", "set_mesh", "use_abstract_mesh", "use_mesh"}
_MACHINE = {"default_backend", "environ", "getenv", "jax.config"}
_MAY_ASK = {
    "fp8rl_jax.models.parallel.mesh": _MESH,  # to refuse a mesh that was not passed
    "fp8rl_jax.kernels.machine": _MACHINE,
    "fp8rl_jax.training.environment": _MACHINE,  # what a run records
    "fp8rl_jax.envs.rewards.pool": _MACHINE,  # the environment of a child
}
_USERS = {"bench", "benchmarks", "studies"}  # programs that use the library
_KERNEL_LIBRARIES = {"jax", "jaxlib", "numpy", "triton", "jax_triton"}
_PACKAGES = set(_MAY_IMPORT) - {_PACKAGE}


def _sources() -> dict[str, pathlib.Path]:
    """Dotted name -> file, of every module of the library, with kernels, studies and benchmarks."""
    found = {}
    for folder, prefix in (
        (_ROOT / "fp8rl_jax", _PACKAGE),
        (_ROOT / "kernels", "fp8rl_jax.kernels"),
        (_ROOT / "studies", "studies"),
        (_ROOT / "benchmarks", "benchmarks"),
    ):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((prefix, *parts))] = path
    return found


def _package_of(module: str) -> str:
    """'fp8rl_jax.quant.kv' -> 'quant'; 'fp8rl_jax' and 'studies.kv' -> the first word."""
    first, *others = module.split(".")
    return others[0] if others and first == _PACKAGE else first


def _imports(module: str, source: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of all that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: None if is_package else -1]
                above = above[: len(above) - (node.level - 1)]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                # `from fp8rl_jax import checks` names a package, `... import __version__` does not.
                package = base == _PACKAGE and alias.name in _PACKAGES
                yield node.lineno, f"{base}.{alias.name}" if package else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def _violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module imports and may not, one sentence each."""
    package, found = _package_of(module), []
    if package not in _MAY_IMPORT:
        return [f"{module}: the package {package!r} is not in the table of this test; add it"]
    allowed = {package} | _MAY_IMPORT[package] | ({"base"} if package != "kernels" else set())
    for line, name in _imports(module, source, is_package):
        top = name.split(".")[0]
        if top == _PACKAGE:
            if _package_of(name) not in allowed:
                found.append(
                    f"{module}:{line} imports {name}; {package} may import {sorted(allowed)}"
                )
        elif top == "kernels":
            found.append(f"{module}:{line} imports {name}; write fp8rl_jax.kernels")
        elif package == "kernels" and top not in _KERNEL_LIBRARIES | sys.stdlib_module_names:
            found.append(f"{module}:{line} imports {name}; kernels need JAX and numpy alone")
    return found


def _asks(module: str, source: str) -> list[str]:
    """What a module asks of its surroundings and may not, one sentence each."""
    if _package_of(module) in ("base", "cli"):
        return []
    allowed, found = _MAY_ASK.get(module, set()), []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr, ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [a.name for a in node.names] + [f"{node.module}.{a.name}" for a in node.names]
        for name in (set(names) & (_MESH | _MACHINE)) - allowed:
            found.append(f"{module}:{node.lineno} reads {name}; take it as an argument")
    return found


def _private_names(source: str) -> list[str]:
    """Names that begin with one underscore and are imported, or read from an imported name."""
    nodes, private = list(ast.walk(ast.parse(source))), re.compile(r"_(?!_)").match
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    found = [a.name for node in froms for a in node.names if private(a.name)]
    imported = {a.asname or a.name for node in froms for a in node.names}
    reads = [n for n in nodes if isinstance(n, ast.Attribute) and private(n.attr)]
    return found + [ast.unparse(n) for n in reads if ast.unparse(n.value) in imported]


_SOURCES = _sources()


# Statements of the code and fields of a configuration (docs/reference/size.md). They fall: who
# deletes lowers them here. A feature that needs more says beforehand how many, and what it deleted.
_MOST = {"statements": 30_912, "of those in the wheel": 28_299, "config fields": 151}


def test_code_does_not_grow():
    found = dict(size.rows(size.sources()))
    counts = {measure: int(found[measure].replace(",", "")) for measure in _MOST}
    assert all(counts[measure] <= most for measure, most in _MOST.items()), counts


def test_every_package_is_read():
    """No package of the table is missing from what is checked, and none is empty."""
    assert {_package_of(module) for module in _SOURCES} >= set(_MAY_IMPORT)
    read = sum(1 for m, p in _SOURCES.items() for _ in _imports(m, p.read_text(), False))
    assert read > 2 * len(_SOURCES)


def test_imports_run_one_way():
    """No module imports a package above it or beside it."""
    found = [
        violation
        for module, path in _SOURCES.items()
        for violation in _violations(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_packages_have_no_cycle():
    """Some order of the packages exists in which each imports earlier ones only."""
    needs: dict[str, set[str]] = {}
    for module, path in _SOURCES.items():
        names = _imports(module, path.read_text(), path.name == "__init__.py")
        packages = {_package_of(name) for _, name in names if name.split(".")[0] == _PACKAGE}
        needs.setdefault(_package_of(module), set()).update(
            packages - {_package_of(module), _PACKAGE}
        )
    del needs[_PACKAGE]
    while free := {package for package, others in needs.items() if not others & set(needs)}:
        needs = {package: others for package, others in needs.items() if package not in free}
    assert not needs, f"these import each other in a circle: {needs}"


def test_modules_have_no_cycle():
    """Some order of all modules exists in which each imports earlier ones only, as far as their
    imports are not within functions; those for annotations alone count."""
    needs: dict[str, set[str]] = {}
    for module, path in _SOURCES.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.body = [ast.Pass()]
        source, is_package = ast.unparse(tree), path.name == "__init__.py"
        names = {name for _, name in _imports(module, source, is_package)}
        names |= {
            f"{n.module}.{a.name}"
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom)
            for a in n.names
        }
        # A package's `__init__` offers what its modules hold; modules import each other's.
        needs[module] = set() if is_package else (names & set(_SOURCES)) - {module}
    while free := {module for module, others in needs.items() if not others & set(needs)}:
        needs = {module: others for module, others in needs.items() if module not in free}
    assert not needs, f"these import each other in a circle: {needs}"


def test_surroundings_are_arguments():
    """Mesh, platform and environment are read where they belong, and passed on from there."""
    asked = {module: _asks(module, path.read_text()) for module, path in _SOURCES.items()}
    assert not {module: what for module, what in asked.items() if what}


def test_every_file_that_may_ask_does():
    assert all(_asks("fp8rl_jax.x", _SOURCES[module].read_text()) for module in _MAY_ASK)


@pytest.mark.parametrize(
    "source",
    [
        "import jax\nmesh = jax.sharding.get_abstract_mesh()",
        "from jax import set_mesh",
        "import jax\non_cpu = jax.default_backend() == 'cpu'",
        "from os import environ",
        "import os\nhome = os.environ['HOME']",
        "import jax\njax.config.update('jax_enable_x64', True)",
    ],
)
def test_planted_question_is_found(source):
    assert _asks("fp8rl_jax.models.x", source)
    assert not _asks("fp8rl_jax.base.x", source)


def test_users_of_the_library_need_public_names():
    """Studies and benches are written as anyone's program would be."""
    users = {m: path.read_text() for m, path in _SOURCES.items() if _package_of(m) in _USERS}
    names = {module: _private_names(source) for module, source in users.items()}
    assert users and not {module: private for module, private in names.items() if private}


def test_planted_private_name_is_found():
    assert _private_names("from fp8rl_jax.models.router import _scores")
    assert _private_names("from fp8rl_jax import learner\nlearner._loss()")


@pytest.mark.parametrize("path", sorted((_ROOT / "configs").glob("*.py")), ids=lambda p: p.name)
def test_configs_import_ml_collections_only(path):
    """A config file is data: beside what configs share it needs nothing of the library."""
    names = {name for _, name in _imports(path.stem, path.read_text(), False)}
    known = ("__future__", "ml_collections", "typing", "fp8rl_jax.configs._published")
    others = {name for name in names if not name.startswith(known)}
    assert not others, f"{path.name} imports {', '.join(sorted(others))}"


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        ("fp8rl_jax.rollout.sampler", "from fp8rl_jax.learner import Batch", "fp8rl_jax.learner"),
        ("fp8rl_jax.learner", "from fp8rl_jax import kernels, rollout", "fp8rl_jax.rollout"),
        ("fp8rl_jax.quant.kv", "import fp8rl_jax.models.layers as m", "fp8rl_jax.models.layers"),
        ("fp8rl_jax.models.layers", "def f():\n    import fp8rl_jax.cli", "fp8rl_jax.cli"),
        ("fp8rl_jax.rl.kl", "from ..quant import quantize", "fp8rl_jax.quant"),
        ("fp8rl_jax.rl.kl", "from .. import models", "fp8rl_jax.models"),
        ("fp8rl_jax.envs.tasks", "from fp8rl_jax.models import forward", "fp8rl_jax.models"),
        ("fp8rl_jax.data.batching", "import fp8rl_jax.rollout", "fp8rl_jax.rollout"),
        ("fp8rl_jax.training.runtime", "if 0:\n    from fp8rl_jax.cli import run", "fp8rl_jax.cli"),
        ("fp8rl_jax.quant.kv", "import_module('fp8rl_jax.train')", "fp8rl_jax.train"),
        ("fp8rl_jax.models.x", "from kernels import block_matmul", "kernels"),
        (
            "fp8rl_jax.kernels.x",
            "from fp8rl_jax.base.errors import UserError",
            "fp8rl_jax.base.errors",
        ),
        ("fp8rl_jax.kernels.x", "import flax.linen", "flax.linen"),
        ("fp8rl_jax.kernels.x", "import fp8rl_jax", "fp8rl_jax"),
        ("fp8rl_jax.newpackage.x", "import math", "newpackage"),
    ],
)
def test_planted_violation_is_named(module, source, named):
    """The check finds a forbidden import of every form, and says which."""
    (found,) = _violations(module, source)
    assert named in found
    assert module in found


def test_packages_resolve_relative_imports():
    """In an `__init__` one dot is the package itself, in a module the package around it."""
    assert not _violations("fp8rl_jax.rl", "from .kl import k3", is_package=True)
    assert _violations("fp8rl_jax.rl", "from ..quant import quantize", is_package=True)
    assert not _violations("fp8rl_jax.rl.kl", "from .losses import clipped_policy_loss")


def test_allowed_imports_pass():
    """The check does not refuse what the rules allow."""
    source = (
        "import jax\nfrom fp8rl_jax import kernels\nfrom fp8rl_jax.base.errors import UserError"
    )
    assert not _violations("fp8rl_jax.models.x", source)
    assert not _violations("fp8rl_jax.kernels.x", "import triton\nimport jax_triton, functools")
