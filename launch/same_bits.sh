#!/usr/bin/env bash
# Says whether the checkout has moved a bit since a commit: trains a few steps in both, on this
# machine, and compares the digests. Status 1, with the first step and the parts that differ, if so.
#   bash launch/same_bits.sh origin/main
#   bash launch/same_bits.sh HEAD~1 --config tiny_arithmetic --config.run.steps=2
: "${VENV:=.venv-test}"
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
install_into_venv '.[dev]'
commit="${1:?name a commit, for example: bash launch/same_bits.sh origin/main}"
shift
here="$PWD"
work="$(mktemp -d)"
git worktree add --quiet --detach "$work/before" "$commit"
trap 'git worktree remove --force "$work/before"; rm -rf -- "$work"' EXIT
# Of both commits the run is that of this one's configuration.
fields=(--config "$here/tests/helpers/tiny_config.py" --config.run.steps=3)
if (($#)); then
  fields=("$@")
fi
for tree in before after; do
  root="$here"
  [ "$tree" = before ] && root="$work/before"
  (cd "$root" && PYTHONPATH="$root:$here/tests/helpers" python -m fp8rl_jax train "${fields[@]}" \
    --config.run.dir="$work/run_$tree" --config.run.cache_dir="$work/cache_$tree")
done
fp8rl bisect --digests-only "$work/run_before" "$work/run_after"
