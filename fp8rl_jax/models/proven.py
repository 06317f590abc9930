"""Whether zero drift has been tested on this machine's GPU: what launch/gpu_check.sh leaves behind.

Bits on a GPU are those of the machine code that Triton and XLA make for it: another version of
either may make other code, and so may another source. A proof therefore names the device, the
versions, and the source of kernels, models and quantisation. The driver only loads the code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import pathlib

import jax

from fp8rl_jax import kernels, quant
from fp8rl_jax.base.version import installed
from fp8rl_jax.kernels import machine

_VERSIONS = ("jax", "jaxlib", "triton", "jax-triton")
_PLUGINS = tuple(f"jax-cuda{cuda}-{part}" for cuda in (12, 13) for part in ("pjrt", "plugin"))


def digest_of(*folders: pathlib.Path) -> str:
    """Returns a digest of the Python code in folders, without comments and docstrings."""
    found = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                body[:1] = [] if isinstance(body[0].value, ast.Constant) else body[:1]
        found.update(ast.unparse(tree).encode())
    return found.hexdigest()[:16]


@functools.cache
def _source() -> str:
    files = (str(kernels.__file__), str(quant.__file__), __file__)
    return digest_of(*(pathlib.Path(file).parent for file in files))


def stack() -> dict[str, str]:
    """Returns what the bits depend on: this machine's device, versions of what is installed, and a
    digest of the source."""
    versions = {name: installed(name) for name in (*_VERSIONS, *_PLUGINS)}
    known = {name: version for name, version in versions.items() if version}
    return {"device": jax.devices()[0].device_kind} | known | {"source": _source()}


def _record(cache: pathlib.Path) -> pathlib.Path:
    """Returns the file that says that the tests have held for this stack."""
    digest = hashlib.sha256(json.dumps(stack()).encode()).hexdigest()
    return cache / f"gpu-check-{digest[:20]}.json"


def is_proven() -> bool:
    """Returns whether the tests have held on this machine, for its stack (`keep_proof`)."""
    cache = machine.user_cache()
    return cache is not None and _record(cache).exists()


def keep_proof(results: dict) -> pathlib.Path | None:
    """Records that the tests have held for this machine's stack; returns the file, None if there is
    no directory for it."""
    cache = machine.user_cache()
    if cache is None:
        return None
    path = _record(cache)
    path.write_text(json.dumps(results))
    return path
