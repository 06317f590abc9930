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

import base64
import collections
import concurrent.futures
import dataclasses
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.data import Stream
from fp8rl_jax.rollout import Progress, Rollout
from fp8rl_jax.training.engine import Prompts, Served
from fp8rl_jax.training.partial import Responses
from fp8rl_jax.training.runtime import Runtime
from fp8rl_jax.training.sample_step import Samples, sample_step
from fp8rl_jax.training.step_record import StepRecord

Weights = Any  # what the sampler takes


class _Stopped(Exception):
    """The run ends, and with it a rollout."""


class _Given(NamedTuple):
    """What a rollout draws with: weights, their version, and the state's random numbers."""

    weights: Weights
    version: int
    rng: np.ndarray


Show = Callable[[int, Progress], None]  # shows the progress of a step's rollout


def step_key(rng: Any, step: int) -> jax.Array:
    """Returns the random key of a step's rollout; `rng`: `TrainState.rng`, on the host."""
    return jax.random.fold_in(jax.random.wrap_key_data(rng, impl="threefry2x32"), step)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A finished rollout.

    Attributes:
      samples: the responses and their rewards.
      record: the metrics of the rollout.
      position: position of the stream of questions after it.
      later: responses of later steps that were begun.
    """

    samples: Samples
    record: StepRecord
    position: int
    later: list[Responses]


def _done(drawn: Drawn) -> concurrent.futures.Future[Drawn]:
    future: concurrent.futures.Future[Drawn] = concurrent.futures.Future()
    future.set_result(drawn)
    return future


class Rollouts:
    """The rollouts that were begun and not yet learnt from, the oldest first.

    Attributes:
      questions: the stream of questions.
    """

    def __init__(self, runtime: Runtime, questions: Stream, show: Show):
        self.questions = questions
        self._runtime, self._show = runtime, show
        self._ahead = runtime.config.rollout.ahead
        self._begun: collections.deque[concurrent.futures.Future[Drawn]] = collections.deque()
        self._first = 0  # step of the oldest
        self._learnt: list[Responses] = []  # `later` of the rollout before the oldest
        self._later: list[Responses] = []  # of the newest
        self._failure: Exception | None = None  # of a rollout, and so of those behind it
        self._given: dict[int, _Given] = {}  # by step, until it is drawn
        self._stopping = False
        self._thread: concurrent.futures.Executor | None = None
        if self._ahead and (runtime.mesh.size == 1 or runtime.rollout_mesh is not None):
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "rollouts")

    def begin(self, step: int, served: Served, rng: np.ndarray) -> None:
        """Begins the rollouts up to that of `step + ahead` that were not begun, with the weights
        `served` and the keys of `rng`."""
        if not self._begun:
            self._first = step
        last = min(step + self._ahead, self._runtime.config.run.steps - 1)
        wanted = range(self._first + len(self._begun), last + 1)
        weights = self._runtime.for_sampling(served.weights) if wanted else None
        for number in wanted:
            # Numbers of the host: the update gives away the state's arrays.
            self._begin(number, _Given(weights, int(served.version), rng))

    def _begin(self, step: int, given: _Given) -> None:
        self._given[step] = given
        if self._thread is not None:
            self._begun.append(self._thread.submit(self._draw, step))
        else:
            self._begun.append(_done(self._draw(step)))

    def oldest(self) -> Drawn:
        """Waits for the oldest rollout; it stays until `learnt`."""
        return self._begun[0].result()

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
        other; `unfinished` has what they draw with. One of the static sampler looks nowhere."""
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
        weights, version, rng = self._given[step]
        record, sampling = StepRecord(step + 1), self._runtime.sampling

        def key_of(step: int) -> jax.Array:
            with jax.default_device(sampling.mesh.local_devices[0]):  # the learner's are busy
                return step_key(rng, step)

        def show(progress: Progress) -> None:
            if self._stopping:
                raise _Stopped()
            if not self._ahead:
                self._show(step + 1, progress)

        given = weights, version, self.questions, key_of, record, show, self._later
        try:
            samples, self._later = sample_step(sampling, *given)
        except Exception as error:
            self._failure = error
            raise
        record |= sampling.engine.metrics()
        del self._given[step]
        return Drawn(samples, record, self.questions.position, self._later)

    # For a checkpoint.

    def kept(self) -> dict[str, Any]:
        """Waits for the rollouts; returns those before the first that fails, and the responses that
        the last of them has begun, as a checkpoint's metadata. Its error is raised where it is
        read; a resumed run draws it with newer weights.
        """
        if not self._ahead and not self._learnt:
            return {}
        places = {id(q): i for i, q in enumerate(self._runtime.questions["train"])}
        found, later = [], self._learnt
        for drawn in self._finished():
            about = {"record": dict(drawn.record), "position": drawn.position}
            found.append(about | {"arrays": _as_text(drawn.samples, places)})
            later = drawn.later
        again = [{"version": g.version, "rng": g.rng.tolist()} for g in self._unfinished()]
        begun = [_as_text(begun, places) for begun in later]
        return {"rollouts": found, "begun": begun, "unfinished": again}

    def unfinished(self) -> dict[str, Weights]:
        """Returns the weights of the rollouts that `stop` has ended, by the names for `restore`."""
        return {_of_version(g.version): g.weights for g in self._unfinished()}

    def _finished(self) -> list[Drawn]:
        """Waits for the rollouts; returns those before the first that failed or was ended."""
        found = []
        for future in self._begun:
            if future.cancelled() or future.exception() is not None:
                break
            found.append(future.result())
        return found

    def _unfinished(self) -> list[_Given]:
        """Returns what the rollouts behind the finished ones draw with, if `stop` ended them."""
        finished = len(self._finished())
        begun = list(self._begun)[finished:]
        if not begun or not (begun[0].cancelled() or isinstance(begun[0].exception(), _Stopped)):
            return []
        first = self._first + finished
        return [self._given[step] for step in range(first, first + len(begun))]

    def restore(
        self, step: int, meta: Mapping[str, Any], weights_of: Callable[[str], Weights]
    ) -> None:
        """Takes over what `kept` returned at the checkpoint of `step`, and begins again what was
        not finished, with `weights_of` its names."""
        self._first, runtime = step, self._runtime
        self._learnt = [Responses(**_of_text(text, runtime)) for text in meta.get("begun", [])]
        self._later = self._learnt
        for saved in meta.get("rollouts", []):
            record = StepRecord(step + len(self._begun) + 1)
            record |= saved["record"]
            self.questions.position = saved["position"]
            samples = Samples(**_of_text(saved["arrays"], runtime))
            self._begun.append(_done(Drawn(samples, record, saved["position"], self._later)))
        for saved in meta.get("unfinished", []):
            rng = np.asarray(saved["rng"], np.uint32)
            weights = weights_of(_of_version(saved["version"]))
            self._begin(step + len(self._begun), _Given(weights, saved["version"], rng))


