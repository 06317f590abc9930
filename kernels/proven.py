"""Devices and versions on which the tests of the GPU kernels have held (launch/gpu_check.sh).

A kernel's bits are those of the machine code that Triton and XLA make for a device: another version
of either may make other code, and so does another source. A proof therefore names the device, JAX,
Triton, jax-triton and the kernels' source. The driver only loads the code; the results name it too.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import pathlib

import jax

from fp8rl_jax.kernels import machine

_VERSIONS = ("jax", "jaxlib", "triton", "jax-triton")
# Results are in docs/gpu_results.
_PROVEN = (
    {
        "device": "NVIDIA H200",
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
        "triton": "3.6.0",
        "jax-triton": "0.4.0",
        "kernels": "99d2489662dff5ff",
    },
)


@functools.cache
def digest_of(folder: pathlib.Path = pathlib.Path(__file__).parent / "gpu") -> str:
    """Returns a digest of a folder's Python code, without comments and docstrings."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                body[:1] = [] if isinstance(body[0].value, ast.Constant) else body[:1]
        found.update(ast.unparse(tree).encode())
    return found.hexdigest()[:16]


def stack() -> dict[str, str]:
    """Returns this machine's device, versions ('' for a package that is not installed) and kernels:
    what the kernels' bits depend on."""
    found = dict.fromkeys(_VERSIONS, "")
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {"device": jax.devices()[0].device_kind} | found | {"kernels": digest_of()}


def _record(cache: pathlib.Path) -> pathlib.Path:
    """Returns the file that says that the tests have held for this stack."""
    digest = hashlib.sha256(json.dumps(stack()).encode()).hexdigest()
    return cache / f"gpu-check-{digest[:20]}.json"


def is_proven() -> bool:
    """Returns whether the tests have held for this machine's stack: in the project's published
    results, or here (`keep_proof`)."""
    cache = machine.user_cache()
    return stack() in _PROVEN or (cache is not None and _record(cache).exists())


def keep_proof(results: dict) -> pathlib.Path | None:
    """Records that the tests have held for this machine's stack; returns the file, None if there is
    no directory for it."""
    cache = machine.user_cache()
    if cache is None:
        return None
    path = _record(cache)
    path.write_text(json.dumps(results))
    return path
