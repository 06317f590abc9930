"""`python -m fp8rl_jax` is `fp8rl`."""

from fp8rl_jax.cli import entry

entry()
