#!/usr/bin/env bash
# The main job on this machine: makes a virtual environment, installs, trains, writes a report.
# Further arguments go to `fp8rl train`, for example: bash launch/local.sh --config.run.seed=1
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
install_into_venv ".[train]"
exec fp8rl train --config configs/tiny_arithmetic.py "$@"
