#!/usr/bin/env bash
# Small runs under random faults, each compared with an undisturbed one: bash launch/soak.sh HOURS
# The log goes to standard output; status 1 if a run ended otherwise than it must. Further arguments
# go to tests/helpers/soak.py, for example --seed=7.
: "${VENV:=.venv}"
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
install_into_venv ".[train]"
exec python tests/helpers/soak.py "$@"
