"""Fine-tunes for `sft.steps` steps before RL, so that the policy solves some questions and rewards
differ within a group.

The result is cached under a hash of everything it depends on (configuration, seed, the library's
source), so a second run with other RL settings starts RL at once. The phase checkpoints at each
evaluation and resumes like the RL phase.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import time

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import NonFiniteError, UserError
from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.base.user_cache import cache_name, files_of_functions
from fp8rl_jax.config import flatten
from fp8rl_jax.config.adapters import adapter_files
from fp8rl_jax.config.functions import named_functions
from fp8rl_jax.config.model_source import identity
from fp8rl_jax.config.precision import without_calibration
from fp8rl_jax.data import Stream, tokenizer_files
from fp8rl_jax.learner import LossConfig, TrainState
from fp8rl_jax.quant.kv import of_sites
from fp8rl_jax.rl.losses import reinforce
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.logs import read_log
from fp8rl_jax.training.optimizer import optimizer_of_phase, updates_made
from fp8rl_jax.training.run import Run, non_finite_message
from fp8rl_jax.training.run_directory import cache_root, no_room
from fp8rl_jax.training.runtime import Runtime

# Sections of which only these fields matter.
_OTHER_SECTIONS = ("algo", "learner", "optimizer", "rollout", "run")
_FIELDS: tuple[str, ...] = (
    "run.seed",
    "run.samples",
    "optimizer.b1",
    "optimizer.clip_norm",
    "learner.remat",
    "learner.tokens_per_batch",
    "learner.share_prompts",
)
_FIELDS += (
    "rollout.max_prompt_tokens",
    "rollout.max_new_tokens",
    "rollout.max_turn_tokens",
    "rollout.max_observation_tokens",
)
_LOGS = ("sft", "eval", "samples")
# Fields that no number of a run depends on.
WITHOUT_EFFECT = (
    "model.check_finite",
    "precision.zero_drift",
    "precision.health",
    "precision.self_check",
    "env.reward_timeout",
    "env.reward_memory_gb",
)

_TWO_DAYS = 2 * 24 * 3600.0


def cache_directory(config, data_digest: str = "") -> pathlib.Path | None:
    """Returns the directory of this configuration's cached result, None without a cache;
    `data_digest`: `Data.digest` of the questions."""
    root = cache_root(config)
    if root is None:
        return None
    parts = {
        name: value
        for name, value in flatten(config).items()
        if (name.split(".")[0] not in _OTHER_SECTIONS or name in _FIELDS)
        and name not in WITHOUT_EFFECT
    }
    if data_digest:
        parts["data"] = data_digest
    if config.model.checkpoint:
        parts["checkpoint"] = identity(config.model.checkpoint)
    files = tokenizer_files(config.data.tokenizer, config.model.checkpoint)
    files += files_of_functions(named_functions(config)) + adapter_files(config)
    return root / cache_name("sft", parts, files)


def _kept(state: TrainState) -> dict:
    """Returns the parts of the state that RL starts from."""
    return {"params": state.params, "scaling_state": of_sites(state.scaling_state)}


def load_cached(run: Run, like: TrainState):
    """Returns (params, scaling_state) of a cached result, or None; copies its records to the logs.

    A damaged result is removed with a warning, so that fine-tuning makes it again. Several
    processes, which may not all see the damage, raise a UserError instead.
    """
    directory = cache_directory(run.runtime.config, run.runtime.data_digest)
    there = directory is not None and directory.is_dir()
    if not all(processes.exchange(there)) or directory is None:  # one of several hosts may lack it
        return None
    checkpoints = Checkpoints(directory / "checkpoint", keep=1)
    try:
        kept = checkpoints.restore(0, _kept(like))
        written = {name: read_log(directory / f"{name}.jsonl") for name in _LOGS}
    except UserError as error:
        reason = str(error).partition(";")[0].partition(": put the file back")[0]
        if processes.count() > 1:
            raise UserError(
                f"the cached fine-tuning cannot be used: {reason}; move {directory.resolve()} "
                "away, and fine-tuning runs again"
            ) from None
        shutil.rmtree(directory, ignore_errors=True)
        run.display.note(
            f"warning: the cached fine-tuning cannot be used: {reason}; fine-tuning runs again"
        )
        return None
    finally:
        checkpoints.close()
    for name, records in written.items():
        run.logs.write(name, *records)
    return kept["params"], kept["scaling_state"]


def save_cached(runtime: Runtime, state: TrainState, run_dir: pathlib.Path) -> None:
    """Caches the result of the finished phase, completely or not at all.

    Raises:
      UserError: the cache cannot be written.
    """
    directory = cache_directory(runtime.config, runtime.data_digest)
    if directory is None:
        return
    try:
        _save_in(directory, state, run_dir)
    except OSError as error:
        raise no_room(directory.parent, error, "run.cache_dir") from error


def _save_in(directory: pathlib.Path, state: TrainState, run_dir: pathlib.Path) -> None:
    temporary = processes.decided(lambda: _temporary(directory))
    if temporary is None:
        return
    checkpoints = Checkpoints(temporary / "checkpoint", keep=1)
    checkpoints.save(0, _kept(state), {})
    checkpoints.close()
    if not processes.first():
        return
    for name in _LOGS:
        shutil.copyfile(run_dir / f"{name}.jsonl", temporary / f"{name}.jsonl")
    try:
        temporary.rename(directory)
    except OSError:  # another run cached the same result first
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(directory: pathlib.Path) -> pathlib.Path | None:
    """Makes an empty directory to be renamed to `directory`; returns None if that exists."""
    if directory.exists():
        return None
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(directory.parent)
    temporary = directory.with_name(f"{directory.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return temporary


def _remove_left_behind(parent: pathlib.Path) -> None:
    """Removes temporary directories of this host's dead processes, and any older than two days."""
    for path in parent.glob("sft-*.tmp"):
        host, _, pid = path.name.partition(".")[2].removesuffix(".tmp").rpartition(".")
        dead = host == socket.gethostname() and not os.path.exists(f"/proc/{pid}")
        with contextlib.suppress(FileNotFoundError):
            if dead or time.time() - path.stat().st_mtime > _TWO_DAYS:
                shutil.rmtree(path, ignore_errors=True)


