#!/usr/bin/env bash
# Several processes of one command on this machine, as a pod would run them:
#   bash launch/multihost.sh N [--devices D] COMMAND...
# N processes with D CPU devices each (1 if left out). Each line of output but the first process's
# begins with the process's number. The status is the first that is not 0.
set -euo pipefail

usage="usage: bash launch/multihost.sh N [--devices D] COMMAND..."
number='^[1-9][0-9]*$'
devices=1
[[ ${1-} =~ $number ]] || { echo "error: N is '${1-}': write a number of processes; $usage" >&2; exit 2; }
processes=$1
shift
if [ "${1-}" = --devices ]; then
  [[ ${2-} =~ $number ]] || { echo "error: --devices is '${2-}': write a number; $usage" >&2; exit 2; }
  devices=$2
  shift 2
fi
[ $# -gt 0 ] || { echo "error: no command is given; $usage" >&2; exit 2; }

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
export FP8RL_COORDINATOR="localhost:$port" FP8RL_PROCESSES="$processes"
export XLA_FLAGS="${XLA_FLAGS-} --xla_force_host_platform_device_count=$devices"

pids=()
for ((i = 0; i < processes; i++)); do
  if [ "$i" = 0 ]; then
    FP8RL_PROCESS_ID=0 "$@" &
  else
    FP8RL_PROCESS_ID=$i "$@" > >(sed -u "s/^/[$i] /") 2> >(sed -u "s/^/[$i] /" >&2) &
  fi
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT HUP

status=0
for pid in "${pids[@]}"; do
  code=0
  while :; do # a signal interrupts `wait`, not the process
    wait "$pid" && code=0 || code=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  [ "$status" != 0 ] || status=$code
done
exit "$status"
