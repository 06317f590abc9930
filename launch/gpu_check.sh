#!/usr/bin/env bash
# Checks and times the GPU kernels on this machine's H100 or H200, in at most about nine minutes.
# Uses the Python that is there (PYTHON names another) and its JAX with CUDA; installs nothing but
# jax-triton, and that only from a wheel in wheels/ and only where it is missing. Arguments go to
# the check:
#   bash launch/gpu_check.sh --out DIR     default: runs/gpu_check
#   bash launch/gpu_check.sh --only=i      a long rollout, FP8 against BF16; other sections likewise
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
has_jax_triton() { "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("jax_triton"))'; }
if ! has_jax_triton && compgen -G 'wheels/jax_triton-*.whl' >/dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps wheels/jax_triton-*.whl
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m fp8rl_jax.gpu_check "$@"
