# shellcheck shell=bash
# Sourced by gpu_check.sh and gpu_minutes.sh: the Python of a machine with a GPU, and what it lacks from
# wheels, without a network. Goes to the repository's root.
# PYTHON names the interpreter (default: python3), WHEELS the folder (default: wheels, in the root).
python="${PYTHON:-python3}"
wheels="${WHEELS:+$(realpath -m -- "$WHEELS")}"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
wheels="${wheels:-$PWD/wheels}"

# Installs those wheels of which no version is there into the folder $1, where Python then looks, too.
add_wheels() {
  local found paths
  export PYTHONPATH="$1:$PWD${PYTHONPATH:+:$PYTHONPATH}"
  found="$("$python" launch/_packages.py wheels "$wheels")" || return
  [ -n "$found" ] || return 0
  mapfile -t paths <<<"$found"
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$1" "${paths[@]}"
}

# Prints pytest's options for several processes; none without pytest-xdist or with few cores.
several_processes() {
  local cores most=14
  cores="$(nproc)"
  if [ "$cores" -gt 2 ] && "$python" -c 'import xdist' 2>/dev/null; then
    echo "-p xdist -n $((cores - 2 < most ? cores - 2 : most)) --dist worksteal"
  fi
}
