#!/usr/bin/env bash
# Tries launch/slurm.sbatch on this machine: a Slurm of two nodes, both here, runs a small job twice.
# The second time one task of the two gets SIGTERM; the job must requeue itself, go on, and end with
# the records of the first. About ten minutes; as root, with fp8rl on PATH and
#   apt-get install -y --no-install-recommends slurm-wlm munge
#   bash launch/slurm_selftest.sh [DIRECTORY]    default: a new one in /tmp; Slurm's logs stay there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fail() { echo "error: $1" >&2; exit "${2:-1}"; }
[ "$(id -u)" = 0 ] || fail "Slurm's daemons for two nodes on one machine need root: run as root" 2
for program in munged slurmctld slurmd sbatch fp8rl; do
  command -v "$program" >/dev/null || fail "$program is not installed: see the head of $0" 2
done
mkdir -p "${1:-/tmp}"
dir="$(realpath "${1:-$(mktemp -d -t fp8rl-slurm-XXXXXX)}")"
mkdir -p "$dir"/{run,state,log,shared}
host="$(hostname -s)"
export SLURM_CONF="$dir/slurm.conf" FP8RL_SHARED="$dir/shared" PYTHONPATH="$PWD/tests/helpers"
export JAX_PLATFORMS=cpu XDG_CACHE_HOME="$dir/cache"

stop() {
  for pid in "$dir"/run/*.pid; do kill "$(cat "$pid")" 2>/dev/null || true; done
  grep -v '# fp8rl slurm_selftest$' /etc/hosts >"$dir/hosts" && cat "$dir/hosts" >/etc/hosts
}
trap stop EXIT
echo "127.0.0.1 node1 node2 # fp8rl slurm_selftest" >>/etc/hosts # JAX asks for node1 by name

cat >"$SLURM_CONF" <<EOF
ClusterName=selftest
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$dir/run/munge.socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobRequeue=1
ReturnToService=2
NodeName=node[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=$(nproc) State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
EOF
(umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
munged --force --key-file="$dir/munge.key" --socket="$dir/run/munge.socket" \
  --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed"
slurmctld
slurmd -N node1
slurmd -N node2

until_true() { # $1: seconds, $2: what is waited for, then the command
  local end=$((SECONDS + $1)) what="$2"
  shift 2
  until "$@"; do
    [ $SECONDS -lt $end ] || fail "$what: not within the time; see $dir"
    sleep 0.2
  done
}
nodes_idle() { [ "$(sinfo -h -o '%D %t')" = "2 idle" ]; }
state() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
ended() { [[ "$(state "$1")" =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)$ ]]; }
pending() { [ "$(state "$1")" = PENDING ]; }
steps() { [ "$(cat "$dir/$1/metrics.jsonl" 2>/dev/null | wc -l)" -ge "$2" ]; }
submit() { # $1: name of the run
  sbatch --parsable --nodes=2 --ntasks-per-node=1 --gres=none --signal=TERM@60 \
    --job-name="$1" --output="$dir/$1.log" launch/slurm.sbatch --config tests/helpers/tiny_config.py \
    --config.run.dir="$dir/$1" --config.run.cache_dir="$dir/sft-$1" \
    --config.run.steps=8
}
finish() { # $1: job, $2: name of the run
  until_true 900 "the end of job $1" ended "$1"
  [ "$(state "$1")" = COMPLETED ] || fail "job $1 is $(state "$1"); see $dir/$2.log"
}

until_true 60 "two idle nodes" nodes_idle
job="$(submit whole)"
finish "$job" whole
echo "whole: job $job on two nodes has completed"

job="$(submit stopped)"
until_true 900 "step 2" steps stopped 2
task=
for pid in $(pgrep -f "run.dir=$dir/stopped"); do # the first: its workers are younger
  if grep -qz '^SLURM_PROCID=1$' "/proc/$pid/environ" 2>/dev/null; then task="${task:-$pid}"; fi
done
[ -n "$task" ] || fail "task 1 of job $job is not found"
kill -TERM "$task"
until_true 120 "the requeue of job $job" pending "$job"
echo "stopped: SIGTERM to task 1; job $job is requeued after $(wc -l <"$dir/stopped/metrics.jsonl") steps"
scontrol update "JobId=$job" StartTime=now # Slurm waits two minutes before it starts a job again
finish "$job" stopped
grep -q 'resuming after rl step' "$dir/stopped.log" || fail "the job did not resume; see $dir/stopped.log"
echo "stopped: job $job has resumed and completed"

python3 - "$dir" <<'EOF'
import pathlib, sys
from fp8rl_jax.training.logs import read_jsonl
from tiny_run import FILES, without_times

def records(run):
    path = pathlib.Path(sys.argv[1]) / run
    return {name: [without_times(r) for r in read_jsonl(path / f"{name}.jsonl")] for name in FILES}

whole, stopped = records("whole"), records("stopped")
if whole != stopped:
    sys.exit("error: the records of the two runs differ")
counts = ", ".join(f"{len(rows)} of {name}" for name, rows in whole.items())
norms = [r["grad_norm"] for r in whole["metrics"]]
drift = max(r["train_rollout_logprob_abs_diff_max"] for r in whole["metrics"])
print(f"all records are equal: {counts}; gradient norms {min(norms):.2f} to {max(norms):.2f}; drift {drift}")
EOF
