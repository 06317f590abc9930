"""Names the entries of the user's cache directory, which is kept between runs.

The cache holds results of supervised fine-tuning, compiled programs and passed self-checks. An
entry's name depends on the code, the libraries' versions and the kind of machine, any of which may
change bits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
from collections.abc import Iterable

import jax

import fp8rl_jax
from fp8rl_jax import kernels
from fp8rl_jax.base.jax_settings import recorded_settings
from fp8rl_jax.kernels.machine import backend, cpu_features, surroundings
from fp8rl_jax.kernels.machine import user_cache as user_cache

_LIBRARIES = ("jax", "jaxlib", "optax", "flax", "grain", "reasoning_gym")


@functools.cache
def machine() -> str:
    """Returns a name for this kind of CPU: architecture and a hash of its instruction sets."""
    known = cpu_features() or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


@functools.cache
def library_digest() -> str:
    """Returns the hash of the library's source."""
    digest = hashlib.sha256()
    for root in (pathlib.Path(fp8rl_jax.__file__).parent, pathlib.Path(kernels.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def files_of_functions(names: Iterable[str]) -> list[pathlib.Path]:
    """Returns the source files of functions that are named as 'module:function'."""
    modules = (importlib.util.find_spec(name.partition(":")[0]) for name in names)
    return [pathlib.Path(m.origin) for m in modules if m and m.origin]


def cache_name(kind: str, depends_on: dict, files: Iterable[pathlib.Path] = ()) -> str:
    """Returns KIND-HASH, an entry's name. The hash covers `depends_on` (JSON), the contents of
    `files`, the library's source and versions, JAX's settings and the machine."""
    parts = depends_on | {
        "files": [hashlib.sha256(file.read_bytes()).hexdigest() for file in files],
        "source": library_digest(),
        "devices": [backend(), jax.device_count(), machine(), *surroundings()],
        "settings": recorded_settings(),
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{kind}-{digest[:20]}"
