"""The table of metrics: every number that a run writes into its JSON lines.

`metrics.jsonl` has a line for each RL step, `sft.jsonl` for each update of supervised fine-tuning,
`eval.jsonl` for each evaluation and set of held-out questions, `samples.jsonl` for each transcript.
docs/reference/metrics.md is this table.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """One key of a line, or a family of keys.

    Attributes:
      name: the key; a word in capitals stands for any text, K for a number.
      unit: of the value; "share" is a number from 0 to 1, "text" a string.
      meaning: what the value is.
      when: what a run must have for the key to be written; empty for always.
      panel: heading of the section of report.html that plots it; empty for none.
    """

    name: str
    unit: str
    meaning: str
    when: str = ""
    panel: str = ""


_DRIFT = "Drift between rollout and learner"
_HEALTH = "FP8 health"
_CLASS = "CLASS is activations, gradients, weights or kv"
_FP8 = "an FP8 recipe and precision.health"
_DYNAMIC = "algo.dynamic_sampling"
_EXPERTS = "a model with experts"
_CONTINUOUS = "continuous batching"
_CORRECTED = "a correction, by its NAME"

METRICS = (
    Metric("step", "steps", "number of the RL step, from 1"),
    # Rewards and responses
    Metric("reward_mean", "reward", "mean reward of the responses that were scored", "", "Reward"),
    Metric("reward_std", "reward", "standard deviation of these rewards"),
    Metric("reward/NAME", "reward", "mean of one reward, by its NAME", "several rewards"),
    Metric("reward_errors", "calls", "calls of rewards that failed"),
    Metric(
        "reward_unscored",
        "responses",
        "responses without a reward, which count nowhere",
        "a response that was not scored",
    ),
    Metric(
        "group_zero_std_frac",
        "share",
        "groups whose rewards are all equal: no gradient from them",
        "",
        "Reward",
    ),
    Metric("response_len_mean", "tokens", "mean length of the responses", "", "Reward"),
    Metric("response_len_max", "tokens", "longest response", "", "Reward"),
    Metric("truncated_frac", "share", "responses cut off at rollout.max_new_tokens", "", "Reward"),
    Metric("overlong_penalty_mean", "reward", "mean reward lost to length", "algo.overlong_buffer"),
    Metric("dynamic_rounds", "rollouts", "rollouts of the step", _DYNAMIC),
    Metric(
        "dynamic_discarded_groups", "groups", "groups sampled beyond those of the step", _DYNAMIC
    ),
    Metric(
        "dynamic_filled_groups", "groups", "groups that fill up the step and do not count", _DYNAMIC
    ),
    # Advantages and corrections
    Metric("advantage_mean", "1", "mean advantage over response tokens"),
    Metric("advantage_std", "1", "standard deviation over response tokens"),
    Metric("advantage_abs_max", "1", "largest absolute advantage"),
    Metric("advantage_nonzero_frac", "share", "response tokens whose advantage is not 0"),
    Metric("kept_tokens_frac", "share", "response tokens that count in the loss"),
    Metric("kept_sequences_frac", "share", "responses with a token that counts"),
    Metric("correction/NAME_mean", "1", "mean weight of the tokens", _CORRECTED),
    Metric("correction/NAME_min", "1", "smallest weight", _CORRECTED),
    Metric("correction/NAME_max", "1", "largest weight", _CORRECTED),
    Metric(
        "correction/NAME_ess", "share", "effective sample size, (sum w)^2 / (n sum w^2)", _CORRECTED
    ),
    Metric("correction/NAME_dropped", "share", "tokens that the correction drops", _CORRECTED),
    # The update
    Metric("loss", "1", "mean loss of the step's updates", "", "Optimiser"),
    Metric("grad_norm", "1", "mean global norm of the gradients, before clipping", "", "Optimiser"),
    Metric("lr", "1", "learning rate of the step's first update", "", "Optimiser"),
    Metric(
        "entropy",
        "nats",
        "mean entropy of the policy at the response tokens, first update",
        "",
        "Optimiser",
    ),
    Metric("ratio_mean", "1", "mean importance ratio of the first update; 1 on policy"),
    Metric("ratio_min", "1", "smallest importance ratio"),
    Metric("ratio_max", "1", "largest importance ratio"),
    Metric(
        "clipfrac_low",
        "share",
        "tokens with ratio below 1 - algo.clip_low and negative advantage",
        "a loss that clips",
        "Optimiser",
    ),
    Metric(
        "clipfrac_high",
        "share",
        "tokens with ratio above 1 + algo.clip_high and positive advantage",
        "a loss that clips",
        "Optimiser",
    ),
    Metric("clipfrac_dual", "share", "tokens at the bound of algo.dual_clip", "algo.dual_clip"),
    Metric(
        "kl_ref",
        "nats",
        "mean divergence from the policy before RL, by algo.kl_estimator",
        "algo.kl_coef, and algo.kl_in=loss",
        "Optimiser",
    ),
    Metric(
        "NAME/K",
        "as NAME",
        "entropy, kl_ref, ratios and clipped shares of the K-th update "
        "of a rollout, from the second on",
        "several updates per rollout",
    ),
    Metric(
        "update_skipped",
        "updates",
        "updates without a token that counts, which change nothing",
        "such an update",
    ),
    Metric(
        "router_aux_loss", "1", "loss that balances the experts' load", "algo.router_aux_loss_coef"
    ),
    Metric("checksum", "integer", "checksum of the quantised weights that the first update read"),
    # Drift
    Metric(
        "train_rollout_logprob_abs_diff",
        "nats",
        "mean |D|; D is a token's log-probability of the train step less that of the rollout",
        "",
        _DRIFT,
    ),
    Metric("train_rollout_logprob_abs_diff_max", "nats", "largest |D|", "", _DRIFT),
    Metric(
        "logprob_equal_frac",
        "share",
        "tokens whose two log-probabilities have the same bits",
        "",
        _DRIFT,
    ),
    Metric("token_mult_prob_error", "1", "mean exp|D|; 1 without drift"),
    Metric("mismatch_kl", "nats", "mean of exp(D) - D - 1"),
    Metric("mismatch_k1", "nats", "mean of -D"),
    Metric("chi2_token", "1", "mean of exp(2D) - 1"),
    Metric("ess_ratio", "share", "effective sample size of the weights exp(D)"),
    Metric("tis_clipfrac", "share", "tokens whose exp(D) is above 2"),
    Metric("tis_weight_mean", "1", "mean of exp(D), at most 2 each"),
    Metric("tis_weight_max", "1", "largest exp(D), at most 2"),
    Metric("drift_tokens", "tokens", "response tokens compared"),
    Metric(
        "refit_checksum_ok",
        "boolean",
        "the train step read the bytes that the sampler had",
        "recipes with equal forward passes",
    ),
    # Quantisation
    Metric(
        "fp8_saturated_frac/CLASS",
        "share",
        f"elements clipped to the largest FP8 value; {_CLASS}",
        _FP8,
        _HEALTH,
    ),
    Metric(
        "fp8_underflow_frac/CLASS",
        "share",
        f"elements that were not 0 and became 0; {_CLASS}",
        _FP8,
        _HEALTH,
    ),
    Metric("fp8_nonfinite_blocks/CLASS", "blocks", f"blocks that hold NaN or inf; {_CLASS}", _FP8),
    Metric(
        "fp8_worst_layer/CLASS",
        "text",
        f"layer that lost most; {_CLASS}",
        f"{_FP8}, where something was lost",
    ),
    Metric(
        "scale_age/CLASS",
        "steps",
        "age of the oldest scale: optimiser steps since it saw an "
        "amax; for kv: RL steps since calibration",
        "delayed or calibrated scales",
    ),
    # Experts
    Metric(
        "expert_load_max",
        "1",
        "largest load of an expert over the mean of its layer, in the worst layer",
        _EXPERTS,
        "Experts",
    ),
    Metric("expert_load_max_mean", "1", "the same, mean over the layers", _EXPERTS, "Experts"),
    Metric(
        "expert_load_entropy",
        "share",
        "entropy of the load over its maximum, mean over the layers; 1 if balanced",
        _EXPERTS,
        "Experts",
    ),
    Metric("expert_load_worst", "text", "layer and expert with the largest load", _EXPERTS),
    Metric("experts_unused_frac", "share", "experts without a token", _EXPERTS, "Experts"),
    # Continuous batching
    Metric(
        "rollout_slots_used",
        "share",
        "slots and turns that drew a token",
        _CONTINUOUS,
        "Continuous batching",
    ),
    Metric(
        "rollout_preemptions",
        "times",
        "responses that lost their pages and were computed anew",
        _CONTINUOUS,
        "Continuous batching",
    ),
    Metric("rollout_prefilled", "tokens", "tokens prefilled", _CONTINUOUS),
    # Time
    Metric("time_step", "s", "the step, from its first part to its last", "", "Time"),
    Metric("time_rollout", "s", "sampling", "", "Time"),
    Metric("time_reward", "s", "scoring that was not done during sampling", "", "Time"),
    Metric(
        "time_old_logprobs",
        "s",
        "log-probabilities before the update and of the reference",
        "",
        "Time",
    ),
    Metric("time_learner", "s", "updates", "", "Time"),
    Metric("time_refit", "s", "quantising the sampler's weights", "", "Time"),
    Metric(
        "time_calibrate",
        "s",
        "calibration of KV scales",
        "precision.kv_cache=fp8_calibrated",
        "Time",
    ),
    Metric(
        "calibrate_frac",
        "share",
        "time_calibrate over time_step",
        "precision.kv_cache=fp8_calibrated",
    ),
    Metric("tokens_per_s_rollout", "tokens/s", "response tokens over time_rollout", "", "Time"),
    Metric("tokens_per_s_learner", "tokens/s", "response tokens over time_learner", "", "Time"),
)

SFT_METRICS = (
    Metric("step", "steps", "number of the update, from 1"),
    Metric(
        "loss",
        "nats",
        "mean negative log-probability of a demonstration's tokens",
        "",
        "Supervised fine-tuning",
    ),
    Metric(
        "grad_norm",
        "1",
        "global norm of the gradient, before clipping",
        "",
        "Supervised fine-tuning",
    ),
    Metric("lr", "1", "learning rate of the update", "", "Supervised fine-tuning"),
    Metric("time_step", "s", "the update"),
)

_ACCURACY = "Held-out accuracy"
_MAJORITY = "eval.samples above 1, and a reward that extracts answers"
EVAL_METRICS = (
    Metric("phase", "text", "sft or rl"),
    Metric("step", "steps", "step of that phase after which it was made"),
    Metric("set", "text", "name of the set of questions", "several sets in env.eval_task"),
    Metric("accuracy_greedy", "reward", "mean reward of greedy answers", "", _ACCURACY),
    Metric("accuracy_greedy_se", "reward", "its standard error"),
    Metric("accuracy_sampled", "reward", "mean reward of sampled answers", "", _ACCURACY),
    Metric(
        "accuracy_sampled_se", "reward", "its standard error; samples of a question are one cluster"
    ),
    Metric(
        "pass@K",
        "share",
        "probability that one of K samples is right (reward above 0.5), "
        "for K = 1, 2, 4, ... and eval.samples",
    ),
    Metric("pass@K_se", "share", "its standard error"),
    Metric(
        "maj@K", "share", "questions whose most frequent answer of K samples is right", _MAJORITY
    ),
    Metric("maj@K_se", "share", "its standard error", _MAJORITY),
    Metric("questions", "questions", "questions that count"),
    Metric(
        "questions_unscored", "questions", "questions left out", "a response that was not scored"
    ),
    Metric("response_len_mean", "tokens", "mean length of sampled answers"),
    Metric("reward_errors", "calls", "calls of the reward that failed"),
    Metric("time_eval", "s", "the evaluation"),
    Metric("tokens_per_s_eval", "tokens/s", "throughput without the batch that compiles"),
)

SAMPLE_KEYS = (
    Metric("phase", "text", "sft or rl"),
    Metric("step", "steps", "step of that phase"),
    Metric("set", "text", "name of the set of questions", "several sets in env.eval_task"),
    Metric("prompt", "text", "the question"),
    Metric("response", "text", "the first sampled answer"),
    Metric("answer", "text", "the right answer"),
    Metric("reward", "reward", "of the response; null if it was not scored"),
)

# {name of a file without .jsonl: its keys}.
FILES = {"metrics": METRICS, "sft": SFT_METRICS, "eval": EVAL_METRICS, "samples": SAMPLE_KEYS}


def find(file: str, key: str) -> Metric | None:
    """The entry of a key of `file`.jsonl, such as 'metrics' and 'reward_mean'; None without one."""
    matching = (metric for metric in FILES[file] if _pattern(metric.name).fullmatch(key))
    return next(matching, None)


def _pattern(name: str) -> re.Pattern:
    """The keys that a name with placeholders stands for."""
    return re.compile(
        re.sub("[A-Z]+", lambda word: r"\d+" if word[0] == "K" else ".+", re.escape(name))
    )
