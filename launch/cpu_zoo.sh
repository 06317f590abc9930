#!/usr/bin/env bash
# Zero drift on CPUs that are not at hand: this one with oneDNN capped, with other numbers of
# threads, and emulated by QEMU's user mode where qemu-user is installed. Prints a table; about half
# an hour on two cores, most of it for QEMU. Arguments are names of CPUs, as in the table:
#   bash launch/cpu_zoo.sh                   all
#   bash launch/cpu_zoo.sh AVX2 '3 threads'  some
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
install_into_venv '.[dev]'
exec python tests/helpers/cpu_zoo.py "$@"
