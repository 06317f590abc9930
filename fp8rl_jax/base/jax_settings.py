"""Lists the settings of JAX and Flax that may change bits, and sets them.

Settings come from the environment (JAX_THREEFRY_PARTITIONABLE, ...) and from any call of
`jax.config.update` in this process. Some change random bits, the order of sums, or what is an
error, and a promise of equal bits must not depend on them. Each is of one of four kinds:

  HELD      set by `hold_settings` to JAX's default, or to what a default of None means: when a
            command or a run begins, after the functions that the configuration names are imported,
            and before every part of a step, since a user's functions run in between
  REFUSED   an error if it is on
  RECORDED  left to the user; written to environment.json, compared at --resume, part of cache names
  harmless  changes no number and no outcome

tests/helpers/harmless_settings.py lists the harmless ones, and tests/test_jax_settings.py fails if
a new version of JAX has a setting that is in no table. Orbax and optax read nothing from the
environment that changes what is saved or computed.
"""

from __future__ import annotations

import os
from typing import Any

import flax
import jax

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.kernels.machine import COMPILER_SETTINGS, VARIABLES

# Share of a device's memory that a run may fill. The rest is for the driver, NCCL's buffers, CUDA
# graphs and other programs.
USABLE = 0.92

HELD: dict[str, Any] = {
    # Random bits.
    "jax_default_prng_impl": "threefry2x32",
    "jax_enable_custom_prng": False,
    "jax_high_dynamic_range_gumbel": False,
    "jax_legacy_prng_key": "allow",
    "jax_random_seed_offset": 0,
    "jax_threefry_partitionable": True,
    # Types, shapes and sums.
    "jax_allow_f16_reductions": True,
    "jax_default_matmul_precision": None,
    "jax_explicit_x64_dtypes": "warn",
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_softmax_custom_jvp": False,
    "jax_use_hlo_logistic_lowering": None,
    # How programs are traced, differentiated and lowered.
    "check_vma": False,
    "eager_constant_folding": False,
    "jax_auto_pcast": True,
    "jax_custom_jvp3": False,
    "jax_custom_vjp3": False,
    "jax_disable_bwd_checks": False,
    "jax_disable_vmap_shmap_error": False,
    "jax_embedded_constants_max_bytes": 32,
    "jax_mosaic_allow_hlo": False,
    "jax_pallas_use_mosaic_gpu": True,
    "jax_ragged_dot_use_gpu_pallas_triton_lowering": False,
    "jax_ragged_dot_use_ragged_dot_instruction": True,
    "jax_refs_to_pins": False,
    "jax_remat3": False,
    "jax_remat_barrier_no_cotangents": False,
    "jax_remove_size_one_mesh_axis_from_type": False,
    "jax_scan3": False,
    "jax_sort_devices_by_process_index": True,
    "jax_use_cpp_shard_args": False,
    "jax_use_direct_linearize": True,
    "jax_use_emit_pipeline_primitive": False,
    "jax_use_rgv3": True,
    "jax_use_simplified_jaxpr_constants": False,
    # What is an error, and what is run at all.
    "jax_array_garbage_collection_guard": None,
    "jax_check_static_indices": False,
    "jax_debug_key_reuse": False,
    "jax_disallow_mesh_context_manager": False,
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_experimental_unsafe_xla_runtime_errors": False,
    "jax_mutable_array_checks": True,
    "jax_no_execution": False,
    "jax_no_tracing": False,
    "jax_raise_on_ppermute_sort_diff": True,
    "jax_raise_persistent_cache_errors": False,
    "jax_thread_guard": False,
    "jax_transfer_guard": "allow",
    "jax_transfer_guard_device_to_device": "allow",
    "jax_transfer_guard_device_to_host": "allow",
    "jax_transfer_guard_host_to_device": "allow",
}

REFUSED: dict[str, str] = {
    "jax_enable_x64": "float32 would become float64",
    "jax_disable_jit": "operations that run one by one round otherwise than compiled programs",
    "jax_disable_most_optimizations": "products would be added up in another order",
    "jax_debug_nans": "JAX would stop at NaN with a traceback, where a run says its step and layer",
    "jax_debug_infs": "masked scores are infinite, and JAX would stop at them with a traceback",
}

RECORDED: tuple[str, ...] = (
    *COMPILER_SETTINGS,
    "jax_cpu_collectives_implementation",
    "jax_default_device",
    "jax_enable_pgle",
    "jax_mock_gpu_topology",
    "jax_pallas_auto_assign_collective_ids",
    "jax_pallas_auto_assign_collective_ids_limit",
    "jax_persistent_cache_enable_xla_caches",
    "jax_pgle_aggregation_percentile",
    "jax_pgle_profiling_runs",
    "jax_pjrt_client_create_options",
    "jax_threefry_gpu_kernel_lowering",
    "jax_use_shardy_partitioner",
    "jax_xla_profile_version",
    "mock_num_gpu_processes",
)

# Flax's settings, which come from FLAX_... environment variables.
FLAX_HELD: dict[str, Any] = {
    "flax_always_shard_variable": True,
    "flax_array_ref": False,
    "flax_fix_rng_separator": False,  # changes what a module draws
    "flax_hijax_variable": False,
    "flax_preserve_adopted_names": False,
    "flax_pytree_module": True,
    "flax_return_frozendict": False,
    "flax_use_flaxlib": False,
    "nnx_graph_mode": True,
    "nnx_graph_updates": True,
    "nnx_sow_capture_noop": False,
}


def hold_settings() -> None:
    """Sets the settings of HELD and FLAX_HELD in this process.

    Raises:
      UserError: a setting of REFUSED is on.
    """
    values = jax.config.values  # a new dict each time
    for name, reason in REFUSED.items():
        if values.get(name):
            raise UserError(
                f"{name.upper()} is on, and {reason}: unset it, or jax.config.update('{name}', "
                "False)"
            )
    for name, value in HELD.items():
        if values.get(name, value) != value:
            jax.config.update(name, value)
    for name, value in FLAX_HELD.items():
        if name in flax.config._values:
            flax.config.update(name, value)


def recorded_settings() -> dict[str, str]:
    """Returns the RECORDED settings, and the environment variables that XLA, oneDNN and LLVM read,
    except thread counts: the probes of matrix products run with the actual count."""
    settings = {
        name: str(jax.config.values[name]) for name in RECORDED if name in jax.config.values
    }
    return settings | {
        name: os.environ.get(name, "") for name in VARIABLES if not name.endswith("NPROC")
    }
