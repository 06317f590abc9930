"""The compiler options of the zero-drift promise do what they are for, on this jaxlib."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from fp8rl_jax.base.exact_jit import compiler_options, exact_jit

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="an option of XLA:CPU")


def _program(x, w):
    return jax.nn.relu(x @ w + 1) @ w.T


def _in_ynn_fusions(options: dict) -> list[set[str]]:
    """Operations of each YNNPACK fusion of `_program`."""
    x, w = jnp.ones((64, 128)), jnp.ones((128, 256))
    program = jax.jit(_program, compiler_options=options)
    text = program.lower(x, w).compile().as_text()
    found = []
    for name in re.findall(r"calls=%([\w.]+), [^\n]*__ynn_fusion", text):
        body = re.search(rf"^%{re.escape(name)} [^\n]*\{{\n(.*?)^}}", text, re.M | re.S)
        assert body
        found.append(set(re.findall(r" = \S+ ([\w\-]+)\(", body[1])) - {"parameter"})
    return found


def test_nothing_is_fused_into_products():
    """YNNPACK gets lone products, whose bits do not depend on what stands beside them."""
    options = compiler_options()
    assert options, "jaxlib no longer knows the options: zero drift is not kept"
    alone = _in_ynn_fusions(options)
    assert len(alone) == 2 and all(found == {"dot"} for found in alone)
    more = _in_ynn_fusions({name: "LIBRARY_FUSION_TYPE_DOT" for name in options if "ynn" in name})
    assert any(found > {"dot"} for found in more), "the control: without it this proves nothing"


def test_importing_starts_nothing():
    """A user's program may import all modules before it names its processes and platform to JAX."""
    root = pathlib.Path(__file__).parents[1]
    files = (path.relative_to(root) for path in (root / "fp8rl_jax").rglob("*.py"))
    names = [".".join(path.with_suffix("").parts) for path in files if path.stem != "__main__"]
    program = f"""
import importlib, jax.extend.backend
from jax._src import xla_bridge
assert not xla_bridge._backends
for name in {names}:
    importlib.import_module(name.removesuffix(".__init__"))
    assert not xla_bridge._backends, name
jax.extend.backend.get_backend()
assert xla_bridge._backends, "the control"
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_keywords_are_those_of_jit():
    assert exact_jit(lambda x, n: x * n, static_argnums=1)(jnp.ones(3), 2).tolist() == [2, 2, 2]
