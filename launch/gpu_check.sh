#!/usr/bin/env bash
# Checks and times the GPU kernels on this machine's H100 or H200, in at most about nine minutes:
# the tests in tests/gpu. Exit status 0 only if all that decide have run and hold. Arguments go to
# pytest:
#   bash launch/gpu_check.sh --out=DIR                    results; default: runs/gpu_check
#   bash launch/gpu_check.sh -k attention                 a part: names of tests, or files
#   bash launch/gpu_check.sh -k 'not speed'               without the times
#   bash launch/gpu_check.sh --slow tests/gpu/test_gpu_headline.py   a long rollout, FP8 and BF16
# Uses the Python that is there (PYTHON names another) with its JAX for CUDA, flax and optax, and
# needs no network: what is missing of the rest is installed from wheels/, if it lies there. To fill
# it, where there is a network:
#   pip download --no-deps -d wheels jax-triton pytest pluggy iniconfig packaging pygments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
for wheel in wheels/*.whl; do
  [ -e "$wheel" ] || continue
  name="$(basename "${wheel%%-*}")"
  "$python" -c "import importlib.metadata as m; m.version('$name')" 2>/dev/null ||
    "$python" -m pip install --quiet --no-index --no-deps "$wheel"
done
tests=(tests/gpu)
for argument in "$@"; do
  [[ $argument == tests/* ]] && tests=()
done
exec "$python" -m pytest -m gpu --out=runs/gpu_check --seconds=500 "$@" "${tests[@]}"
