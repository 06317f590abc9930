# Sourced by the launch scripts: makes .venv in the repository and installs the project into it.
# PYTHON chooses the interpreter (default: the first of python3.12, python3.11, python3);
# VENV chooses the directory (default: .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pick_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3.11 python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python >= 3.11 found; install one, or set PYTHON=/path/to/python3" >&2
  exit 2
}

install_into_venv() { # $1: what to install, for example ".[train]" or ".[dev]"
  local venv="${VENV:-.venv}" python
  if [ ! -x "$venv/bin/python" ]; then
    python="$(pick_python)"
    echo "making $venv with $("$python" --version)"
    "$python" -m venv "$venv" || { echo "making $venv failed; is python3-venv installed?" >&2; exit 2; }
    echo "installing fp8rl_jax and the packages that it needs into $venv (1.3 GB; one to four minutes)"
  fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$1"
  # shellcheck disable=SC1091
  source "$venv/bin/activate"
}
