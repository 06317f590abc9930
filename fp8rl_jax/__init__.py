"""Unified FP8 reinforcement learning in JAX: one forward function, two callers, zero drift.

::

    cli, api -> train -> training -> rollout (sampler) --+
                            |                            +-> models.hidden_states -> quant, kernels
                            +------> learner (update) ---+
                            +------> rl (advantages, losses), envs and data (questions, rewards)
    policy: loads a trained model; drift: finds why rollout and learner differ; report: HTML pages

`base` has errors, files and processes, `config` the fields of a run; `bench` measures.
Read first: `learner`, models/transformer.py, training/rl.py. The names of `__all__` are defined in
`api` and `config`, which are imported, and JAX with them, when a name is first used.
"""

from __future__ import annotations

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

from fp8rl_jax.base.version import __version__

if TYPE_CHECKING:
    from fp8rl_jax.api import compare, grpo, load, run, sample, score, train_step
    from fp8rl_jax.config import load_config

__all__ = (
    "__version__",
    "compare",
    "grpo",
    "load",
    "load_config",
    "run",
    "sample",
    "score",
    "train_step",
)


if not TYPE_CHECKING:  # checkers see the imports above, and report other names

    def __getattr__(name: str) -> Any:
        """Imports a name of `__all__` on its first use."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "fp8rl_jax.config" if name == "load_config" else "fp8rl_jax.api"
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(__name__):
                raise
            needs = f"fp8rl_jax.{name} needs {error.name}: pip install 'fp8rl_jax[train]'"
            raise ImportError(needs) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A checkout has the folder `kernels` next to the package, an installation inside it (setup.cfg,
# package_dir). Next to an installed package, a folder `kernels` is another project's.
_root = pathlib.Path(__file__).resolve().parents[1]
if (_root / "setup.cfg").is_file() and (_root / "kernels").is_dir():
    __path__.append(str(_root))
