#!/usr/bin/env bash
# The main job on this machine: makes a virtual environment, installs, trains, writes a report.
# Further arguments go to `fp8rl train`, for example: bash launch/local.sh --config.run.seed=1
# Afterwards `source .venv/bin/activate` puts the command fp8rl on the PATH of your shell.
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
install_into_venv ".[train]"
echo "for more commands, afterwards: source ${VENV:-.venv}/bin/activate && fp8rl --help"
exec fp8rl train --config configs/tiny_arithmetic.py "$@"
