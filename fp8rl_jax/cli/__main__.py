"""`python -m fp8rl_jax.cli` is `fp8rl`."""

from fp8rl_jax.cli import entry

entry()
