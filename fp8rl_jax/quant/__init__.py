"""FP8 numerics: formats, QArray, scaling policies, recipes, the dot_general rule, KV quantisation.

Knows arrays; knows nothing of models.
"""

from fp8rl_jax.kernels import dequantized as dequantize_kv
from fp8rl_jax.quant.activations import Activation, as_activation
from fp8rl_jax.quant.dot_general import keep_dtypes, make_dot_general
from fp8rl_jax.quant.kv import KVScales, calibrated_scales, kv_health, missing_scales, quantize_kv
from fp8rl_jax.quant.products import scaled_matmul
from fp8rl_jax.quant.qarray import QArray, block_health, quantize
from fp8rl_jax.quant.recipe import Operand, Recipe, same_forward
from fp8rl_jax.quant.recipes import gemm_table, get_recipe, recipe_names
from fp8rl_jax.quant.rule import Rows, grouped_matmul, matmul
from fp8rl_jax.quant.scaling import (
    ScalingPolicy,
    check_scales,
    delayed,
    dynamic,
    get_scaling_policy,
    power_of_two,
    static,
)
from fp8rl_jax.quant.site import (
    SiteProbe,
    SiteScaling,
    init_probe,
    init_site,
    merge_probes,
    update_site,
)
from fp8rl_jax.quant.weights import (
    BoundWeight,
    StackedLayer,
    Weight,
    compute_value,
    is_weight,
    quantize_weight,
    take_layer,
)
