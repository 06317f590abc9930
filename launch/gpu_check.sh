#!/usr/bin/env bash
# Checks and times the GPU kernels on this machine's H100 or H200, in about eight minutes with 16
# CPU cores: the tests in tests/gpu, first in parallel those that compare, the whole programs above
# all, then one after another those that time. Exit status 0 only if all that decide have run and
# hold; then precision.zero_drift='required' is accepted on this machine. Arguments go to pytest, and
# then there is one run:
#   bash launch/gpu_check.sh --out=DIR                    results; default: runs/gpu_check
#   bash launch/gpu_check.sh -k attention                 a part: names of tests, or files
#   bash launch/gpu_check.sh -k 'not speed'               without the times
#   bash launch/gpu_check.sh --slow tests/gpu/test_gpu_headline.py   a long rollout, FP8 and BF16
# The results name the commit: git's, or, where the files were copied without it, FP8RL_COMMIT's.
# Uses the Python that is there (PYTHON names another), 3.12 or later, with its JAX for CUDA, flax,
# optax and Triton, and needs no network: what is missing of the rest is taken from wheels/ (WHEELS
# names another folder), without installing it. To fill it, where there is a network:
#   pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels \
#     jax-triton==0.4.0 pytest pytest-xdist execnet pluggy iniconfig packaging pygments
set -euo pipefail
# shellcheck source=launch/_gpu.sh
source "$(dirname "${BASH_SOURCE[0]}")/_gpu.sh"
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
add_wheels "$site"
out=runs/gpu_check tests=(tests/gpu) whole=true
for argument in "$@"; do
  case $argument in
    --out=*) out="${argument#--out=}" ;;
    tests/*) tests=() whole=false ;;
    *) whole=false ;;
  esac
done
check=("$python" -m pytest -m gpu --out="$out")
if ! $whole; then
  "${check[@]}" --seconds=500 "$@" "${tests[@]}"
  exit
fi
read -ra parallel <<<"$(several_processes)"
# Of several processes none may take the GPU's memory at its start.
status=0
XLA_PYTHON_CLIENT_PREALLOCATE=false \
  "${check[@]}" --seconds=400 -k 'not speed' "${parallel[@]}" "${tests[@]}" || status=$?
[ "$status" -le 1 ] || exit "$status"
XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 "${check[@]}" --add --seconds=300 -k speed "${tests[@]}" || status=$?
exit "$status"
