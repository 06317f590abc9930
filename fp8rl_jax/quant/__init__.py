"""FP8 numerics: QArray, scaling policies, recipes, the rule of a linear layer, KV quantisation.

::

    recipe.py               which format, block and policy each operand gets: data
      |
    rule.py                 fprop, dgrad and wgrad of a linear layer, as one custom VJP
    products.py             those products, by kernels or in jnp
      |-- operands.py       an operand: quantise, observe, state
      |-- qarray.py         bytes with scales, one for each block
      |     `-- scaling.py  amax -> scale
      v
    dot_general.py          the same for Flax modules (linen.py, nnx.py keep its states)

Read rule.py first, then qarray.py. kv.py quantises what attention stores, varying.py is for
shard_map, table.py prints recipes. The package knows arrays, not models. Not done: second
derivatives, and products other than those of linear layers (attention is in kernels/).
"""

from fp8rl_jax.kernels import dequantized as dequantize_kv
from fp8rl_jax.quant.dot_general import keep_dtypes, make_dot_general
from fp8rl_jax.quant.kv import KVScales, calibrated_scales, kv_health, missing_scales, quantize_kv
from fp8rl_jax.quant.operands import (
    Activation,
    BoundWeight,
    SiteProbe,
    SiteScaling,
    Weight,
    as_activation,
    compute_value,
    init_probe,
    init_site,
    is_weight,
    merge_probes,
    quantize_weight,
    take_layer,
    update_site,
)
from fp8rl_jax.quant.products import scaled_matmul
from fp8rl_jax.quant.qarray import QArray, block_health, quantize
from fp8rl_jax.quant.recipe import Operand, Recipe, get_recipe, recipe_names, same_forward
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
from fp8rl_jax.quant.table import gemm_table
