"""The main job: supervised fine-tuning, then RL with one forward function in rollout and learner.

One RL step: sample a group of responses for each question and reward them; recompute their
log-probabilities under the learner, unless zero drift makes them the sampler's own; compute
advantages and weights; update; refit the sampler. The log-probabilities that the first update's own
forward pass computed are compared with those recorded while decoding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import ml_collections
import numpy as np

from fp8rl_jax import sharding
from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import DriftError, NonFiniteError, RewardError, UserError
from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.data import Stream
from fp8rl_jax.drift import DriftMonitor, SelfCheck, kept_self_check, policy_of
from fp8rl_jax.learner import Batch, TrainState
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.report import summarise, write_report
from fp8rl_jax.rl import mismatch_metrics, prepare
from fp8rl_jax.rollout import ContinuousSampler, Rollout, is_fresh
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.counters import age_metrics
from fp8rl_jax.training.environment import (
    check_environment,
    environment,
    keep_environment,
    layout,
)
from fp8rl_jax.training.evaluate import evaluate
from fp8rl_jax.training.lock import RunLock
from fp8rl_jax.training.logs import RunLogs
from fp8rl_jax.training.memory import check_train_memory
from fp8rl_jax.training.optimizer import optimizer_of_phase, updates_made
from fp8rl_jax.training.progress import Display
from fp8rl_jax.training.run_directory import (
    WRITE_ERRORS,
    bytes_to_write,
    check_directory,
    check_room,
    check_shared,
    check_unchanged,
    keep_digest,
    no_room,
    open_run,
    state_bytes,
)
from fp8rl_jax.training.runtime import Runtime, make_runtime, to_device
from fp8rl_jax.training.sample_step import Samples, sample_step
from fp8rl_jax.training.sft import (
    cache_directory,
    load_cached,
    non_finite_message,
    run_sft,
    save_cached,
)
from fp8rl_jax.training.sinks import logger_names
from fp8rl_jax.training.step_record import StepRecord


@dataclasses.dataclass
class Outcome:
    """How a run ended: `finished`, or the signal that stopped it; and its report, if written."""

    finished: bool
    stopped_by: str | None
    report: pathlib.Path | None


def train(
    config: ml_collections.ConfigDict,
    resume: bool = False,
    stop: Callable[[], str | None] = lambda: None,
) -> Outcome:
    """Runs the whole job in `config.run.dir`.

    Args:
      config: of `load_config`.
      resume: continue from the newest checkpoint, bit for bit.
      stop: asked after each step; the name of what stops the run, which then saves and ends.

    Raises:
      UserError: something that the user can fix.
      RewardError: every call of a reward failed; the state after the last finished step is saved.
      NonFiniteError: loss or gradient became NaN; the last good state is saved.
      DriftError: drift appeared and zero drift is required; the state after that step is saved.
    """
    runtime = make_runtime(config)
    logger_names(config)
    check_train_memory(runtime, runtime.mesh)
    config = runtime.config  # whose run.dir is absolute
    directory = pathlib.Path(config.run.dir)
    processes.decided(lambda: _check_rooms(runtime))
    check_shared(directory)
    with RunLock(directory) as lock:
        surroundings = environment(config)
        changes = processes.decided(lambda: _check_run(runtime, resume, surroundings))
        checked = _self_check(runtime)
        processes.decided(lambda: _open(runtime, surroundings))
        with Display() as display:
            try:
                for line in filter(None, (runtime.data_note, changes, checked)):
                    display.note(str(line))
                return _Run(runtime, lock, display, stop, resume).execute()
            except OSError as error:
                if error.errno not in WRITE_ERRORS:
                    raise
                raise no_room(directory, error) from error


def _check_rooms(runtime: Runtime) -> None:
    """Raises UserError if a directory that the run writes to cannot hold what it will."""
    config = runtime.config
    check_room(pathlib.Path(config.run.dir), bytes_to_write(runtime))
    if config.sft.steps and (cache := cache_directory(config)):
        check_room(cache.parent, state_bytes(runtime), "run.cache_dir")


def _check_run(runtime: Runtime, resume: bool, surroundings: dict[str, Any]) -> str | None:
    """What has changed since the run in `run.dir` was last started, as a line.

    Raises:
      UserError: it is another run, or cannot go on.
    """
    directory = pathlib.Path(runtime.config.run.dir)
    check_directory(runtime, resume)
    check_unchanged(directory, runtime.data_digest)
    return check_environment(directory, surroundings)


def _open(runtime: Runtime, surroundings: dict[str, Any]) -> None:
    """Writes what a run directory begins with."""
    directory = open_run(runtime)
    keep_digest(directory, runtime.data_digest)
    keep_environment(directory, surroundings)


def _self_check(runtime: Runtime) -> SelfCheck | None:
    """Tries the promise where the run relies on it.

    Raises:
      UserError: it is not kept here, and the configuration requires it.
    """
    config = runtime.config
    if not (config.precision.self_check and runtime.zero_drift):
        return None
    checked = kept_self_check(runtime)
    if config.precision.zero_drift == "required" and not checked.holds:
        raise UserError(
            f"precision.zero_drift is 'required', and {checked}: `fp8rl drift` names the "
            "operation; set precision.zero_drift='report' to go on"
        )
    return checked


class _Run:
    """One execution of the job: what the phases share."""

    def __init__(self, runtime: Runtime, lock: RunLock, display, stop, resume):
        self.resume = resume
        self.drifted = False  # a first update has shown drift where there must be none
        self.evaluation_failed = False  # at the state that was restored
        self.runtime, self.config = runtime, runtime.config
        self.lock, self.directory = lock, pathlib.Path(self.config.run.dir)
        self.display, self._stop = display, stop
        self.monitor = DriftMonitor(runtime, self.directory, display.note, stop)
        self.stopped_by: str | None = None
        keep = self.config.run.keep_checkpoints
        self.checkpoints = Checkpoints(self.directory / "checkpoints", keep, own=True)
        self.optimizer, self.schedule = optimizer_of_phase(self.config, "rl")
        self.logs: RunLogs
        self.phase = "sft"

    def execute(self) -> Outcome:
        with contextlib.ExitStack() as stack:
            stack.callback(self.checkpoints.close)
            self._stop()  # from here on a signal waits for the end of a step
            state = self._restore()
            stack.callback(self.logs.close)
            self._describe()
            if self.evaluation_failed:
                self._evaluate(state, self.runtime.refit_state(state).weights)
            if self.phase == "sft":
                state = self._sft(state)
            if self.phase == "rl" and not self.stop():
                state = self._rl(state)
        if self.phase == "rl" and int(state.step) >= self.config.run.steps:
            self.monitor.finish()
            report = processes.decided(lambda: write_report(self.directory))
            return Outcome(True, None, report)
        at = f"{self.phase} step {int(state.step)}"
        self.display.note(f"stopped by {self.stopped_by} after {at}, saved; --resume goes on")
        return Outcome(False, self.stopped_by, None)

    def stop(self) -> str | None:
        """What stops the run in any process, or None. Asked where the state is saved, or is saved
        for it; the processes agree."""
        if self.stopped_by is None:
            self.stopped_by = next(filter(None, processes.exchange(self._stop())), None)
        return self.stopped_by

    def _describe(self) -> None:
        rt, model = self.runtime, self.runtime.model
        counts = parameter_counts(model)
        active = f" ({counts.active / 1e6:.2f}M a token)" if model.num_experts else ""
        self.display.note(
            f"{rt.config.env.task}: {counts.total / 1e6:.2f}M parameters{active}, "
            f"{model.num_hidden_layers} layers; rollout {rt.rollout_recipe.name}, "
            f"learner {rt.learner_recipe.name}; "
            f"{layout()}; seed {rt.config.run.seed}"
        )
        for axis in ("tensor", "expert"):
            if sharding.between_hosts(rt.mesh, axis, processes.hosts()):
                self.display.note(
                    f"mesh.{axis}={rt.mesh.shape[axis]} goes over several hosts: in every layer "
                    "activations travel between them; a number that divides a host's devices is "
                    "faster"
                )
        if rt.config.model.checkpoint:
            self.display.note(f"initial parameters: {rt.config.model.checkpoint}")

    # Checkpoints.

    def _save(self, state: TrainState, **more) -> None:
        sft = self.config.sft.steps
        number = int(state.step) + (sft if self.phase == "rl" else 0)
        meta = {
            "phase": self.phase,
            "step": int(state.step),
            "offsets": self.logs.offsets(),
            "drifted": self.drifted,
            **more,
        }
        self.lock.check()
        self.checkpoints.save(number, state, meta)

    def _save_for_reward(self, state: TrainState, **more) -> None:
        """Before a run stops because of its reward."""
        self._save(state, **more)
        at = f"{self.phase} step {int(state.step)}"
        self.display.note(f"the state after {at} is saved; --resume goes on from there")

    def _restore(self) -> TrainState:
        """The newest checkpoint's state, or the state at the start; opens the logs."""
        rt = self.runtime
        number = self.checkpoints.latest()
        if number is None:
            self.logs = RunLogs(self.directory, None, self.config, self.display.note)
            self.monitor.forget_after(0)
            params = rt.initial_params()
            if self.resume:
                self.display.note("there is no checkpoint to resume from: starting anew")
            if self.logs.moved_to:
                self.display.note(f"what was logged before is in {self.logs.moved_to}")
            if not self.config.sft.steps:
                return self._begin_rl(params, None)
            return rt.new_state(params, optimizer_of_phase(self.config, "sft")[0])
        meta = self.checkpoints.read_meta(number)
        self.phase, self.drifted = meta["phase"], meta.get("drifted", False)
        self.evaluation_failed = meta.get("evaluation_failed", False)
        like = rt.state_shapes(optimizer_of_phase(self.config, self.phase)[0])
        state = self.checkpoints.restore(number, like)
        self.logs = RunLogs(self.directory, meta["offsets"], self.config, self.display.note)
        self.monitor.forget_after(meta["step"] if self.phase == "rl" else 0)
        self.display.note(f"resuming after {self.phase} step {meta['step']}")
        return state

    def _begin_rl(self, params, scaling_state: dict | None) -> TrainState:
        self.phase = "rl"
        state = self._calibrate_on_prompts(
            self.runtime.new_state(params, self.optimizer, scaling_state)
        )
        if self.runtime.algorithm.needs_reference:
            reference = Checkpoints(self.directory / "reference", keep=1)
            reference.save(0, policy_of(state), {})
            reference.close()
        self._save(state)
        return state

    def _calibrate_on_prompts(self, state: TrainState) -> TrainState:
        """`state` with KV scales from the prompts of the first RL step, if any are needed."""
        rt = self.runtime
        if not rt.calibrated:
            return state
        config = self.config.rollout
        prompts, lengths = rt.pad_prompts(self._stream(state).next())
        # In the shape of a rollout's sequences: one program calibrates on both.
        tokens = np.repeat(prompts, config.group_size, axis=0)
        tokens = np.pad(tokens, ((0, 0), (0, config.max_new_tokens)))
        return rt.calibrate_state(state, tokens, np.repeat(lengths, config.group_size))

    def _stream(self, state: TrainState) -> Stream:
        """Questions of the RL phase, from where `state` stands."""
        config = self.config
        questions = self.runtime.questions["train"]
        stream = Stream(questions, config.rollout.prompts_per_step, config.run.seed)
        stream.position = int(state.data_state)
        return stream

    # Phases.

    def _sft(self, state: TrainState) -> TrainState:
        rt = self.runtime
        cached = load_cached(rt, state, self.logs) if int(state.step) == 0 else None
        if cached is not None:
            self.display.note("supervised fine-tuning found in the cache")
            return self._begin_rl(*cached)
        state = run_sft(rt, state, self.logs, self.display, self._evaluate, self._save, self.stop)
        if int(state.step) < self.config.sft.steps:
            return state
        self.logs.offsets()
        save_cached(rt, state, self.directory)
        return self._begin_rl(state.params, state.scaling_state)

    def _rl(self, state: TrainState) -> TrainState:
        rt, config = self.runtime, self.config
        self.train_step = rt.train_step(
            self.optimizer, rt.loss, config.learner.gradient_accumulation_steps
        )
        reference = self._reference(state) if rt.algorithm.needs_reference else None
        stream = self._stream(state)
        served = rt.refit_state(state)
        if not config.sft.steps and int(state.step) == 0:
            self._evaluate(state, served.weights)
        self.display.phase("RL", config.run.steps, int(state.step))
        for step in range(int(state.step), config.run.steps):
            record = StepRecord(step + 1)
            with record.timed("step"):
                samples = self._sample(state, served.weights, stream, step, record)
                batch = self._score(samples, state, reference, record)
                served = served._replace(weights=None)  # the update needs their memory
                self.monitor.keep(state, self.drifted)
                state, logp, updates = self._update(state, batch, step, record)
                drift = self._compare(record, logp, samples.rollout, batch)
                record.add_refit(served, updates[0]["checksum"], rt)
                state = rt.advance(state, step + 1, stream.position)
                state, served = self._refit(state, batch, record)
            if drift:
                self._analyse_drift(record, samples, logp, step + 1)
            self._log(record)
            last = step + 1 == config.run.steps
            if last or (step + 1) % config.eval.every == 0:
                self._evaluate(state, served.weights)
            stopping = self.stop() is not None
            broken = drift and config.precision.zero_drift == "required"
            if last or stopping or broken or (step + 1) % config.run.checkpoint_every == 0:
                self._save(state)
            if broken:
                self._end_for_drift(step + 1, drift)
            if stopping:
                break
        return state

    def _sample(self, state: TrainState, weights, stream, step: int, record: StepRecord) -> Samples:
        """The responses of a step, with their rewards."""
        hold_settings()
        assert is_fresh(state.kv_scales, step)
        record |= age_metrics(state.scaling_state, state.kv_scales, step)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng, impl="threefry2x32"), step)
        show = functools.partial(self.display.rollout, step + 1)
        try:
            samples = sample_step(self.runtime, weights, stream, key, record, show)
        except RewardError:
            self._save_for_reward(state)
            raise
        if isinstance(self.runtime.sampler, ContinuousSampler):
            record |= self.runtime.sampler.metrics()
        return samples

    def _score(self, samples: Samples, state, reference, record: StepRecord) -> Batch:
        """The training batch: log-probabilities before the update (the learner's, where they may
        differ from the sampler's) and of the reference policy, advantages and weights."""
        hold_settings()
        rt, rollout = self.runtime, samples.rollout
        batch = rt.rollout_batch(rollout, samples.prompts, samples.lengths)
        with record.timed("old_logprobs"):
            if not rt.takes_rollout_logprobs(self.drifted):
                old = np.where(rollout.mask, rt.score_state(state, batch), 0.0)
                batch = dataclasses.replace(batch, old_logprobs=old)
            if reference is not None:
                ref_logprobs = rt.score_reference(reference, batch)
                batch = dataclasses.replace(batch, ref_logprobs=ref_logprobs)
        prepared = prepare(
            rt.algorithm, samples.rewards, rollout.mask, rollout.finished,
            batch.old_logprobs, rollout.logprobs, batch.ref_logprobs, samples.counts,
        )  # fmt: skip
        record |= prepared.metrics
        parts = np.split(prepared.keep, self.config.algo.num_minibatches)
        return dataclasses.replace(
            batch,
            advantages=prepared.advantages,
            rollout_weights=prepared.rollout_weights,
            weights=np.concatenate([rt.algorithm.token_weights(keep) for keep in parts]),
        )

    def _update(self, state: TrainState, batch: Batch, step: int, record: StepRecord):
        """All optimiser updates of a step: the state after them, the log-probabilities that the
        first one computed before it, and the metrics of each."""
        hold_settings()
        rt, algo = self.runtime, self.config.algo
        rows = len(batch.mask) // algo.num_minibatches
        updates, first = [], None
        record["lr"] = float(self.schedule(updates_made(state.opt_state)))
        with record.timed("learner"):
            for index in range(algo.epochs * algo.num_minibatches):
                begin = index % algo.num_minibatches * rows
                part = jax.tree.map(lambda x, i=begin: x[i : i + rows], batch)
                state, logp, metrics = self.train_step(state, to_device(part, rt), rt.rope)
                metrics = jax.device_get(metrics)
                if not metrics["good"]:
                    if index == 0:  # later, the state holds a part of this step
                        self._save(state)
                    raise NonFiniteError(non_finite_message("RL", step + 1, metrics, index == 0))
                updates.append(metrics | {"counts": part.weights != 0})
                first = processes.fetch(logp) if first is None else first
        record.add_updates(updates, float(batch.mask.sum()), rt)
        return state, first, updates

    def _compare(self, record: StepRecord, logp, rollout: Rollout, batch: Batch) -> float:
        """Compares learner and sampler on the first update's rows; the largest |dlogp| of a run
        that must have none, else 0. The processes agree."""
        rt, first = self.runtime, slice(0, logp.shape[0])
        record |= mismatch_metrics(logp, rollout.logprobs[first], batch.mask[first])
        drift = record["train_rollout_logprob_abs_diff_max"]
        drift = next(filter(None, processes.exchange(drift)), 0.0) if rt.zero_drift else 0.0
        if drift == 0.0 or self.drifted:
            return drift
        recompute = ""
        if rt.takes_rollout_logprobs(False) and not rt.takes_rollout_logprobs(True):
            recompute = "; from the next step on log-probabilities are recomputed"
        self.drifted = True
        self.display.note(
            f"warning: drift {drift:.1e} at RL step {record['step']}, though the recipes are "
            f"equal{recompute}"
        )
        return drift

    def _refit(self, state: TrainState, batch: Batch, record: StepRecord):
        """The state with calibrated KV scales, and the weights that the sampler takes next."""
        hold_settings()
        rt = self.runtime
        if rt.calibrated:
            with record.timed("calibrate"):
                state = rt.calibrate_state(state, batch.tokens, batch.lengths)
                state = jax.block_until_ready(state)
        with record.timed("refit"):
            served = jax.block_until_ready(rt.refit_state(state))
        return state, served

    def _analyse_drift(self, record: StepRecord, samples: Samples, logp, step: int) -> None:
        """Keeps and analyses a step with drift that should not be, and forgets it where it is
        neither the first nor the largest."""
        seconds = record["time_rollout"] + record["time_learner"]
        self.monitor.seen(step, samples, logp, seconds)

    def _end_for_drift(self, step: int, drift: float) -> NoReturn:
        """Ends a run that requires zero drift, after a step that showed some and was saved."""
        processes.decided(lambda: write_report(self.directory))
        advice = processes.decided(lambda: summarise(self.directory)["advice"])
        raise DriftError(
            f"precision.zero_drift is 'required', and drift of {drift:.1e} appeared at RL step "
            f"{step}; the state after it is saved, and --resume goes on from there. "
            f"{advice or ''}".rstrip()
        )

    def _reference(self, state: TrainState) -> TrainState:
        """`state` with the reference policy in it."""
        checkpoints = Checkpoints(self.directory / "reference", keep=1)
        policy = checkpoints.restore(0, policy_of(state))
        checkpoints.close()
        return dataclasses.replace(state, **policy)

    def _log(self, record: StepRecord) -> None:
        if self.runtime.calibrated:
            record["calibrate_frac"] = record["time_calibrate"] / record["time_step"]
        self.logs.write("metrics", record)
        self.display.rl_step(record)

    def _evaluate(self, state: TrainState, weights) -> None:
        """Evaluates the weights of a state; where no call of the reward works, that is left to
        the run that resumes."""
        hold_settings()
        try:
            evaluations = evaluate(self.runtime, weights, self.phase, int(state.step))
        except RewardError:
            self._save_for_reward(state, evaluation_failed=True)
            raise
        self.logs.write_evaluations(evaluations)
        self.display.evaluations([evaluation.record for evaluation in evaluations])
