"""Rollouts that run ahead of the learner by `rollout.ahead` = s steps.

::

    version 0   draws the rollouts of steps 0..s
    version t   draws the rollout of step t + s, while step t learns from what version t - s drew

Which version draws what follows from numbers alone, so a run is a function of configuration and
seed: how long rollouts, rewards and updates take changes nothing, nor does a kill. With s = 0 each
step waits for its own rollout.

On one device rollouts run in a thread, and with `mesh.rollout` on devices of their own. On several
devices that do both, sampling comes before learning, in one thread: programs that exchange data
must be started in one order on all devices.

A run that is told to stop does not wait for rollouts that run beside it: a checkpoint then keeps
the weights that they sample with, and the resumed run draws them again.

With `rollout.most_versions` above 1 a rollout goes on with responses that the one before it has
begun (partial.py).

Not done: processes that only sample, or only learn.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.data import Stream
from fp8rl_jax.learner import TrainState
from fp8rl_jax.rollout import Progress, Rollout
from fp8rl_jax.training.checkpoint import Beside
from fp8rl_jax.training.engine import Prompts, Served
from fp8rl_jax.training.partial import Responses
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.sample_step import Drawn, Samples, Version, sample_step
from fp8rl_jax.training.step_metrics import Times
from fp8rl_jax.training.watch import Watch, unwatched

Weights = Any  # what the sampler takes


class _Stopped(Exception):
    """The run ends, and with it a rollout."""


Show = Callable[[int, Progress], None]  # shows the progress of a step's rollout


def _done(drawn: Drawn) -> concurrent.futures.Future[Drawn]:
    future: concurrent.futures.Future[Drawn] = concurrent.futures.Future()
    future.set_result(drawn)
    return future


class Rollouts:
    """The rollouts that were begun and not yet learnt from, the oldest first.

    Attributes:
      questions: the stream of questions.
      share_weights: whether rollouts sample with the arrays of `Served` during an update.
      watch: looks at the parts of a step.
    """

    def __init__(self, runtime: Runtime, questions: Stream, show: Show, watch: Watch = unwatched):
        self.questions = questions
        self.watch = watch
        self._runtime = runtime
        self._show = show
        self._ahead = runtime.config.rollout.ahead
        self.share_weights = self._ahead > 0 and runtime.rollout_mesh is None
        self._begun: collections.deque[concurrent.futures.Future[Drawn]] = collections.deque()
        self._first = 0  # step of the oldest
        self._learnt: list[Responses] = []  # `later` of the rollout before the oldest
        self._later: list[Responses] = []  # of the newest
        self._failure: Exception | None = None  # of a rollout, and so of those behind it
        self._versions: dict[int, Version] = {}  # that draw, by step, until it is drawn
        self._stopping = False
        self._thread: concurrent.futures.Executor | None = None
        if self._ahead and (runtime.mesh.size == 1 or runtime.rollout_mesh is not None):
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "rollouts")

    def next(self, state: TrainState, served: Served, times: Times) -> Drawn:
        """Begins the rollouts up to that of `state.step + ahead` which were not begun, and returns
        the oldest, which stays until `learnt`.

        Args:
          state: the state before the step, whose random numbers draw.
          served: its weights.
          times: times of the step.
        """
        step = int(state.step)
        rng = np.asarray(state.rng)  # on the host: the update gives away the state's arrays
        if not self._begun:
            self._first = step
        last = min(step + self._ahead, self._runtime.config.run.steps - 1)
        wanted = range(self._first + len(self._begun), last + 1)
        weights = self._runtime.for_sampling(served.weights) if wanted else None
        for number in wanted:
            self._begin(number, Version(weights, int(served.version), rng))
        with times.of("wait") if self._ahead else contextlib.nullcontext():
            drawn = self._begun[0].result()
        # Newer versions draw behind a rollout that failed, or the end of a run that was extended.
        oldest = max(0, step - self._ahead - (self._runtime.config.rollout.most_versions - 1))
        versions = drawn.samples.versions[drawn.samples.rollout.mask]
        assert ((versions >= oldest) & (versions <= step)).all()
        self.watch("sample", step + 1, runtime=self._runtime, drawn=drawn, state=state)
        return drawn

    def _begin(self, step: int, version: Version) -> None:
        self._versions[step] = version
        if self._thread is not None:
            self._begun.append(self._thread.submit(self._draw, step))
        else:
            self._begun.append(_done(self._draw(step)))

    def drawn_by(self, step: int) -> Drawn | None:
        """Waits for the newest rollout; returns it if the state of `step` draws it."""
        newest = self._first + len(self._begun) - 1
        return self._begun[-1].result() if newest == step + self._ahead else None

    def wait(self) -> None:
        """Waits until no rollout runs: an evaluation needs the memory of one."""
        concurrent.futures.wait(self._begun)

    def running(self) -> int:
        """Returns the number of rollouts that are not finished."""
        return sum(not rollout.done() for rollout in self._begun)

    def stop(self) -> None:
        """Ends the rollout that runs in a thread where it looks next, in one process, and begins no
        other; `beside` has what they draw with. One of the static sampler looks nowhere."""
        if self._thread is not None and processes.count() == 1:
            self._stopping = True
            self._thread.shutdown(cancel_futures=True)

    def learnt(self) -> None:
        """Drops the oldest rollout."""
        self._learnt = self._begun.popleft().result().later
        self._first += 1

    def close(self) -> None:
        """Waits for the rollout that runs; begins no other."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _draw(self, step: int) -> Drawn:
        if self._failure is not None:
            raise self._failure
        sampling = self._runtime.sampling

        def show(progress: Progress) -> None:
            if self._stopping:
                raise _Stopped()
            if not self._ahead:
                self._show(step + 1, progress)

        try:
            drawn = sample_step(
                sampling, self._versions[step], self.questions, step, show, self._later
            )
        except Exception as error:
            self._failure = error
            raise
        self._later = drawn.later
        del self._versions[step]
        return drawn

    # For a checkpoint.

    def beside(self) -> Beside:
        """Waits for the rollouts; returns what a checkpoint keeps of them: those before the first
        that fails, the responses that the last of them has begun, and the weights that those draw
        with which `stop` has ended. The error is raised where it is read; a resumed run draws that
        rollout with newer weights.
        """
        if not self._ahead and not self._learnt:
            return Beside()
        places = {id(q): i for i, q in enumerate(self._runtime.questions["train"])}
        later = self._learnt
        arrays: dict[str, np.ndarray] = {}
        rollouts = []
        for index, drawn in enumerate(self._finished()):
            rollouts.append(
                {
                    "metrics": drawn.metrics,
                    "position": drawn.position,
                    "rewards": [*drawn.samples.by_name],
                }
            )
            arrays |= _arrays(f"rollouts/{index}", drawn.samples, places)
            later = drawn.later
        for index, responses in enumerate(later):
            arrays |= _arrays(f"begun/{index}", responses, places)
        unfinished = self._unfinished()
        meta = {
            "rollouts": rollouts,
            "begun": len(later),
            "unfinished": [{"version": v.number, "rng": v.rng.tolist()} for v in unfinished],
        }
        return Beside(meta, arrays, {_of_version(v.number): v.weights for v in unfinished})

    def _finished(self) -> list[Drawn]:
        """Waits for the rollouts; returns those before the first that failed or was ended."""

        def succeeded(future: concurrent.futures.Future[Drawn]) -> bool:
            return not future.cancelled() and future.exception() is None

        return [future.result() for future in itertools.takewhile(succeeded, self._begun)]

    def _unfinished(self) -> list[Version]:
        """Returns the versions that draw the rollouts behind the finished ones, if `stop` ended
        them."""
        finished = len(self._finished())
        begun = list(self._begun)[finished:]
        if not begun or not (begun[0].cancelled() or isinstance(begun[0].exception(), _Stopped)):
            return []
        first = self._first + finished
        return [self._versions[step] for step in range(first, first + len(begun))]

    def restore(
        self,
        step: int,
        meta: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        weights_of: Callable[[str], Weights],
    ) -> None:
        """Takes over what `beside` returned at the checkpoint of `step`, and begins again what was
        not finished. `weights_of`: returns a tree of `Beside.trees` by its name."""
        self._first = step
        self._learnt = [
            Responses(**_fields(f"begun/{index}", arrays, self._runtime))
            for index in range(meta["begun"])
        ]
        self._later = self._learnt
        for index, saved in enumerate(meta["rollouts"]):
            fields = _fields(f"rollouts/{index}", arrays, self._runtime)
            fields["by_name"] = dict(zip(saved["rewards"], fields["by_name"], strict=True))
            self.questions.position = saved["position"]
            drawn = Drawn(Samples(**fields), self._later, saved["metrics"], saved["position"])
            self._begun.append(_done(drawn))
        for saved in meta["unfinished"]:
            rng = np.asarray(saved["rng"], np.uint32)
            weights = weights_of(_of_version(saved["version"]))
            self._begin(step + len(self._begun), Version(weights, saved["version"], rng))


