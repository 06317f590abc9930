# Sourced by slurm.sbatch and jobset_entry.sh: the environment of a run on several GPU hosts. What is
# set already stays. docs/multihost.md says what each variable is for.

# Compiled programs on storage that all hosts share: process 0 writes them, all read them.
if [ -n "${FP8RL_SHARED-}" ]; then
  export FP8RL_COMPILATION_CACHE="${FP8RL_COMPILATION_CACHE:-$FP8RL_SHARED/fp8rl_jax/compilation}"
fi

if [ -z "${XLA_CLIENT_MEM_FRACTION-}" ]; then # the newer name; JAX refuses both together
  export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
fi
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export XLA_FLAGS="--xla_gpu_deterministic_ops=true --xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS-}"

# Sums of gradients in one order, so that a run that resumes repeats its bits. Log-probabilities need
# none of it: the collectives of the forward pass only move bytes.
export NCCL_ALGO="${NCCL_ALGO:-Ring}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export NCCL_COLLNET_ENABLE="${NCCL_COLLNET_ENABLE:-0}"

# JAX's processes talk to each other directly; a proxy makes them hang.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY
