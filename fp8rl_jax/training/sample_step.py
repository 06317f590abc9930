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
from fp8rl_jax.training.step_metrics import Times, rollout_metrics, version_metrics


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
    several = config.rollout.most_versions > 1
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
    samples = _joined([r.samples for r in rounds])
    if np.isnan(samples.rewards).all():
        raise tally.nothing_scored("no response")
    later = rounds[0].later
    metrics = times | {"reward_errors": tally.errors}
    metrics |= rollout_metrics(
        samples.rollout.mask, samples.rollout.finished, samples.rewards, samples.by_name
    )
    drawn = samples.drawn
    if several:
        metrics |= version_metrics(samples.versions)
        drawn += sum(responses.drawn for responses in later) - drawn_before
    metrics["tokens_per_s_rollout"] = drawn / times["time_rollout"]
    if runtime.resolved.step is not None:
        replies = reply_numbers(samples.rollout.mask)
        metrics["turns_mean"] = float(replies[:, -1].mean() + 1)
        metrics["env_errors"] = sum(r.conversed.errors for r in rounds if r.conversed)
        metrics["observations_cut"] = sum(r.conversed.cut for r in rounds if r.conversed)
    if config.algo.dynamic_sampling:
        # Groups that count come first, each kind in the order of sampling.
        order = np.argsort(~samples.counts, kind="stable")[:wanted]
        metrics["dynamic_rounds"] = len(rounds)
        metrics["dynamic_discarded_groups"] = len(samples.counts) - wanted
        samples = samples.groups(order)
        metrics["dynamic_filled_groups"] = int(wanted - samples.counts.sum())
    metrics |= runtime.engine.metrics()
    return Drawn(samples, later, metrics, stream.position)


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
    config, first = runtime.config, begun[0]
    group = config.rollout.group_size
    rows = len(first.versions)
    own = runtime.own_rows
    of_rows = [q for q in first.questions for _ in range(group)]
    rewards = Rewards(runtime.decode, of_rows, runtime.resolved.rewards, own)
    conversations = runtime.conversations(of_rows, own, tally)

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
            rewards.add(first.rollout, np.ones(rows, bool))
            scores, by_name = rewards.result(tally)
        else:
            rollout, conversed = conversations.result(first.rollout)
            first = dataclasses.replace(first, rollout=rollout)
            scores, by_name = conversed.scored(rewards, tally)
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
