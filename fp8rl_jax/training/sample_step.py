"""Samples and rewards the responses of an RL step; with dynamic sampling, in several rounds.

DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): a group whose rewards are all equal has no
gradient, so further questions are sampled instead until there are enough groups, or
`algo.dynamic_sampling_rounds` are over. Missing groups are then filled up with groups without a
gradient, which do not count. Every round runs the same compiled program; samples are numbered
across rounds, so that no two samples of a step share a random key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.data import Stream
from fp8rl_jax.envs import Tally
from fp8rl_jax.rl import informative_groups
from fp8rl_jax.rollout import Progress, Rollout
from fp8rl_jax.training import partial
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.partial import Responses
from fp8rl_jax.training.rewards import Rewards
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.step_record import StepRecord


@dataclasses.dataclass
class Samples(Responses):
    """Complete responses and their rewards.

    Attributes:
      rewards: (P, G) float64; nan for a response that was not scored.
      by_name: {name: (P, G)}, each reward without its weight.
      counts: (P,) bool, groups that count.
      learner_logprobs: (B, R) float32, under the learner of the version that drew them; None if
        that was not computed.
      turns: (B, K), what the environment gave for each reply of a response, 0 where there was none;
        None for responses of one reply.
    """

    rewards: np.ndarray
    by_name: dict[str, np.ndarray]
    counts: np.ndarray
    turns: np.ndarray | None = None
    learner_logprobs: np.ndarray | None = None

    def groups(self, chosen: np.ndarray) -> Samples:
        """Returns the groups at the indices `chosen`, in that order."""
        size = self.rewards.shape[1]
        rows = (chosen[:, None] * size + np.arange(size)).reshape(-1)
        prompts = self.prompts
        return Samples(
            [self.questions[i] for i in chosen],
            _take(self.rollout, rows),
            self.versions[rows],
            Prompts(
                prompts.tokens[chosen],
                prompts.lengths[chosen],
                prompts.key,
                prompts.temperature[rows],
                prompts.first_ids[chosen],
            ),
            self.rewards[chosen],
            {name: values[chosen] for name, values in self.by_name.items()},
            self.counts[chosen],
            None if self.turns is None else self.turns[rows],
        )


def sample_step(
    runtime: Runtime,
    weights: Any,
    version: int,
    stream: Stream,
    keys: Callable[[int], jax.Array],
    record: StepRecord,
    show: Callable[[Progress], None],
    begun: Sequence[Responses] = (),
) -> tuple[Samples, list[Responses]]:
    """Samples and rewards `rollout.prompts_per_step` groups; returns them, and the responses of
    later steps that were begun.

    Args:
      runtime: result of `make_runtime`.
      weights, version: the sampler's weights, and the step of their state (`Served`).
      stream: stream of questions; each round takes a batch.
      keys: function from a step to its random key.
      record: record that gets times and metrics of the samples.
      show: function called with the progress of a continuous rollout.
      begun: responses of this and later steps that were begun before; see partial.py.

    Raises:
      RewardError: every call of a reward failed, or no response was scored.
    """
    config, step = runtime.config, record["step"] - 1
    tally = Tally(f"RL step {record['step']}")
    wanted = config.rollout.prompts_per_step
    limit = config.algo.dynamic_sampling_rounds if config.algo.dynamic_sampling else 1
    last = max(step + 1, min(step + config.rollout.most_versions, config.run.steps))
    begun, known = list(begun), sum(b.drawn for b in begun)
    for number in range(step + len(begun), last):
        begun.append(Responses.new(runtime, stream.next(), keys(number)))
    given = runtime, weights, version
    samples, later = _round(*given, begun, record, show, tally)
    rounds = [samples]
    while len(rounds) < limit and sum(r.counts.sum() for r in rounds) < wanted:
        first = len(rounds) * len(samples.versions)
        another = Responses.new(runtime, stream.next(), keys(step), first)
        rounds.append(_round(*given, [another], record, show, tally)[0])
    tally.check()
    everything = _joined(rounds)
    if np.isnan(everything.rewards).all():
        raise tally.nothing_scored("no response")
    record.add_rollout(everything.rollout, everything.rewards, everything.by_name)
    if config.rollout.most_versions > 1:
        record.add_versions(samples.versions, samples.drawn + sum(b.drawn for b in later) - known)
    if runtime.step is not None:
        record.add_turns(everything.rollout.mask)
    if not config.algo.dynamic_sampling:
        return everything, later
    # Groups that count come first, each kind in the order of sampling.
    order = np.argsort(~everything.counts, kind="stable")[:wanted]
    chosen = everything.groups(order)
    record["dynamic_rounds"] = len(rounds)
    record["dynamic_discarded_groups"] = len(everything.counts) - wanted
    record["dynamic_filled_groups"] = int(wanted - chosen.counts.sum())
    return chosen, later


def _round(
    runtime: Runtime, weights, version: int, begun: Sequence[Responses], record, show, tally
) -> tuple[Samples, list[Responses]]:
    """Completes and rewards the first of `begun`; returns it, and the others."""
    config, first = runtime.config, begun[0]
    group, several = config.rollout.group_size, config.rollout.most_versions > 1
    rows = len(first.versions)
    own = partial.own_rows(runtime, rows)
    of_rows = [q for q in first.questions for _ in range(group)]
    rewards = Rewards(runtime.text.decode, of_rows, runtime.rewards, own)

    conversations = runtime.conversations(of_rows, own, tally)

    def watch(progress: Progress) -> None:
        if conversations is None:
            rewards.add(progress.rollout, np.asarray(progress.done))
        show(progress)

    later, turns = list[Responses](), None
    with record.timed("rollout"):
        if several:
            first, *later = partial.complete(runtime, weights, version, begun, watch)
            rollout = first.rollout
        else:
            rollout = runtime.engine.sample(weights, first.prompts, watch, conversations)
    with record.timed("reward"):
        if conversations is None:
            rewards.add(rollout, np.ones(rows, bool))
            scores, by_name = rewards.result(tally)
        else:
            rollout, conversed = conversations.result(rollout)
            scores, by_name = conversed.scored(rewards, tally)
            turns = conversed.rewards
            record.add_conversations(conversed)
    record["reward_errors"] = tally.errors
    values = scores.reshape(-1, group)
    counts = np.ones(len(first.questions), bool)
    if config.algo.dynamic_sampling:
        counts = informative_groups(values)
    by_name = {name: x.reshape(-1, group) for name, x in by_name.items()}
    if not several:
        first = first.goes_on(rollout, version)
    samples = Samples(**vars(first), rewards=values, by_name=by_name, counts=counts, turns=turns)
    return samples, later


def _joined(rounds: list[Samples]) -> Samples:
    if len(rounds) == 1:
        return rounds[0]

    def join(values, names) -> dict[str, np.ndarray]:
        return {name: np.concatenate([getattr(v, name) for v in values]) for name in names}

    arrays: dict[str, Any] = join(rounds, ("versions", "rewards", "counts"))
    if turns := [r.turns for r in rounds if r.turns is not None]:
        most = max(x.shape[1] for x in turns)
        padded = (np.pad(x, ((0, 0), (0, most - x.shape[1]))) for x in turns)
        arrays["turns"] = np.concatenate([*padded])
    asked = join([r.prompts for r in rounds], ("tokens", "lengths", "temperature", "first_ids"))
    prompts = Prompts(key=rounds[0].prompts.key, **asked)
    rollouts = [r.rollout for r in rounds]
    taps = {n: jnp.concatenate([r.taps[n] for r in rollouts], 1) for n in rollouts[0].taps}
    rows: dict[str, Any] = join(rollouts, rollouts[0].rows)
    rollout = dataclasses.replace(rollouts[0], taps=taps, **rows)
    by_name = {n: np.concatenate([r.by_name[n] for r in rounds]) for n in rounds[0].by_name}
    questions = [q for r in rounds for q in r.questions]
    return Samples(questions, rollout, prompts=prompts, by_name=by_name, **arrays)


def _take(rollout: Rollout, rows: np.ndarray) -> Rollout:
    """Returns rows of a rollout whose taps are all (L, B, ...)."""
    fields = {name: array[rows] for name, array in rollout.rows.items()}
    taps = {name: x[:, rows] for name, x in rollout.taps.items()}
    return dataclasses.replace(rollout, taps=taps, **fields)
