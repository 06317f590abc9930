"""Bounds of every number that a user writes.

A field of the configuration has them in its row (`config.fields`). The table here has those of
models ('model.rope_theta') and of parameters of functions that are chosen by name ('tis.cap').
Configurations are checked when they are resolved, models when their shapes are made, parameters at
every call (`bounded`), whether from a configuration (``ppo(clip_low=0.1)``) or from Python.

Upper bounds are far above useful values, and keep counts within int32 and values within float32.
Not checked here: combinations of numbers, and whether a run fits in memory.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from fp8rl_jax.base.errors import UserError

# The smallest normal number of float32: compiled programs take smaller ones for 0.
TINY = 2.0**-126


class Bounds(NamedTuple):
    """The bounds of a number.

    Attributes:
      least, most: inclusive bounds; `above` excludes `least` itself.
      whole: whether only integers are allowed.
      also: further allowed values, outside the bounds.
    """

    least: float
    most: float
    whole: bool = False
    above: bool = False
    also: tuple[float, ...] = ()

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        least, most = f"{self.least:g}", f"{self.most:.10g}"
        span = f"above {least}, up to {most}" if self.above else f"from {least} to {most}"
        return "".join(f"{x:g}, or " for x in self.also) + f"{kind} {span}"

    def hold(self, value: Any) -> bool:
        """Returns whether a value is a number within the bounds; NaN is not."""
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return False
        value = cast(float, value)  # typeshed's Real lacks comparisons
        above = self.least < value if self.above else self.least <= value
        inside = above and value <= self.most and not (self.whole and value != int(value))
        return inside or value in self.also


def whole(least: int, most: int, *also: int) -> Bounds:
    """Returns the bounds of an integer."""
    return Bounds(least, most, whole=True, also=also)


def above(least: float, most: float, *also: float) -> Bounds:
    """Returns bounds that exclude the lower one."""
    return Bounds(least, most, above=True, also=also)


COUNT = 1_000_000_000  # steps, rows, tokens; the sum of two is below 2^31
QUESTIONS = 10_000_000  # each is generated or kept on the host
WIDTH, LAYERS, HEADS = 2**24, 10_000, 2**16
BELOW_1 = 0.9999999
RATIO = 1e9  # above e^20, at which ratios are clamped
COEFFICIENT = 1e3

BOUNDS: dict[str, Bounds] = {
    "model.vocab_size": whole(1, WIDTH),
    "model.hidden_size": whole(1, WIDTH),
    "model.intermediate_size": whole(1, WIDTH),
    "model.num_hidden_layers": whole(1, LAYERS),
    "model.num_attention_heads": whole(1, HEADS),
    "model.num_key_value_heads": whole(1, HEADS),
    "model.head_dim": whole(1, 256),
    "model.query_pre_attn_scalar": whole(0, COUNT),
    "model.sliding_window": whole(0, COUNT),
    "model.sliding_window_pattern": whole(0, LAYERS),
    "model.rope_theta": above(1, 1e12),
    "model.partial_rotary_factor": above(0, 1),
    "model.rope_local_base_freq": Bounds(0, 1e12),
    "model.rope_factor": above(0, 1e6),
    "model.rope_original_max_position_embeddings": whole(1, COUNT),
    "model.rope_low_freq_factor": above(0, 1e6),
    "model.rope_high_freq_factor": above(0, 1e6),
    "model.rope_beta_fast": above(0, 1e6),
    "model.rope_beta_slow": above(0, 1e6),
    "model.rope_mscale": Bounds(0, 1e3),
    "model.rope_mscale_all_dim": Bounds(0, 1e3),
    "model.rms_norm_eps": above(0, 1),
    "model.embedding_init_std": above(0, 1e3),
    "model.num_experts": whole(0, HEADS),
    "model.num_experts_per_tok": whole(1, HEADS),
    "model.moe_intermediate_size": whole(1, WIDTH),
    "model.n_group": whole(1, HEADS),
    "model.topk_group": whole(1, HEADS),
    "model.routed_scaling_factor": above(0, 1e4),
    "model.n_shared_experts": whole(0, 64),
    "model.first_k_dense_replace": whole(0, LAYERS),
    "model.kv_lora_rank": whole(0, WIDTH),
    "model.q_lora_rank": whole(0, WIDTH),
    "model.qk_nope_head_dim": whole(1, HEADS),
    "model.qk_rope_head_dim": whole(1, HEADS),
    "model.v_head_dim": whole(1, HEADS),
    "algo.clip_low": Bounds(0, RATIO),
    "algo.clip_high": Bounds(0, RATIO),
    "ppo.dual_clip": above(1, RATIO, 0),
    # Parameters of functions (fp8rl_jax/rl/, quant/scaling.py) that are not fields.
    "sapo.tau_positive": above(0, 1e6),
    "sapo.tau_negative": above(0, 1e6),
    # A correction must do nothing at zero drift, where ratios are 1, so its bounds include 1.
    "tis.cap": Bounds(1, RATIO),
    "tis.low": Bounds(0, 1),
    "tis.ess": Bounds(0, 1),
    "seq_tis.cap": Bounds(1, RATIO),
    "icepop.low": Bounds(0, 1),
    "icepop.high": Bounds(1, RATIO),
    "mask_sequence.low": Bounds(0, 1),
    "mask_sequence.high": Bounds(1, RATIO),
    "mask_geometric.low": Bounds(0, 1),
    "mask_geometric.high": Bounds(1, RATIO),
    "mask_k3.most": Bounds(0, RATIO),
    "veto.least": Bounds(0, 1),
    "opsm.delta": Bounds(0, RATIO),
    "overlong_penalty.max_length": whole(1, COUNT),
    "overlong_penalty.buffer": whole(0, COUNT),
    "overlong_penalty.factor": Bounds(0, 1e6),
    "seq_mean_token_sum_norm.length": whole(1, COUNT),
    "mismatch_metrics.tis_cap": above(0, RATIO),
    "delayed.history": whole(1, 2**16),
    "delayed.margin": Bounds(-64, 64),
    "static.amax": Bounds(1e-30, 1e30),
}


def shown(value: Any) -> str:
    """Formats a value for an error message; a very long integer as its number of digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        digits = int(abs(value).bit_length() * math.log10(2)) + 1
        return f"a number of about {digits} digits"
    return repr(value)


