"""Prints the table of docs/reference/size.md: how large the code is and how far a feature reaches.

    python tests/helpers/size.py

Everything is read from the sources with `ast`, nothing is imported or run, but for the last rows:

    JAX_PLATFORMS=cpu python tests/helpers/size.py --steps

runs three RL steps of a small model and traces one FP8 product, and counts the functions of this
project that run in the third step and in the trace.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHEEL = ("fp8rl_jax", "kernels", "configs")
BESIDE = ("studies", "benchmarks")
# What a user of the library runs on his own machine, and what only studies it.
_STUDIES = ("fp8rl_jax/bench/", *(f"{name}/" for name in BESIDE))
FEATURES = {
    "lora": r"(?<![a-z0-9])lora(?![a-z0-9])",
    "teacher": "teacher",
    "swaps": "swaps",
    "kv_scales, calibrated": "kv_scales|calibrated",
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of the project: path below the root, text and syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def in_wheel(self) -> bool:
        return self.path.startswith(tuple(f"{name}/" for name in WHEEL))

    @property
    def is_kernel(self) -> bool:
        return self.path.startswith("kernels/")

    @property
    def is_study(self) -> bool:
        return self.path.startswith(_STUDIES)


def sources(root: pathlib.Path = ROOT) -> list[Source]:
    """Returns every Python file of the wheel and of what stands beside it, by path."""
    found = []
    for folder in (*WHEEL, *BESIDE):
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text()
            found.append(Source(str(path.relative_to(root)), text, ast.parse(text)))
    return found


def _nodes(files: list[Source], *kinds: type) -> Iterator:
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, kinds):
                yield node


def statements(files: list[Source]) -> int:
    """Counts the statements, docstrings included."""
    return sum(1 for _ in _nodes(files, ast.stmt))


def _functions(files: list[Source]) -> Iterator[ast.FunctionDef]:
    yield from _nodes(files, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(function: ast.FunctionDef) -> int:
    """Returns the lines of a function from its `def` on."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters_of(function: ast.FunctionDef) -> int:
    """Returns how many parameters a function has, `self` and `cls` apart."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = [argument.arg for argument in named]
    others = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len(names) + others - (names[:1] in (["self"], ["cls"]))


def parallel_assignments(files: list[Source]) -> int:
    """Counts assignments of the form ``a, b = x, y``."""
    return sum(
        isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
        for node in _nodes(files, ast.Assign)
    )


def packed_calls(files: list[Source]) -> int:
    """Counts calls with an unpacked name, ``f(*name)``."""
    return sum(
        any(isinstance(x, ast.Starred) and isinstance(x.value, ast.Name) for x in node.args)
        for node in _nodes(files, ast.Call)
    )


def classes_with_trace(files: list[Source]) -> int:
    """Counts classes that define `trace`, as a jitted function has one."""
    return sum(
        any(isinstance(part, ast.FunctionDef) and part.name == "trace" for part in node.body)
        for node in _nodes(files, ast.ClassDef)
    )


def rows(files: list[Source]) -> list[tuple[str, str]]:
    """Returns the table's rows that follow from the sources: (measure, value)."""
    wheel = [file for file in files if file.in_wheel]
    library = [file for file in wheel if not file.is_study and not file.path.startswith("configs/")]
    plain = [file for file in wheel if not file.is_kernel]
    thousands = sum(len(file.text.splitlines()) for file in wheel) / 1000
    longest = max(_functions([f for f in library if not f.is_kernel]), key=lines_of)
    step = next(f for f in _functions(library) if f.name == "rl_step")
    wide = sum(parameters_of(function) >= 8 for function in _functions(plain))
    found = [
        ("statements", f"{statements(files):,}"),
        ("of those in the wheel", f"{statements(wheel):,}"),
        ("lines of `rl_step`", str(lines_of(step))),
        ("longest function outside kernels", f"{lines_of(longest)} (`{longest.name}`)"),
        ("functions with 8 parameters or more outside kernels", str(wide)),
    ]
    for name, pattern in FEATURES.items():
        count = sum(bool(re.search(pattern, file.text, re.IGNORECASE)) for file in library)
        found.append((f"files that name {name}", str(count)))
    fields, pairs = _configuration()
    return [
        *found,
        ("config fields", str(fields)),
        ("pairs that do not go together", str(pairs)),
        (
            "parallel assignments in 1,000 lines of the wheel",
            f"{parallel_assignments(wheel) / thousands:.1f}",
        ),
        ("calls `f(*name)` in 1,000 lines of the wheel", f"{packed_calls(wheel) / thousands:.1f}"),
        ("classes with a hand-made `trace`", str(classes_with_trace(wheel))),
    ]


def _configuration() -> tuple[int, int]:
    """Returns how many fields a configuration has, and how many pairs are refused."""
    from fp8rl_jax.config import FIELDS
    from fp8rl_jax.config.combinations import PAIRS

    return sum(len(section) for section in FIELDS.values()), len(PAIRS)


@contextlib.contextmanager
def _ran() -> Iterator[set[tuple[str, str]]]:
    """Collects (file, name) of this project's functions that run within the context."""
    found: set[tuple[str, str]] = set()
    folders = tuple(f"{ROOT / name}/" for name in ("fp8rl_jax", "kernels"))

    def note(frame, event: str, _) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folders):
            found.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def functions_of_a_step() -> set[tuple[str, str]]:
    """Returns (file, name) of what runs in the third RL step of a model of two layers."""
    from fp8rl_jax.config import load_config
    from fp8rl_jax.train import train
    from fp8rl_jax.training import rl

    rl_step, calls = rl.rl_step, []

    def counted(*arguments, **options):
        with _ran() if len(calls) == 2 else contextlib.nullcontext(set()) as ran:
            calls.append(ran)
            return rl_step(*arguments, **options)

    overrides = {
        "model.num_hidden_layers": 2,
        "sft.steps": 0,
        "precision.self_check": False,
        "run.steps": 3,
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 4,
        "eval.questions": 16,
    }
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(rl, "rl_step", counted):
        overrides["run.dir"] = folder
        arguments = [f"--config.{name}={value}" for name, value in overrides.items()]
        train(load_config(str(ROOT / "configs/tiny_arithmetic.py"), arguments))
    return calls[2]


def functions_of_a_product() -> set[tuple[str, str]]:
    """Returns (file, name) of what runs when an FP8 product is traced."""
    import jax
    import jax.numpy as jnp

    from fp8rl_jax.quant import get_recipe, matmul

    recipe = get_recipe("fp8")
    x, w = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((256, 128))
    with _ran() as ran:
        jax.make_jaxpr(lambda x, w: matmul(recipe, x, w))(x, w)
    return ran


def main() -> None:
    print("| measure | now |\n|---|---|")
    for measure, value in rows(sources()):
        print(f"| {measure} | {value} |")
    if "--steps" in sys.argv:
        for measure, ran in (
            ("functions and files in an RL step", functions_of_a_step()),
            ("functions and files in an FP8 product's trace", functions_of_a_product()),
        ):
            files = {file for file, _ in ran}
            print(f"| {measure} | {len(ran)} in {len(files)} |", flush=True)


if __name__ == "__main__":
    main()