def _of_version(version: int) -> str:
    return f"sampler_{version}"


_PROMPTS = ("tokens", "lengths", "temperature", "first_ids")  # of Prompts
_OWN = ("versions", "rewards", "counts", "turns", "learner_logprobs")  # of Samples


def _as_text(begun: Responses, places: dict[int, int]) -> str:
    """Returns the arrays of `Samples` or of responses that were begun; `places`: numbers of the
    questions by `id`."""
    arrays = {"questions": np.array([places[id(question)] for question in begun.questions])}
    arrays |= {f"rollout/{name}": np.asarray(x) for name, x in begun.rollout.rows.items()}
    for part, source, names in (("prompts", begun.prompts, _PROMPTS), ("own", begun, _OWN)):
        values = {f"{part}/{name}": getattr(source, name, None) for name in names}
        arrays |= {name: np.asarray(x) for name, x in values.items() if x is not None}
    if isinstance(begun, Samples):
        arrays |= {f"by_name/{name}": value for name, value in begun.by_name.items()}
    arrays["key"] = np.asarray(jax.random.key_data(begun.prompts.key))
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    return base64.b64encode(content.getvalue()).decode()


def _of_text(text: str, runtime: Runtime) -> dict[str, Any]:
    """Returns the fields of what `_as_text` was given."""
    questions = runtime.questions["train"]
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as found:
        arrays = dict(found)

    def part(prefix: str) -> dict[str, np.ndarray]:
        whole = f"{prefix}/"
        return {n.removeprefix(whole): x for n, x in arrays.items() if n.startswith(whole)}

    key = jax.random.wrap_key_data(arrays["key"], impl="threefry2x32")
    own = part("own")
    return {
        "questions": [questions[index] for index in arrays["questions"]],
        "rollout": Rollout(**part("rollout"), taps={}, truncation=runtime.truncation),
        "prompts": Prompts(key=key, **part("prompts")),
        **own,
        **({"by_name": part("by_name")} if "rewards" in own else {}),
    }
