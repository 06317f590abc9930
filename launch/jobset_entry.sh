#!/usr/bin/env bash
# What a pod of jobset.yaml runs. Arguments go to `fp8rl train`. A pod that comes back goes on where
# the run stopped. `exec`: Kubernetes' SIGTERM reaches the run, not this script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
exec fp8rl train --auto-resume "$@"
