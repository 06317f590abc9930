#!/usr/bin/env bash
# The tests: makes a virtual environment, installs, lints, and runs pytest. Arguments go to pytest:
#   bash launch/test.sh --slow              also the long ones, which take hours
#   bash launch/test.sh --slow --part=1/4   the first of four parts of them, by files
#   bash launch/test.sh tests/quant         one folder
# In an environment of its own: it has JAX's CUDA plugin, to compile the GPU kernels, which complains
# at the start of every program on a machine without CUDA unless JAX_PLATFORMS=cpu is set.
: "${VENV:=.venv-test}"
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
install_into_venv '.[dev]'
ruff check .
ruff format --check .
mypy
# Two processes: compiling uses one core at a time. Quick tests of a file share programs; a slow one
# has its own.
dist=loadfile
[[ " $* " == *" --slow "* ]] && dist=worksteal
exec python -m pytest -n 2 --dist "$dist" "$@"
