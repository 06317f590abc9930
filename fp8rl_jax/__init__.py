"""Unified FP8 reinforcement learning in JAX: one forward function, two callers, zero drift.

Packages: `base` (errors, files, processes), `kernels` (products and attention in fixed order),
`quant` (FP8 numerics), `models` (the one forward), `rollout` (the jitted sampler), `rl` (GRPO and
drift metrics), `envs` and `data` (prompts and rewards), `config`, `training` (parts of a run),
`policy` (a trained one), `drift`, `report`, `bench` and `cli`. `train` is the main job, `learner`
its train step.
"""

from __future__ import annotations

import pathlib

from fp8rl_jax.base.version import __version__

# In a checkout the kernels are beside the package, in an installed package inside it (setup.cfg,
# package_dir). Beside an installed package, a folder `kernels` is another project's.
_root = pathlib.Path(__file__).resolve().parents[1]
if (_root / "setup.cfg").is_file() and (_root / "kernels").is_dir():
    __path__.append(str(_root))
