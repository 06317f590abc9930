"""Bounds of every number that a user writes, in one table.

A key is a field of the configuration ('rollout.top_k'), a field of a model ('model.rope_theta') or
a parameter of a function that is chosen by name ('tis.cap'). Configurations are checked when they
are resolved, models when their shapes are made, parameters at every call (`bounded`), whether from
a configuration (``ppo(clip_low=0.1)``) or from Python.

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


def _whole(least: int, most: int, *also: int) -> Bounds:
    return Bounds(least, most, whole=True, also=also)


def _above(least: float, most: float, *also: float) -> Bounds:
    return Bounds(least, most, above=True, also=also)


_COUNT = 1_000_000_000  # steps, rows, tokens; the sum of two is below 2^31
_QUESTIONS = 10_000_000  # each is generated or kept on the host
_WIDTH, _LAYERS, _HEADS = 2**24, 10_000, 2**16
_BELOW_1 = 0.9999999
_RATIO = 1e9  # above e^20, at which ratios are clamped
_COEFFICIENT = 1e3

BOUNDS: dict[str, Bounds] = {
    "run.seed": _whole(0, 2**31 - 1),
    "run.steps": _whole(0, _COUNT),
    "run.samples": _whole(0, _QUESTIONS),
    "run.checkpoint_every": _whole(1, _COUNT),
    "run.keep_checkpoints": _whole(1, _COUNT),
    "eval.average_last": _whole(1, _COUNT),
    "model.vocab_size": _whole(1, _WIDTH),
    "model.hidden_size": _whole(1, _WIDTH),
    "model.intermediate_size": _whole(1, _WIDTH),
    "model.num_hidden_layers": _whole(1, _LAYERS),
    "model.num_attention_heads": _whole(1, _HEADS),
    "model.num_key_value_heads": _whole(1, _HEADS),
    "model.head_dim": _whole(1, 256),
    "model.query_pre_attn_scalar": _whole(0, _COUNT),
    "model.sliding_window": _whole(0, _COUNT),
    "model.sliding_window_pattern": _whole(0, _LAYERS),
    "model.rope_theta": _above(1, 1e12),
    "model.partial_rotary_factor": _above(0, 1),
    "model.rope_local_base_freq": Bounds(0, 1e12),
    "model.rope_factor": _above(0, 1e6),
    "model.rope_original_max_position_embeddings": _whole(1, _COUNT),
    "model.rope_low_freq_factor": _above(0, 1e6),
    "model.rope_high_freq_factor": _above(0, 1e6),
    "model.rope_beta_fast": _above(0, 1e6),
    "model.rope_beta_slow": _above(0, 1e6),
    "model.rope_mscale": Bounds(0, 1e3),
    "model.rope_mscale_all_dim": Bounds(0, 1e3),
    "model.rms_norm_eps": _above(0, 1),
    "model.embedding_init_std": _above(0, 1e3),
    "model.num_experts": _whole(0, _HEADS),
    "model.num_experts_per_tok": _whole(1, _HEADS),
    "model.moe_intermediate_size": _whole(1, _WIDTH),
    "model.n_group": _whole(1, _HEADS),
    "model.topk_group": _whole(1, _HEADS),
    "model.routed_scaling_factor": _above(0, 1e4),
    "model.n_shared_experts": _whole(0, 64),
    "model.first_k_dense_replace": _whole(0, _LAYERS),
    "model.kv_lora_rank": _whole(0, _WIDTH),
    "model.q_lora_rank": _whole(0, _WIDTH),
    "model.qk_nope_head_dim": _whole(1, _HEADS),
    "model.qk_rope_head_dim": _whole(1, _HEADS),
    "model.v_head_dim": _whole(1, _HEADS),
    "precision.first_layers_bf16": _whole(0, _LAYERS),
    "precision.last_layers_bf16": _whole(0, _LAYERS),
    "precision.kv_margin": Bounds(1, 100),
    "mesh.data": _whole(1, 2**20, -1),
    "mesh.fsdp": _whole(1, 2**20, -1),
    "mesh.tensor": _whole(1, 2**20, -1),
    "mesh.expert": _whole(1, 2**20, -1),
    "mesh.rollout": _whole(0, 2**20),
    "env.reward_timeout": Bounds(0.01, 1e6),
    "env.reward_memory_gb": Bounds(0, 1e6),
    "env.train_questions": _whole(1, _QUESTIONS),
    "env.eval_fraction": Bounds(0, 0.5),
    "env.max_questions": _whole(0, _COUNT),
    "rollout.prompts_per_step": _whole(1, _COUNT),
    "rollout.group_size": _whole(1, _COUNT),
    "rollout.max_prompt_tokens": _whole(2, _COUNT),
    "rollout.max_new_tokens": _whole(1, _COUNT),
    "rollout.slots": _whole(0, _COUNT),
    "rollout.part": _whole(1, _COUNT),
    "rollout.ahead": _whole(0, 64),
    "rollout.most_versions": _whole(1, 64),
    "run.check_every": _whole(1, _COUNT),
    "rollout.max_turn_tokens": _whole(0, _COUNT),
    "rollout.max_observation_tokens": _whole(1, _COUNT),
    "env.max_turns": _whole(1, _COUNT),
    "rollout.pages": _whole(0, 2**24),  # 2^30 slots for tokens, 64 in each page
    "rollout.prefill_chunk": _whole(0, _COUNT),
    "rollout.temperature": Bounds(1e-6, 100),
    "rollout.top_k": _whole(0, _WIDTH),
    "rollout.top_p": _above(0, 1),
    "algo.clip_low": Bounds(0, _RATIO),
    "algo.clip_high": Bounds(0, _RATIO),
    "algo.dual_clip": _above(1, _RATIO, 0),
    "algo.loss_length": _whole(0, _COUNT),
    "algo.kl_coef": Bounds(0, _COEFFICIENT),
    "algo.teacher_coef": Bounds(0, _COEFFICIENT),
    "algo.overlong_buffer": _whole(0, _COUNT, -1),
    "algo.overlong_penalty": Bounds(0, 1e6),
    "algo.dynamic_sampling_rounds": _whole(1, 10_000),
    "algo.router_aux_loss_coef": Bounds(0, _COEFFICIENT),
    "algo.epochs": _whole(1, 10_000),
    "algo.num_minibatches": _whole(1, _COUNT),
    "learner.gradient_accumulation_steps": _whole(1, _COUNT),
    "learner.tokens_per_batch": _whole(0, _COUNT),
    "optimizer.learning_rate": Bounds(0, 100),
    "optimizer.warmup_steps": _whole(0, _COUNT),
    "optimizer.b1": Bounds(0, _BELOW_1),
    "optimizer.b2": Bounds(0, _BELOW_1),
    "optimizer.weight_decay": Bounds(0, _COEFFICIENT),
    "optimizer.clip_norm": Bounds(1e-6, 1e30),
    "lora.rank": _whole(0, 4096),
    "lora.alpha": _above(0, 1e6),
    "sft.steps": _whole(0, _COUNT),
    "sft.questions": _whole(1, _QUESTIONS),
    "sft.batch_size": _whole(1, _COUNT),
    "sft.learning_rate": Bounds(0, 100),
    "sft.warmup_steps": _whole(0, _COUNT),
    "optimizer.end_fraction": Bounds(0, 1),
    "sft.end_fraction": Bounds(0, 1),
    "sft.b2": Bounds(0, _BELOW_1),
    "sft.weight_decay": Bounds(0, _COEFFICIENT),
    "sft.evaluations": _whole(1, 1_000_000),
    "eval.questions": _whole(1, _QUESTIONS),
    "eval.batch_size": _whole(1, _COUNT),
    "eval.samples": _whole(1, 1_000_000),
    "eval.temperature": Bounds(1e-6, 100),
    "eval.top_p": _above(0, 1),
    "eval.every": _whole(1, _COUNT),
    # Parameters of functions (fp8rl_jax/rl/, quant/scaling.py) that are not fields.
    "sapo.tau_positive": _above(0, 1e6),
    "sapo.tau_negative": _above(0, 1e6),
    # A correction must do nothing at zero drift, where ratios are 1, so its bounds include 1.
    "tis.cap": Bounds(1, _RATIO),
    "tis.low": Bounds(0, 1),
    "tis.ess": Bounds(0, 1),
    "seq_tis.cap": Bounds(1, _RATIO),
    "icepop.low": Bounds(0, 1),
    "icepop.high": Bounds(1, _RATIO),
    "mask_sequence.low": Bounds(0, 1),
    "mask_sequence.high": Bounds(1, _RATIO),
    "mask_geometric.low": Bounds(0, 1),
    "mask_geometric.high": Bounds(1, _RATIO),
    "mask_k3.most": Bounds(0, _RATIO),
    "veto.least": Bounds(0, 1),
    "opsm.delta": Bounds(0, _RATIO),
    "overlong_penalty.max_length": _whole(1, _COUNT),
    "overlong_penalty.buffer": _whole(0, _COUNT),
    "overlong_penalty.factor": Bounds(0, 1e6),
    "seq_mean_token_sum_norm.length": _whole(1, _COUNT),
    "mismatch_metrics.tis_cap": _above(0, _RATIO),
    "delayed.history": _whole(1, 2**16),
    "delayed.margin": Bounds(-64, 64),
    "static.amax": Bounds(1e-30, 1e30),
}


def shown(value: Any) -> str:
    """Formats a value for an error message; a very long integer as its number of digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        digits = int(abs(value).bit_length() * math.log10(2)) + 1
        return f"a number of about {digits} digits"
    return repr(value)


def check_number(name: str, value: Any) -> None:
    """Raises UserError if the number is outside the bounds of `BOUNDS[name]`."""
    _check(BOUNDS[name], f"{name} is {shown(value)};", value)


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
    own = {name: f"{function.__name__}.{name}" for name in signature.parameters}
    named = {
        name: found
        for name, key in own.items()
        if (found := key if key in BOUNDS else f"algo.{name}") in BOUNDS
    }

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any):
        given = signature.bind(*arguments, **keywords)
        for name, key in named.items():
            if name in given.arguments:
                value = given.arguments[name]
                if value == "auto" and takes_auto(signature.parameters[name]):
                    continue
                if not isinstance(value, numbers.Real):
                    raise TypeError(f"{function.__name__}: {name} is {value!r}; write a number")
                _check(BOUNDS[key], f"{function.__name__}({name}={shown(value)}):", value)
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
