"""Stores, loads and analyses an RL step with drift.

A run writes the step with its largest drift to RUN_DIR/drift_step, where `fp8rl drift` reads it.
The step can be reproduced from the policy before its update (monitor.py copies it), its questions
and its random key.

An analysis first runs both programs again on the inputs of the step and compares the results with
those recorded. If the drift comes back, it is traced to an operation; if not, a program has given
two results for one input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.drift.attribute import Ran, analyse, compare_sides
from fp8rl_jax.drift.budget import NO_END, Budget
from fp8rl_jax.drift.compare import bits_differ
from fp8rl_jax.drift.programs import Host, Programs, affordable
from fp8rl_jax.envs import Question
from fp8rl_jax.learner import policy_of
from fp8rl_jax.quant.kv import scales_in, with_scales
from fp8rl_jax.sharding import batch_divisor
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import Runtime

_NAME = "drift_step"
RECORDED = ("tokens", "mask", "logprobs")  # fields of a Rollout that are stored
# The parts of `analyse` for a step whose drift did not come back.
_NOT_ANALYSED: dict[str, Any] = {
    "operations": [],
    "first": None,
    "logits": None,
    "unobservable": [],
    "not_compared": [],
    "tapped_programs": 0,
    "weights": {"comparable": True, "leaves": 0, "differing": []},
    "products": {"sentence": "not tried", "wrong": []},
    "left_out": [],
}


@contextlib.contextmanager
def _opened(directory: pathlib.Path) -> Iterator[tuple[Checkpoints, int] | None]:
    """Opens the kept step in a run's directory: Checkpoints and number, or None without a step."""
    if not (directory / _NAME).is_dir():
        yield None
        return
    with contextlib.closing(Checkpoints(directory / _NAME, keep=1)) as checkpoints:
        number = checkpoints.latest()
        yield None if number is None else (checkpoints, number)


