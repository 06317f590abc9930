"""The table of metrics: every number that a run writes into its JSON lines.

`metrics.jsonl` has a line for each RL step, `sft.jsonl` for each update of supervised fine-tuning,
`eval.jsonl` for each evaluation and set of held-out questions, `samples.jsonl` for each transcript,
`rewards.jsonl` and `digests.jsonl` for each RL step.
The report's sections, the live line in a terminal and docs/reference/metrics.md follow this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """One key of a line, or a family of keys.

    Attributes:
      name: the key; a word in capitals stands for any text, K for a number.
      unit: unit of the value; "share" is a number from 0 to 1, "text" a string.
      meaning: description of the value.
      panel: title of the plot of report.html that draws it; empty for none.
      live: format of the value in the live line, which leaves out what a step did not write; empty
        for none.
      when: condition under which a run writes the key; empty for always.
    """

    name: str
    unit: str
    meaning: str
    panel: str = ""
    live: str = ""
    when: str = ""

    def among(self, keys: Iterable[str]) -> list[str]:
        """Returns those of `keys` that the name stands for."""
        pattern = re.sub("[A-Z]+", lambda word: r"\d+" if word[0] == "K" else ".+", self.name)
        return [key for key in keys if re.fullmatch(pattern, key, re.DOTALL)]


def _only_with(when: str, *metrics: Metric) -> tuple[Metric, ...]:
    """Gives metrics the same `when`."""
    return tuple(metric._replace(when=when) for metric in metrics)


DRIFT_MEAN = "train_rollout_logprob_abs_diff"
DRIFT_MAX = "train_rollout_logprob_abs_diff_max"

_LENGTH = "Response length, tokens"
_UNSCORED = "a response that was not scored"
_TURNS = "env.max_turns above 1"
_REWARD = (
    Metric("step", "steps", "number of the RL step, from 1"),
    Metric("reward_mean", "reward", "mean reward of scored responses", "Reward", "reward {:.3f}"),
    Metric("reward_std", "reward", "standard deviation of these rewards"),
    Metric(
        "reward/NAME",
        "reward",
        "mean of one reward, by its NAME; env: of env.step",
        when="several rewards",
    ),
    Metric("reward_errors", "calls", "calls of rewards and of the environment that failed"),
    Metric("reward_unscored", "responses", "without a reward, which count nowhere", when=_UNSCORED),
    Metric(
        "turns_mean", "replies", "replies of a response", "Replies", "turns {:.1f}", when=_TURNS
    ),
    Metric("env_errors", "calls", "steps of the environment that failed", when=_TURNS),
    Metric("observations_cut", "texts", "cut at rollout.max_observation_tokens", when=_TURNS),
    Metric("response_len_mean", "tokens", "mean number of tokens drawn for a response", _LENGTH),
    Metric("response_len_max", "tokens", "longest response", _LENGTH),
    Metric("group_zero_std_frac", "share", "groups of equal rewards, without a gradient", "Shares"),
    Metric("truncated_frac", "share", "responses whose end a limit of tokens cut off", "Shares"),
    Metric(
        "overlong_penalty_mean", "reward", "mean reward lost to length", when="algo.overlong_buffer"
    ),
    *_only_with(
        "algo.dynamic_sampling",
        Metric("dynamic_rounds", "rollouts", "rollouts of the step"),
        Metric("dynamic_discarded_groups", "groups", "sampled beyond those of the step"),
        Metric("dynamic_filled_groups", "groups", "that fill up the step and do not count"),
    ),
)

_ABSOLUTE = "|Δlogp| of a token, nats"
_DRIFT = (
    Metric(DRIFT_MAX, "nats", "largest |D|", _ABSOLUTE, "drift {:.1e}"),
    Metric(
        DRIFT_MEAN,
        "nats",
        "mean |D|; D is a token's log-probability of the train step less that of the rollout",
        _ABSOLUTE,
    ),
    Metric(
        "logprob_equal_frac",
        "share",
        "tokens whose two log-probabilities have the same bits",
        "Share of tokens with other bits",
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
    *_only_with(
        "rollout.ahead, in place of those above but in every run.check_every-th step, or "
        "rollout.most_versions, beside those above for tokens of the newest version",
        Metric(
            "staleness_abs_diff",
            "nats",
            "mean |D|, where D is a token's log-probability of the train step less that of the "
            "older policy that drew it",
            _ABSOLUTE,
        ),
        Metric("staleness_abs_diff_max", "nats", "largest of these |D|"),
        Metric("staleness_kl", "nats", "mean of exp(D) - D - 1"),
        Metric("staleness_ess", "share", "effective sample size of the weights exp(D)"),
    ),
    *_only_with(
        "rollout.ahead with recipes that differ, for rollouts of a run.check_every-th step",
        Metric(
            "learner_change_abs_diff",
            "nats",
            "mean |D|, where D is a token's log-probability of the train step less that of the "
            "same recipe with the weights that drew it: staleness without mismatch",
        ),
        Metric("learner_change_kl", "nats", "mean of exp(D) - D - 1"),
    ),
    Metric(
        "refit_checksum_ok",
        "boolean",
        "the train step read the bytes that the sampler had",
        when="recipes with equal forward passes",
    ),
    Metric(
        "refit_changed_bytes",
        "share",
        "FP8 bytes of the sampler's weights that the step changed, of a part of a middle layer",
        when="a rollout with FP8 weights",
    ),
)

_FP8 = "an FP8 recipe and precision.health"
_HEALTH = (
    Metric(
        "fp8_saturated_frac/CLASS",
        "share",
        "elements clipped to the largest FP8 value; CLASS is activations, gradients, weights or kv",
        "Saturated share",
        when=_FP8,
    ),
    Metric(
        "fp8_underflow_frac/CLASS", "share", "elements that became 0", "Underflow share", when=_FP8
    ),
    Metric("fp8_nonfinite_blocks/CLASS", "blocks", "blocks that hold NaN or inf", when=_FP8),
    Metric("fp8_worst_layer/CLASS", "text", "layer that lost most", when="a lost element"),
    Metric(
        "scale_age/CLASS",
        "steps",
        "age of the oldest scale: optimiser steps since it saw an amax; for kv: RL steps since "
        "calibration",
        when="delayed or calibrated scales",
    ),
)

_LOAD = "Largest load over the mean"
_EXPERTS = _only_with(
    "a model with experts",
    Metric("expert_load_max", "1", "largest load over its layer's mean, in the worst layer", _LOAD),
    Metric("expert_load_max_mean", "1", "the same, mean over the layers", _LOAD),
    Metric(
        "expert_load_entropy",
        "share",
        "entropy of the load over its maximum, mean over the layers; 1 if balanced",
        "Entropy of the load",
    ),
    Metric("expert_load_worst", "text", "layer and expert with the largest load"),
    Metric("experts_unused_frac", "share", "experts without a token", "Experts without a token"),
)

_LOOP = _only_with(
    "continuous batching",
    Metric("rollout_slots_used", "share", "slots and turns that drew", "Share of slots that drew"),
    Metric(
        "rollout_preemptions",
        "times",
        "responses that lost their pages and were computed anew",
        "Responses computed anew",
    ),
    Metric("rollout_prefilled", "tokens", "tokens prefilled"),
)
_SLOTS = (
    *_LOOP,
    *_only_with(
        "rollout.most_versions above 1",
        Metric("versions_mean", "versions", "versions of the policy that drew a response"),
        Metric("versions_max", "versions", "most versions that drew a response"),
    ),
)

_SECONDS = "Seconds per step, by phase"
_RATES = "Tokens per second"
_CALIBRATED = "precision.kv_cache=fp8_calibrated"
_TIME = (
    Metric("time_step", "s", "the step, from its first part to its last"),
    Metric("time_rollout", "s", "sampling", _SECONDS),
    Metric("time_reward", "s", "scoring that was not done during sampling", _SECONDS),
    Metric("time_wait", "s", "waiting for a rollout that was ahead", when="rollout.ahead"),
    Metric(
        "time_old_logprobs",
        "s",
        "log-probabilities before the update and of the reference",
        _SECONDS,
    ),
    Metric("time_learner", "s", "updates", _SECONDS),
    Metric("time_refit", "s", "quantising the sampler's weights", _SECONDS),
    Metric("time_calibrate", "s", "calibration of KV scales", _SECONDS, when=_CALIBRATED),
    Metric("calibrate_frac", "share", "time_calibrate over time_step", when=_CALIBRATED),
    Metric("time_compile", "s", "tracing and compiling programs, which the other times contain"),
    Metric(
        "tokens_per_s_rollout",
        "tokens/s",
        "response tokens over time_rollout",
        _RATES,
        "rollout {:.0f} tok/s",
    ),
    Metric("learner_tokens", "tokens", "tokens that the updates computed, padding included"),
    Metric(
        "learner_padding",
        "share",
        "of learner_tokens those that are padding",
        "Padding of the learner",
        "padding {:.0%}",
    ),
    Metric("tokens_per_s_learner", "tokens/s", "response tokens over time_learner", _RATES),
    Metric("tokens_per_s_device_rollout", "tokens/s", "tokens_per_s_rollout over the devices"),
    Metric("tokens_per_s_device_learner", "tokens/s", "tokens_per_s_learner over the devices"),
    Metric("memory_peak", "GiB", "most memory that a device had in use so far", when="a GPU"),
    Metric(
        "mfu_learner",
        "share",
        "FLOPs that the updates need, without padding and recomputing, over time_learner, the "
        "devices and their peak in bf16",
        when="H100 and H200",
    ),
)

_CLIPS = "a loss that clips"
_OPTIMISER = (
    Metric("advantage_mean", "1", "mean advantage over response tokens"),
    Metric("advantage_std", "1", "standard deviation over response tokens"),
    Metric("advantage_abs_max", "1", "largest absolute advantage"),
    Metric("advantage_nonzero_frac", "share", "response tokens whose advantage is not 0"),
    Metric("kept_tokens_frac", "share", "response tokens that count in the loss"),
    Metric("kept_sequences_frac", "share", "responses with a token that counts"),
    *_only_with(
        "a correction, by its NAME",
        Metric("correction/NAME_mean", "1", "mean weight of the tokens"),
        Metric("correction/NAME_min", "1", "smallest weight"),
        Metric("correction/NAME_max", "1", "largest weight"),
        Metric("correction/NAME_ess", "share", "effective sample size, (sum w)^2 / (n sum w^2)"),
        Metric("correction/NAME_dropped", "share", "tokens that the correction drops"),
    ),
    Metric("loss", "1", "mean loss of the step's updates", "Loss"),
    Metric("grad_norm", "1", "mean global norm of gradients, before clipping", "Gradient norm"),
    Metric("lr", "1", "learning rate of the step's first update", "Learning rate"),
    Metric(
        "entropy",
        "nats",
        "mean over response tokens, first update; of the tokens that top-k and top-p keep",
        "Entropy, nats",
    ),
    Metric("ratio_mean", "1", "mean importance ratio of the first update; 1 on policy"),
    Metric("ratio_min", "1", "smallest importance ratio"),
    Metric("ratio_max", "1", "largest importance ratio"),
    Metric(
        "clipfrac_low",
        "share",
        "tokens with ratio below 1 - algo.clip_low and negative advantage",
        "Clipped share",
        when=_CLIPS,
    ),
    Metric(
        "clipfrac_high",
        "share",
        "tokens with ratio above 1 + algo.clip_high and positive advantage",
        "Clipped share",
        when=_CLIPS,
    ),
    Metric(
        "clipfrac_dual",
        "share",
        "tokens at the bound of the loss",
        when="algo.loss=ppo(dual_clip=N)",
    ),
    Metric(
        "kl_ref",
        "nats",
        "mean divergence from the policy before RL, by algo.kl_estimator",
        "KL to the reference",
        when="algo.kl_coef, and algo.kl_in=loss",
    ),
    Metric(
        "teacher_kl",
        "nats",
        "mean divergence from the teacher over the full vocabulary, KL(policy || teacher)",
        "KL to the teacher",
        when="algo.teacher",
    ),
    Metric(
        "NAME/K",
        "as NAME",
        "entropy, kl_ref, ratios and clipped shares of the K-th update of a rollout, from the "
        "second on",
        when="several updates per rollout",
    ),
    Metric(
        "update_skipped", "updates", "updates without a token that counts", when="such an update"
    ),
    Metric("router_aux_loss", "1", "loss to balance the experts", when="algo.router_aux_loss_coef"),
    Metric("checksum", "integer", "checksum of the quantised weights that the first update read"),
)

_SFT = (
    Metric("step", "steps", "number of the update, from 1"),
    Metric("loss", "nats", "mean -log p of a demonstration's tokens", "Loss", "loss {:.3f}"),
    Metric("grad_norm", "1", "global norm of the gradient, before clipping", "Gradient norm"),
    Metric("lr", "1", "learning rate of the update", "Learning rate"),
    Metric("time_step", "s", "the update"),
)

_WHERE = (
    Metric("phase", "text", "sft or rl"),
    Metric("step", "steps", "step of that phase after which it was made"),
    Metric("set", "text", "name of the set of questions", when="several sets in env.eval_task"),
)
_MAJORITY = "eval.samples above 1, and a reward that extracts answers"
_ACCURACY = (
    *_WHERE,
    Metric("accuracy_greedy", "reward", "mean reward of greedy answers", "SFT, RL"),
    Metric("accuracy_greedy_se", "reward", "its standard error"),
    Metric("accuracy_sampled", "reward", "mean reward of sampled answers", "SFT, RL"),
    Metric(
        "accuracy_sampled_se", "reward", "its standard error; samples of a question are one cluster"
    ),
    Metric(
        "pass@K",
        "share",
        "probability that one of K samples is right (reward above 0.5), for K = 1, 2, 4, ... and "
        "eval.samples",
    ),
    Metric("pass@K_se", "share", "its standard error"),
    Metric("maj@K", "share", "questions whose most frequent answer is right", when=_MAJORITY),
    Metric("maj@K_se", "share", "its standard error", when=_MAJORITY),
    Metric("questions", "questions", "questions that count"),
    Metric("questions_unscored", "questions", "questions left out", when=_UNSCORED),
    Metric("response_len_mean", "tokens", "mean length of sampled answers"),
    Metric("reward_errors", "calls", "calls of the reward that failed"),
    Metric("time_eval", "s", "the evaluation"),
    Metric("tokens_per_s_eval", "tokens/s", "throughput without the batch that compiles"),
)

_SAMPLES = (
    *_WHERE,
    Metric("prompt", "text", "the question"),
    Metric("response", "text", "the first sampled answer"),
    Metric("answer", "text", "the right answer"),
    Metric("reward", "reward", "of the response; null if it was not scored"),
)

_REWARDS = (
    Metric("step", "steps", "number of the RL step, from 1"),
    Metric(
        "rewards",
        "reward",
        "of each response, a list for each question; null for one that was not scored",
    ),
    Metric("by_name", "reward", "the same for each reward, without its weight", when="several"),
    Metric(
        "turns", "reward", "what the environment gave for each reply of a response", when=_TURNS
    ),
)

_STEPS = "an RL step"
_DIGESTS = (
    Metric("phase", "text", "sft or rl"),
    Metric("step", "steps", "step of that phase after which the line was written"),
    Metric(
        "made_with",
        "object",
        "configuration, data, code, versions and machine",
        when="the first line, and those that are new when a run is resumed",
    ),
    Metric("state", "digest", "all arrays that a checkpoint holds", when="the start or a step"),
    *_only_with(
        _STEPS,
        Metric("prompts", "digest", "the prompts' tokens"),
        Metric("tokens", "digest", "the drawn tokens and their log-probabilities"),
        Metric("rewards", "digest", "the line of rewards.jsonl"),
        Metric(
            "record",
            "digest",
            "the line of metrics.jsonl without times, rates, memory and counts of the sampler's "
            "loop",
        ),
    ),
    Metric("chain", "SHA-256", "the line and the chain of the line before it"),
)

# {heading of a section of report.html: (file of its metrics, metrics in the order of plots and
# lines)}, in the order of the report.
SECTIONS = {
    "Held-out accuracy": ("eval", _ACCURACY),
    "Reward": ("metrics", _REWARD),
    "Drift between rollout and learner": ("metrics", _DRIFT),
    "FP8 health": ("metrics", _HEALTH),
    "Experts": ("metrics", _EXPERTS),
    "Continuous batching": ("metrics", _SLOTS),
    "Time": ("metrics", _TIME),
    "Optimiser": ("metrics", _OPTIMISER),
    "Supervised fine-tuning": ("sft", _SFT),
}

GAP = "gap"  # key of a record that stands in the place of lost ones
# {name of a file without .jsonl: its metrics}.
FILES = {
    file: [metric for name, section in SECTIONS.values() if name == file for metric in section]
    for file in ("metrics", "sft", "eval")
} | {"samples": [*_SAMPLES], "rewards": [*_REWARDS], "digests": [*_DIGESTS]}
_OF_MACHINE = (*_TIME, *_LOOP)


def find(file: str, key: str) -> Metric | None:
    """Returns the metric of a key of `file`.jsonl ('metrics', 'reward_mean'); None if unknown."""
    return next((metric for metric in FILES[file] if metric.among([key])), None)


def reproducible(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of metrics.jsonl without what the machine's speed, memory and devices decide:
    the metrics of time, and counts of the sampler's loop."""
    left_out = {key for metric in _OF_MACHINE for key in metric.among(record)}
    return {key: value for key, value in record.items() if key not in left_out}


def live_line(file: str, record: dict, accuracy: str) -> str:
    """Formats a record of `file`.jsonl as the live line, with the last held-out accuracies
    (`accuracy`) after its first number."""
    shown = [m.live.format(record[m.name]) for m in FILES[file] if m.live and m.name in record]
    shown.insert(1, f"accuracy {accuracy}")
    return "  ".join(shown).replace("drift 0.0e+00", "drift 0 exactly")
