"""Unified FP8 reinforcement learning in JAX: one forward function, two callers, zero drift.

Rooms: `quant` (FP8 numerics), `models` (the one forward), `rollout` (the jitted sampler), `rl`
(array maths of GRPO and of the drift metrics), `envs` and `data` (prompts and rewards), and the
programs at the top (`train`, `evaluate`, `report`, `cli`).
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

from fp8rl_jax.version import __version__

__all__ = ["__version__"]


def _register_kernels() -> None:
    """In a checkout, makes ``../kernels`` importable as ``fp8rl_jax.kernels``.

    An installed package holds it inside (setup.cfg, package_dir); then this does nothing. The
    checkout's own kernels come before those of an editable installation of another checkout.
    """
    name = __name__ + ".kernels"
    package = pathlib.Path(__file__).resolve().parent
    if name in sys.modules or (package / "kernels" / "__init__.py").is_file():
        return
    init = package.parent / "kernels" / "__init__.py"
    # Beside an installed package, a folder `kernels` is another project's: only a checkout counts.
    if not init.is_file() or not (package.parent / "setup.cfg").is_file():
        if importlib.util.find_spec(name) is not None:
            return
        raise ImportError(
            f"fp8rl_jax.kernels is not installed and {init} does not exist: install the package "
            "with `pip install .`, or import it from a complete checkout"
        )
    spec = importlib.util.spec_from_file_location(
        name, init, submodule_search_locations=[str(init.parent)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for part in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[part]
        raise
    globals()["kernels"] = module


_register_kernels()