@dataclasses.dataclass(frozen=True)
class KeptStep:
    """A step with drift.

    Attributes:
      step: number of the RL step, from 1 on.
      policy: `policy_of` the state before the update.
      questions: questions of the rollout.
      first_ids, key: as in the rollout's `training.engine.Prompts`.
      rollout: {tokens, mask, logprobs: (B, R)}, as recorded.
      logp: (N, R), the learner's log-probabilities in the first update, on the first N rows.
    """

    step: int
    policy: dict[str, Any]
    questions: list[Question]
    first_ids: np.ndarray
    key: jax.Array
    rollout: dict[str, np.ndarray]
    logp: np.ndarray

    @property
    def first(self) -> slice:
        """The rows of the first update."""
        return slice(0, len(self.logp))

    @property
    def drift(self) -> float:
        """The largest |dlogp|."""
        return float(self._differences().max())

    def _differences(self) -> np.ndarray:
        """Returns |dlogp| (N, R), 0 outside responses."""
        d = self.logp.astype(np.float64) - self.rollout["logprobs"][self.first]
        return np.where(self.rollout["mask"][self.first], np.abs(d), 0.0)

    def save(self, runtime: Runtime, directory: pathlib.Path) -> None:
        """Writes the step to a run's directory, replacing an earlier one."""
        places = {id(q): index for index, q in enumerate(runtime.questions["train"])}
        meta = {
            "step": self.step,
            "drift": self.drift,
            "questions": [places[id(question)] for question in self.questions],
            "first_ids": self.first_ids.tolist(),
            "key": np.asarray(jax.random.key_data(self.key)).tolist(),
            "rows": len(self.logp),
            "data": runtime.data_digest,
        }
        logp = np.zeros_like(self.rollout["logprobs"])
        logp[: len(self.logp)] = self.logp
        shutil.rmtree(directory / _NAME, ignore_errors=True)
        checkpoints = Checkpoints(directory / _NAME, keep=1)
        mask = self.rollout["mask"].astype(np.uint8)  # checkpoints hold no bool
        checkpoints.save(self.step, self.policy | self.rollout | {"mask": mask, "logp": logp}, meta)
        checkpoints.close()

    @staticmethod
    def remove_after(step: int, directory: pathlib.Path) -> None:
        """Removes the kept step from a run's directory if it is later than `step`."""
        number = 0
        with contextlib.suppress(UserError), _opened(directory) as found:
            number = found[1] if found else 0
        if number > step:
            shutil.rmtree(directory / _NAME, ignore_errors=True)

    @staticmethod
    def drift_of(directory: pathlib.Path) -> float:
        """Returns the drift of the kept step in a run's directory; 0 without a readable one."""
        with contextlib.suppress(UserError), _opened(directory) as found:
            if found:
                checkpoints, number = found
                return float(checkpoints.read_meta(number)["drift"])
        return 0.0

    @classmethod
    def load(cls, runtime: Runtime, directory: pathlib.Path) -> KeptStep | None:
        """Loads the kept step of a run with this configuration; None without one or for other data.

        Raises:
          UserError: the files are damaged.
        """
        shape = (runtime.resolved.step_samples, runtime.config.rollout.max_new_tokens)
        types = {"tokens": np.int32, "mask": np.uint8, "logprobs": np.float32, "logp": np.float32}
        arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in types.items()}
        with _opened(directory) as opened:
            if opened is None:
                return None
            checkpoints, number = opened
            meta = checkpoints.read_meta(number)
            if meta["data"] != runtime.data_digest:
                return None
            like = policy_of(runtime.engine.like(optimizer_of_phase(runtime.config, "rl")))
            found = checkpoints.restore(number, like | arrays)
        policy = {name: found.pop(name) for name in like}
        found = jax.device_get(found)
        return cls(
            meta["step"],
            policy,
            [runtime.questions["train"][index] for index in meta["questions"]],
            np.asarray(meta["first_ids"]),
            jax.random.wrap_key_data(jnp.asarray(meta["key"], np.uint32), impl="threefry2x32"),
            {name: found[name] for name in RECORDED} | {"mask": found["mask"].astype(bool)},
            found["logp"][: meta["rows"]],
        )

    def recorded(self, like: Host) -> Host:
        """Returns the recorded rollout of the first update's rows, with other fields of `like`."""
        rows = {name: values[self.first] for name, values in self.rollout.items()}
        return dataclasses.replace(like, **rows)

    def programs(self, runtime: Runtime, groups: np.ndarray) -> Programs:
        """Returns sampler and learner before the update, on the questions at indices `groups`."""
        state = runtime.engine.new_state(
            self.policy["params"],
            optimizer_of_phase(runtime.config, "rl"),
            self.policy["scaling_state"],
        )
        scaling = with_scales(
            state.scaling_state,
            processes.place(scales_in(self.policy["scaling_state"]), state.step.sharding),
        )
        state = dataclasses.replace(state, scaling_state=scaling)
        weights = runtime.engine.refit(state).weights
        questions = [self.questions[i] for i in groups]
        return Programs(
            runtime, state, weights, questions, self.key, first_ids=self.first_ids[groups]
        )

    def groups(self, runtime: Runtime) -> np.ndarray:
        """Returns the groups of the first update with the largest drift, as many as are
        `affordable`; ascending."""
        size = runtime.config.rollout.group_size
        worst = self._differences().max(axis=1)
        worst = np.maximum.reduceat(worst, np.arange(0, len(worst), size))
        order = np.argsort(-worst, kind="stable")
        count = len(affordable(runtime, [self.questions[i] for i in order]))
        parts = runtime.config.learner.gradient_accumulation_steps * batch_divisor(runtime.mesh)
        unit = math.lcm(size, parts) // size  # groups that make equal parts
        return np.sort(order[: max(count // unit, 1) * unit])


def analyse_step(
    runtime: Runtime,
    kept: KeptStep,
    note: Callable[[str], None] = lambda text: None,
    budget: Budget = NO_END,
) -> dict:
    """Analyses a kept step; its headline compares the log-probabilities that the run recorded.

    Returns the result of `analyse`, with 'step', 'drift' (its largest |dlogp|), 'again' (see
    `_run_again`), 'questions' (how many were analysed) and 'of' (how many the step has).
    """
    every = np.arange(len(kept.questions))
    groups = kept.groups(runtime)
    whole = kept.programs(runtime, every)
    note(f"running the sampler and the train step of RL step {kept.step} again")
    ran, again = _run_again(whole, kept, budget)
    result: dict[str, Any] = _NOT_ANALYSED
    if again["drift"]:
        if len(groups) == len(every) and len(kept.logp) == len(ran.rollout.mask):
            result = analyse(whole, note, budget, ran)
        else:
            result = analyse(kept.programs(runtime, groups), note, budget)
    result = {
        **result,
        **compare_sides(whole, kept.recorded(ran.rollout), ran.batch, kept.logp),
        "step": kept.step,
        "drift": kept.drift,
        "again": again,
        "questions": len(groups),
        "of": len(every),
    }
    return {**result, "verdict": _verdict(result)}


def _run_again(programs: Programs, kept: KeptStep, budget: Budget) -> tuple[Ran, dict]:
    """Runs both programs again on the inputs of the step.

    Returns:
      Their results for the rows of the first update, and a dict: 'tokens', the number of recorded
      log-probabilities; 'sampler' and 'learner', how many of them have other bits now; 'drift', the
      largest |dlogp| between both sides in this execution.
    """
    began = budget.clock()
    out = programs.rollout()
    # The learner gets the step's tokens, even where the sampler draws others now.
    batch = programs.batch(dataclasses.replace(out, **kept.rollout))
    batch = jax.tree.map(lambda x: x[kept.first], batch)
    logp, _ = programs.learner(batch)
    cut = {name: array[kept.first] for name, array in out.rows.items()}
    ran = Ran(dataclasses.replace(out, **cut), batch, logp, budget.clock() - began)
    recorded = kept.recorded(out)
    mask = np.asarray(recorded.mask)
    same = (ran.rollout.tokens == recorded.tokens).all(axis=1, keepdims=True) & mask
    moved = bits_differ(ran.rollout.logprobs, recorded.logprobs) | ~same
    # Which tokens were kept is known of the sampler's tokens alone.
    learnt = mask if out.kept is None else same
    gap = np.abs(np.asarray(logp, np.float64) - ran.rollout.logprobs)
    return ran, {
        "tokens": int(mask.sum()),
        "sampler": int((moved & mask).sum()),
        "learner": int((bits_differ(logp, kept.logp) & learnt).sum()),
        "drift": float(gap[same].max(initial=0.0)),
    }


def _verdict(result: dict) -> dict:
    """Returns the analysis' verdict if it reproduced the drift, else 'rows' or 'not repeated'."""
    again, step = result["again"], result["step"]
    if again["drift"] and result["verdict"]["culprit"] != "none":
        return result["verdict"]
    if again["drift"]:
        culprit = "rows"
        sentence = (
            f"The drift of RL step {step} comes back when its {result['of']} questions run again, "
            f"and not with {result['questions']} of them, whose values fit into memory: it depends "
            "on the number of rows."
        )
    else:
        culprit = "not repeated"
        sides = {"sampler": "the sampler", "learner": "the train step"}
        changed = [f"{name} ({again[side]:,})" for side, name in sides.items() if again[side]]
        sentence = (
            f"The drift of RL step {step} does not come back when both programs run again on what "
            f"they were given then: of {again['tokens']:,} log-probabilities "
            f"{' and '.join(changed)} now gives others than were recorded, and the two sides agree "
            "bit for bit. So a program gave two results for one input, or its result was changed "
            "on the way."
        )
    advice = (
        "see whether it stays away with precision.cpu_products=exact on a CPU, or on another "
        "machine, and report it with drift.json"
    )
    return {"culprit": culprit, "layer": None, "sentence": sentence, "advice": advice}