def check_number(name: str, value: Any, bounds: Bounds | None = None) -> None:
    """Raises UserError if the number is outside `bounds`, which are `BOUNDS[name]` if None."""
    _check(bounds or BOUNDS[name], f"{name} is {shown(value)};", value)


def _check(bounds: Bounds, found: str, value: Any) -> None:
    """Implements `check_number`; `found` begins the message."""
    if not bounds.hold(value):
        raise UserError(f"{found} write {bounds}")
    if value and abs(value) < TINY:
        raise UserError(f"{found} write {bounds}; it is 0 in float32")


def takes_auto(parameter: inspect.Parameter) -> bool:
    """Returns whether a parameter may be 'auto' by its annotation."""
    return "auto" in str(parameter.annotation)


def bounded(function: Callable) -> Callable:
    """Wraps a function to raise UserError for a parameter outside its bounds and TypeError for one
    that is not a number. The bounds are those of 'FUNCTION.PARAMETER' in the table, else those of
    'algo.PARAMETER'; other parameters are not checked, nor 'auto' where the annotation has it."""
    signature = inspect.signature(function)
    named = {
        name: BOUNDS[key]
        for name in signature.parameters
        for key in (f"algo.{name}", f"{function.__name__}.{name}")  # the last one wins
        if key in BOUNDS
    }

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any):
        given = signature.bind(*arguments, **keywords)
        for name, bounds in named.items():
            if name in given.arguments:
                value = given.arguments[name]
                if value == "auto" and takes_auto(signature.parameters[name]):
                    continue
                if not isinstance(value, numbers.Real):
                    raise TypeError(f"{function.__name__}: {name} is {value!r}; write a number")
                _check(bounds, f"{function.__name__}({name}={shown(value)}):", value)
        return function(*arguments, **keywords)

    return checked


def check_options(name: str, value) -> None:
    """Raises UserError for a number in a third party's options that is NaN or above 2^53 in size
    (beyond it float64 cannot hold every integer)."""
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            check_options(f"{name}.{key}", inner)
    elif isinstance(value, int | float) and not abs(value) <= 2**53:
        raise UserError(f"{name} is {shown(value)}; write a number of at most 2^53 in size")