def run_sft(run: Run, state: TrainState) -> TrainState:
    """Makes supervised updates from `state.step` to the end, with a checkpoint at each evaluation.

    Returns:
      The state after the last update, or after the update at which the run had to stop.

    Raises:
      NonFiniteError: loss or gradient is NaN or infinite; the last good state is saved.
      RewardError: every call of a reward failed in an evaluation.
    """
    config = run.runtime.config
    engine = run.runtime.engine
    optimizer = optimizer_of_phase(config, "sft")
    # No rollout calibrates scales here.
    recipe = without_calibration(run.runtime.resolved.learner_recipe)
    train_step = engine.train_step(optimizer, LossConfig(reinforce()), 1, recipe)
    stream = Stream(run.runtime.questions["sft"], config.sft.batch_size, config.run.seed)
    stream.position = int(state.data_state)
    evaluate_at = {  # the last is config.sft.steps
        round(config.sft.steps * (i + 1) / config.sft.evaluations)
        for i in range(config.sft.evaluations)
    }
    run.display.phase("SFT", config.sft.steps, int(state.step), run.compile_times)
    for step in range(int(state.step), config.sft.steps):
        hold_settings()
        start = time.perf_counter()
        batch = run.runtime.demonstrations(stream.next())
        rate = float(optimizer.schedule(updates_made(state.opt_state)))
        state, _, metrics = engine.update(state, batch, train_step, distil=False)
        if not metrics["good"]:
            run.save(state)
            raise NonFiniteError(non_finite_message("SFT", step + 1, metrics))
        state = engine.advance(state, stream.position)
        record = {
            "step": step + 1,
            "loss": float(metrics["loss"]),
            "grad_norm": float(metrics["grad_norm"]),
            "lr": rate,
            "time_step": time.perf_counter() - start,
        }
        run.logs.write("sft", record)
        run.display.step("sft", record)
        if step + 1 in evaluate_at:
            state = engine.calibrate(state, batch)
            run.evaluate(state, engine.refit(state).weights)
        stopping = run.stop() is not None
        if step + 1 < config.sft.steps and (step + 1 in evaluate_at or stopping):
            run.save(state)
        if stopping:
            break
    return state
