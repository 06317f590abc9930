"""`python -m fp8rl_jax.cli` is `fp8rl`."""

from fp8rl_jax.cli.main import main

main()