def _of_version(version: int) -> str:
    return f"sampler_{version}"


_PROMPTS = ("tokens", "lengths", "temperature", "first_ids")  # of Prompts
_SAMPLES = ("versions", "rewards", "counts", "turns", "learner_logprobs")  # of Samples


def _arrays(prefix: str, responses: Responses, places: Mapping[int, int]) -> dict[str, np.ndarray]:
    """Returns the arrays of `Samples`, or of responses that were begun, by names that begin with
    `prefix`; `places`: numbers of the questions by `id`."""
    prompts = responses.prompts
    arrays = {f"rollout/{name}": x for name, x in responses.rollout.rows.items()}
    arrays |= {f"prompts/{name}": getattr(prompts, name) for name in _PROMPTS}
    for name in _SAMPLES:
        array = getattr(responses, name, None)
        if array is not None:
            arrays[name] = array
    if isinstance(responses, Samples):
        arrays["by_name"] = np.stack([*responses.by_name.values()])
    arrays["questions"] = np.array([places[id(question)] for question in responses.questions])
    arrays["key"] = jax.random.key_data(prompts.key)
    return {f"{prefix}/{name}": np.asarray(array) for name, array in arrays.items()}


def _fields(prefix: str, arrays: Mapping[str, np.ndarray], runtime: Runtime) -> dict[str, Any]:
    """Returns the fields of the `Samples` or `Responses` whose arrays these are."""

    def part(start: str) -> dict[str, np.ndarray]:
        return {n.removeprefix(start): x for n, x in arrays.items() if n.startswith(start)}

    fields: dict[str, Any] = {name: x for name, x in part(f"{prefix}/").items() if "/" not in name}
    key = jax.random.wrap_key_data(fields.pop("key"), impl="threefry2x32")
    questions = runtime.questions["train"]
    return fields | {
        "questions": [questions[index] for index in fields["questions"]],
        "rollout": Rollout(
            **part(f"{prefix}/rollout/"), taps={}, truncation=runtime.resolved.truncation
        ),
        "prompts": Prompts(key=key, **part(f"{prefix}/prompts/")),
    }
