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
  local wheel lacking=()
  export PYTHONPATH="$1:$PWD${PYTHONPATH:+:$PYTHONPATH}"
  while read -r wheel; do
    lacking+=("$wheel")
  done < <("$python" - "$wheels"/*.whl <<'PROGRAM'
import importlib.metadata
import pathlib
import sys

for wheel in map(pathlib.Path, sys.argv[1:]):
    try:
        importlib.metadata.version(wheel.name.split("-")[0])
    except importlib.metadata.PackageNotFoundError:
        if wheel.exists():
            print(wheel)
PROGRAM
  )
  [ "${#lacking[@]}" -eq 0 ] ||
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$1" "${lacking[@]}"
}

# Prints pytest's options for several processes; none without pytest-xdist or with few cores.
several_processes() {
  local cores most=14
  cores="$(nproc)"
  if [ "$cores" -gt 2 ] && "$python" -c 'import xdist' 2>/dev/null; then
    echo "-p xdist -n $((cores - 2 < most ? cores - 2 : most)) --dist worksteal"
  fi
}
