"""Samples and rewards the responses of an RL step; with dynamic sampling, in several rounds.

DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): a group whose rewards are all equal has no
gradient, so further questions are sampled instead until there are enough groups, or
`algo.dynamic_sampling_rounds` are over. Missing groups are then filled up with groups without a
gradient, which do not count. Every round runs the same compiled program; samples are numbered
across rounds, so that no two samples of a step share a random key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.data import Stream
from fp8rl_jax.envs import Tally
from fp8rl_jax.rl import informative_groups, reply_numbers
from fp8rl_jax.rollout import Progress, Rollout
from fp8rl_jax.training import partial
from fp8rl_jax.training.conversations import Conversed
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.partial import Responses
from fp8rl_jax.training.rewards import Rewards
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.step_metrics import Metrics, Times, rollout_metrics, version_metrics


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
            questions=[self.questions[i] for i in chosen],
            rollout=_take(self.rollout, rows),
            versions=self.versions[rows],
            prompts=Prompts(
                prompts.tokens[chosen],
                prompts.lengths[chosen],
                prompts.key,
                prompts.temperature[rows],
                prompts.first_ids[chosen],
            ),
            rewards=self.rewards[chosen],
            by_name={name: values[chosen] for name, values in self.by_name.items()},
            counts=self.counts[chosen],
            turns=None if self.turns is None else self.turns[rows],
        )


class Version(NamedTuple):
    """A version of the policy, as a rollout draws with it.

    Attributes:
      weights: the sampler's weights.
      number: the step of the state that they were made from.
      rng: the state's random numbers (`TrainState.rng`), on the host.
    """

    weights: Any
    number: int
    rng: np.ndarray


def rollout_key(rng: jax.Array | np.ndarray, step: int) -> jax.Array:
    """Returns the random key of a step's rollout; `rng` is `TrainState.rng`."""
    key = jax.random.wrap_key_data(jnp.asarray(rng), impl="threefry2x32")
    return jax.random.fold_in(key, step)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A finished rollout, the result of `sample_step`.

    Attributes:
      samples: the step's responses and their rewards.
      later: responses of later steps that were begun.
      metrics: metrics of both, and the times of the parts.
      position: position of the stream of questions after it.
    """

    samples: Samples
    later: list[Responses]
    metrics: dict[str, Any]
    position: int


def sample_step(
    runtime: Runtime,
    version: Version,
    stream: Stream,
    step: int,
    show: Callable[[Progress], None],
    begun: Sequence[Responses] = (),
) -> Drawn:
    """Samples and rewards `rollout.prompts_per_step` groups.

    Args:
      runtime: result of `make_runtime`.
      version: the version of the policy that draws.
      stream: stream of questions; each round takes a batch.
      step: number of RL steps before this one.
      show: function called with the progress of a continuous rollout.
      begun: responses of this and later steps that were begun before; see partial.py.

    Raises:
      RewardError: every call of a reward failed, or no response was scored.
    """
    config = runtime.config
    wanted = config.rollout.prompts_per_step
    limit = config.algo.dynamic_sampling_rounds if config.algo.dynamic_sampling else 1
    last = max(step + 1, min(step + config.rollout.most_versions, config.run.steps))
    tally = Tally(f"RL step {step + 1}")
    times = Times()
    drawn_before = sum(responses.drawn for responses in begun)
    begun = list(begun)
    with jax.default_device(runtime.mesh.local_devices[0]):  # the learner's may be busy
        keys = [rollout_key(version.rng, number) for number in range(step, last)]
    for key in keys[len(begun) :]:
        begun.append(Responses.new(runtime, stream.next(), key))
    rounds = [_round(runtime, version, begun, times, show, tally)]
    while len(rounds) < limit and sum(r.samples.counts.sum() for r in rounds) < wanted:
        first = len(rounds) * len(rounds[0].samples.versions)
        another = Responses.new(runtime, stream.next(), keys[0], first)
        rounds.append(_round(runtime, version, [another], times, show, tally))
    tally.check()
    samples = rounds[0].samples if len(rounds) == 1 else _joined([r.samples for r in rounds])
    if np.isnan(samples.rewards).all():
        raise tally.nothing_scored("no response")
    later = rounds[0].later
    drawn = samples.drawn - drawn_before + sum(responses.drawn for responses in later)
    metrics = times | _metrics(runtime, samples, rounds)
    metrics["reward_errors"] = tally.errors
    metrics["tokens_per_s_rollout"] = drawn / times["time_rollout"]
    if config.algo.dynamic_sampling:
        # Groups that count come first, each kind in the order of sampling.
        samples = samples.groups(np.argsort(~samples.counts, kind="stable")[:wanted])
        metrics["dynamic_filled_groups"] = int(wanted - samples.counts.sum())
    return Drawn(samples, later, metrics, stream.position)


def _metrics(runtime: Runtime, samples: Samples, rounds: list[_Round]) -> Metrics:
    """Returns metrics of the responses of all rounds, and how the last used its slots."""
    config = runtime.config
    mask = samples.rollout.mask
    metrics = rollout_metrics(mask, samples.rollout.finished, samples.rewards, samples.by_name)
    if config.rollout.most_versions > 1:
        metrics |= version_metrics(samples.versions)
    if runtime.resolved.step is not None:
        metrics["turns_mean"] = float(reply_numbers(mask)[:, -1].mean() + 1)
        metrics["env_errors"] = sum(r.conversed.errors for r in rounds if r.conversed)
        metrics["observations_cut"] = sum(r.conversed.cut for r in rounds if r.conversed)
    if config.algo.dynamic_sampling:
        metrics["dynamic_rounds"] = len(rounds)
        metrics["dynamic_discarded_groups"] = len(samples.counts) - config.rollout.prompts_per_step
    return metrics | runtime.engine.metrics()


class _Round(NamedTuple):
    samples: Samples
    later: list[Responses]
    conversed: Conversed | None


def _round(
    runtime: Runtime,
    version: Version,
    begun: Sequence[Responses],
    times: Times,
    show: Callable[[Progress], None],
    tally: Tally,
) -> _Round:
    """Completes and rewards the first of `begun`; the others go on."""
    config = runtime.config
    first = begun[0]
    group = config.rollout.group_size
    questions = [question for question in first.questions for _ in range(group)]
    rewards = Rewards(runtime.decode, questions, runtime.resolved.rewards, runtime.own_rows, tally)
    conversations = runtime.conversations(questions, runtime.own_rows, tally)

    def watch(progress: Progress) -> None:
        if conversations is None:
            rewards.add(progress.rollout, np.asarray(progress.done))
        show(progress)

    later = list[Responses]()
    with times.of("rollout"):
        if config.rollout.most_versions > 1:
            first, *later = partial.complete(runtime, version.weights, version.number, begun, watch)
        else:
            rollout = runtime.engine.sample(version.weights, first.prompts, watch, conversations)
            first = first.goes_on(rollout, version.number)
    conversed = None
    with times.of("reward"):
        if conversations is None:
            rewards.add(first.rollout, np.ones(len(questions), bool))
            scores, by_name = rewards.result()
        else:
            rollout, conversed = conversations.result(first.rollout)
            first = dataclasses.replace(first, rollout=rollout)
            scores, by_name = conversed.scored(rewards)
    values = scores.reshape(-1, group)
    counts = np.ones(len(first.questions), bool)
    if config.algo.dynamic_sampling:
        counts = informative_groups(values)
    samples = Samples(
        questions=first.questions,
        rollout=first.rollout,
        versions=first.versions,
        prompts=first.prompts,
        rewards=values,
        by_name={name: x.reshape(-1, group) for name, x in by_name.items()},
        counts=counts,
        turns=None if conversed is None else conversed.rewards,
    )
    return _Round(samples, later, conversed)


def _joined(rounds: list[Samples]) -> Samples:
    """Returns the samples of several rounds as those of one."""

    def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([*arrays])

    asked = [r.prompts for r in rounds]
    rollouts = [r.rollout for r in rounds]
    rows: dict[str, Any] = {n: joined(r.rows[n] for r in rollouts) for n in rollouts[0].rows}
    taps = {n: jnp.concatenate([r.taps[n] for r in rollouts], 1) for n in rollouts[0].taps}
    turns = [r.turns for r in rounds if r.turns is not None]
    most = max((x.shape[1] for x in turns), default=0)
    return Samples(
        questions=[question for r in rounds for question in r.questions],
        rollout=dataclasses.replace(rollouts[0], taps=taps, **rows),
        versions=joined(r.versions for r in rounds),
        prompts=Prompts(
            tokens=joined(p.tokens for p in asked),
            lengths=joined(p.lengths for p in asked),
            key=asked[0].key,
            temperature=joined(p.temperature for p in asked),
            first_ids=joined(p.first_ids for p in asked),
        ),
        rewards=joined(r.rewards for r in rounds),
        by_name={n: joined(r.by_name[n] for r in rounds) for n in rounds[0].by_name},
        counts=joined(r.counts for r in rounds),
        turns=joined(np.pad(x, ((0, 0), (0, most - x.shape[1]))) for x in turns) if turns else None,
    )


def _take(rollout: Rollout, rows: np.ndarray) -> Rollout:
    """Returns rows of a rollout whose taps are all (L, B, ...)."""
    taps = {name: x[:, rows] for name, x in rollout.taps.items()}
    fields = {name: array[rows] for name, array in rollout.rows.items()}
    return dataclasses.replace(rollout, taps=taps, **fields)
