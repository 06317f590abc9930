"""The command `fp8rl`: one file for each group of subcommands."""

from fp8rl_jax.cli.main import run
