"""The whole job on a tiny configuration: it runs, it resumes bit for bit, it stops cleanly."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import CONFIG, overrides, reproducible, train_counting
from train_process import finish, kill_after_records, start, wait_for_records

from fp8rl_jax import cli, train
from fp8rl_jax.base.errors import NonFiniteError
from fp8rl_jax.cli.interrupt import Interrupt
from fp8rl_jax.config import load_config
from fp8rl_jax.training import rl, sinks
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.engine import JaxEngine
from fp8rl_jax.training.logs import RunLogs, read_jsonl
from fp8rl_jax.training.sft import cache_directory

# Relative differences that other CPUs and versions make. Sampled tokens differ after a while.
_GOLDEN = {"loss": 2e-2, "entropy": 5e-2, "reward_mean": 0.25, "grad_norm": 0.3}


def test_files_and_metrics(tiny_run):
    directory, _ = tiny_run
    run = directory / "run"
    assert (run / "report.html").stat().st_size > 10_000
    assert any((run / "tensorboard").iterdir())
    records = read_jsonl(run / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record["train_rollout_logprob_abs_diff"] == 0.0
        assert record["train_rollout_logprob_abs_diff_max"] == 0.0
        assert record["logprob_equal_frac"] == 1.0
        assert record["tis_clipfrac"] == 0.0
        assert record["token_mult_prob_error"] == 1.0
        assert record["refit_checksum_ok"] is True
        assert 0 < record["refit_changed_bytes"] < 0.9
        real = record["learner_tokens"] * (1 - record["learner_padding"])
        assert real == pytest.approx(round(real)) and 0.1 < record["learner_padding"] < 0.9
        assert record["drift_tokens"] > 16 * 8 and record["response_len_max"] > 40
        assert record["reward_std"] > 0 and record["grad_norm"] > 0, "a step that learns"
        assert record["fp8_underflow_frac/activations"] < 0.01
        assert record["fp8_saturated_frac/weights"] == 0.0
    evaluations = [(r["phase"], r["step"]) for r in read_jsonl(run / "eval.jsonl")]
    assert evaluations == [("sft", 4), ("sft", 8), ("rl", 3), ("rl", 6)]
    losses = [r["loss"] for r in read_jsonl(run / "sft.jsonl")]
    assert losses[-1] < losses[0]


def test_programs_compile_once(tiny_run):
    """Without drift nothing recomputes log-probabilities, so there is no program for it."""
    _, counts = tiny_run
    assert counts == {"sampler": 1, "eval_sampler": 1, "refit": 1, "train_step": 1}


def _from_cache(tiny_run, directory: pathlib.Path, **fields) -> list[str]:
    """Arguments of a run that begins with the fine-tuning of `tiny_run`."""
    return overrides(directory, **{"run.cache_dir": tiny_run[0] / "cache", **fields})


def test_sft_is_cached_and_recomputed_logprobs_change_nothing(tiny_run, tmp_path, capsys):
    """A run with other RL settings finds the fine-tuning. The learner's log-probabilities before
    the first update are the sampler's: the metrics have the same bits."""
    fields = {"run.steps": 3, "algo.old_logprobs": "learner"}
    _, counts = train_counting(_from_cache(tiny_run, tmp_path, **fields))
    assert "found in the cache" in capsys.readouterr().out
    assert counts["score"] == 1
    ours, theirs = reproducible(tmp_path), reproducible(tiny_run[0])
    assert ours["sft"] == theirs["sft"]
    assert ours["metrics"] == theirs["metrics"][:3]


@pytest.mark.slow
def test_moments_in_host_memory(tiny_run, tmp_path):
    """The first step is that of moments on the device, and a run resumes bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def run(directory, steps, resume=False):
        fields = {"learner.offload": "moments", "run.steps": steps}
        train.train(load_config(str(CONFIG), _from_cache(tiny_run, directory, **fields)), resume)

    run(whole, 3)
    run(parts, 2)
    run(parts, 3, resume=True)
    ours, resumed = reproducible(whole), reproducible(parts)
    assert ours["metrics"] == resumed["metrics"] and len(ours["metrics"]) == 3
    assert ours["eval"][-1] == resumed["eval"][-1], "of what the last step left"
    assert ours["metrics"][0] == reproducible(tiny_run[0])["metrics"][0]
    assert all(record["train_rollout_logprob_abs_diff_max"] == 0 for record in ours["metrics"])


def test_drift_makes_the_learner_recompute(tiny_run, tmp_path, monkeypatch, capsys):
    """One bit of one log-probability in the second step: said once, and from the third step on, in
    a resumed run too, the learner computes the old log-probabilities. Where zero drift is required
    the run ends after that step, with a checkpoint, a report and a status of its own."""
    sample, score = JaxEngine.sample, JaxEngine.score
    calls, rollouts = [], []

    def perturbed(self, *arguments, **options):
        out = sample(self, *arguments, **options)
        if "sampler" not in options:
            rollouts.append(out)
            if len(rollouts) == 2:
                logprobs = np.array(out.logprobs)
                logprobs[3, 0] = np.nextafter(logprobs[3, 0], np.float32(0))
                out = dataclasses.replace(out, logprobs=logprobs)
        return out

    def counted(self, *arguments):
        calls.append(len(rollouts))
        return score(self, *arguments)

    monkeypatch.setattr(JaxEngine, "sample", perturbed)
    monkeypatch.setattr(JaxEngine, "score", counted)

    def run(steps, *more):
        fields = {"run.steps": steps, "precision.zero_drift": "required"}
        arguments = _from_cache(tiny_run, tmp_path, **fields)
        return cli.run(["train", "--config", str(CONFIG), *arguments, *more])

    assert run(4) == 3
    out, error = capsys.readouterr()
    assert calls == []
    assert out.count("warning: drift") == 1 and "log-probabilities are recomputed" in out
    assert "appeared at RL step 2; the state after it is saved" in error
    assert f"run `fp8rl drift --checkpoint {tmp_path / 'run'}`, which names the operation" in error
    assert "there is drift at 1 of 2 steps" in (tmp_path / "run" / "report.html").read_text()
    assert run(4, "--resume") == 0
    assert "warning: drift" not in capsys.readouterr().out
    assert calls == [3, 4], "recomputed after the third and fourth rollout"
    drifts = [r["train_rollout_logprob_abs_diff_max"] for r in reproducible(tmp_path)["metrics"]]
    assert drifts[0] == drifts[2] == drifts[3] == 0.0 < drifts[1] < 1e-5


def test_processes_agree_on_drift(monkeypatch):
    """What one of them sees, all have seen, so that all end; without a promise nothing is asked."""
    said: list[str] = []
    display = types.SimpleNamespace(note=said.append)
    run = types.SimpleNamespace(drifted=False, display=display, directory="runs/a")
    record = {"step": 3, "train_rollout_logprob_abs_diff_max": 0.0}
    monkeypatch.setattr(rl.processes, "exchange", lambda value: [value, 1e-3])
    for promised, drift in ((False, 0.0), (True, 1e-3), (True, 1e-3)):
        resolved = types.SimpleNamespace(
            zero_drift=promised, takes_rollout_logprobs=lambda drifted: not drifted
        )
        run.runtime = types.SimpleNamespace(resolved=resolved)
        assert rl._forbidden_drift(run, record) == drift
        assert run.drifted == promised
    assert len(said) == 1 and said[0].startswith("warning: drift 1.0e-03 at RL step 3")


@pytest.mark.parametrize(
    "field",
    [
        "optimizer.b1=0.5",
        "optimizer.clip_norm=0.5",
        "sft.b2=0.9",
        "rollout.max_observation_tokens=7",
        "sft.steps=7",
        "sft.learning_rate=0.1",
        "sft.weight_decay=0.1",
        "sft.end_fraction=0.5",
        "sft.warmup_steps=3",
        "run.seed=1",
        "precision.learner=bf16",
        "env.train_questions=65",
        "model.rope_theta=100.0",
    ],
)
def test_sfts_that_differ_have_other_caches(field, tmp_path):
    """Whatever fine-tuning depends on is part of its key; RL settings are not."""
    directories = [
        cache_directory(load_config(str(CONFIG), [*overrides(tmp_path), *more]))
        for more in ([], [f"--config.{field}"], ["--config.optimizer.learning_rate=0.5"])
    ]
    assert directories[0] == directories[2] != directories[1]


class _Died(BaseException):
    """Stands for a process that ends at once."""


def test_stopped_and_resumed_is_the_same(tiny_run, tmp_path, monkeypatch, capsys):
    """SIGTERM in fine-tuning, and after an RL step that is not to be saved, saves and leaves; later
    a process dies that has written the records of a step, but not its checkpoint. In the end every
    record is that of the run in one piece."""
    write = RunLogs.write

    def run(resume, name=None, step=None, event=None):
        def interrupted(self, log, *records):
            write(self, log, *records)
            if (name, step) in [(log, record["step"]) for record in records]:
                event()

        monkeypatch.setattr(RunLogs, "write", interrupted)
        with Interrupt() as stop:
            return train.train(load_config(str(CONFIG), overrides(tmp_path)), resume, stop)

    def die():
        raise _Died

    def terminate():
        signal.raise_signal(signal.SIGTERM)

    for resume, log, step, phase in ((False, "sft", 3, "sft"), (True, "metrics", 3, "rl")):
        outcome = run(resume, log, step, terminate)
        assert not outcome.finished and outcome.stopped_by == "SIGTERM"
        assert f"stopped by SIGTERM after {phase} step 3, saved" in capsys.readouterr().out
        assert len(reproducible(tmp_path)[log]) == 3
        number = 3 + (8 if phase == "rl" else 0)
        assert Checkpoints(tmp_path / "run" / "checkpoints", keep=2).latest() == number
    with pytest.raises(_Died):
        run(True, "metrics", 5, die)
    assert "resuming after rl step 3" in capsys.readouterr().out
    assert len(reproducible(tmp_path)["metrics"]) == 5
    assert run(True).finished
    assert "resuming after rl step 4" in capsys.readouterr().out
    assert reproducible(tmp_path) == reproducible(tiny_run[0])


_ASKED = 1 + 8 + 1 + 6  # at the start, after each update of fine-tuning, before RL, after RL steps


# At the beginning and the end of fine-tuning (1, 8), before RL (9), after a step with a checkpoint
# (11), with an evaluation (12), and after the last (15).
@pytest.mark.slow
@pytest.mark.parametrize("asked", [1, 8, 9, 11, 12, 15])
def test_stopped_at_any_point(tiny_run, tmp_path, capsys, asked):
    """A signal that is first seen after so many questions: what is said to be saved is saved."""
    calls = []

    def stop() -> str | None:
        calls.append(None)
        return "SIGTERM" if len(calls) > asked else None

    outcome = train.train(load_config(str(CONFIG), overrides(tmp_path)), stop=stop)
    if asked == _ASKED - 1:  # at the end of the last step
        assert outcome.finished and reproducible(tmp_path) == reproducible(tiny_run[0])
        return
    assert not outcome.finished and outcome.stopped_by == "SIGTERM"
    said = re.search(
        r"stopped by SIGTERM after (sft|rl) step (\d+), saved", capsys.readouterr().out
    )
    assert said
    number = int(said[2]) + (8 if said[1] == "rl" else 0)
    assert Checkpoints(tmp_path / "run" / "checkpoints", keep=2).latest() == number
    steps = len(reproducible(tmp_path)["sft"]) + len(reproducible(tmp_path)["metrics"])
    assert steps == number


class _DyingLogger:
    """Takes what it is given until RL step 3, and nothing afterwards."""

    writes_anew = False

    def __init__(self, directory, config):
        pass

    def write(self, phase, numbers, step):
        if phase == "rl" and step >= 3:
            raise ConnectionError("the service is away")

    def samples(self, phase, rows, step):
        pass

    def close(self):
        raise ConnectionError("the service is away")


@pytest.mark.slow
def test_a_run_whose_logger_dies(tiny_run, tmp_path, monkeypatch, capsys):
    """At step 3 of 6, and again at its end: the run is the one without it, with its report."""
    monkeypatch.setitem(sinks._SINKS, "wandb", (_DyingLogger, "json"))
    more = {"run.loggers": "tensorboard,wandb"}
    outcome = train.train(load_config(str(CONFIG), overrides(tmp_path, **more)))
    assert outcome.finished and outcome.report.exists()
    assert reproducible(tmp_path) == reproducible(tiny_run[0])
    output = capsys.readouterr().out
    assert output.count("warning: run.loggers: wandb fails (ConnectionError") == 1
    assert output.count("wandb has missed 4 of ") == 1 and "the first of rl step 3" in output


# Ten names, each a directory in another: whoever reads one as a pattern, a URL or a home fails.
_ODD_NAMES = ["[lr=1e-4]/a*b?/a\\b", "a%20b#c/a b\nc/-é漢", "~/gs:/s3:x/[[{a,b}]]"]


@pytest.mark.slow
@pytest.mark.parametrize("name", _ODD_NAMES)
def test_killed_in_a_directory_of_any_name(name, tiny_run, tmp_path):
    """SIGKILL after an RL step, twice a name: nothing is lost, and the run is that of any name."""
    directory = tmp_path / name
    for count, more in ((1, []), (4, ["--resume"])):
        kill_after_records(start(directory, *more), directory, "metrics", count)
    finish(start(directory, "--resume"))
    assert reproducible(directory) == reproducible(tiny_run[0])
    for inner in (directory, *directory.parents):
        if inner == tmp_path:
            break
        assert [path.name for path in inner.parent.iterdir()] == [inner.name]


@pytest.mark.slow
def test_killed_and_resumed_is_the_same(tiny_run, tmp_path):
    """SIGKILL after the fourth RL step (checkpoints are at 2 and 4), then --resume: with
    continuous batching. (Without: the test above.)"""
    fields = {"rollout.slots": 5}
    kill_after_records(start(tmp_path, **fields), tmp_path, "metrics", 3)
    finish(start(tmp_path, "--resume", **fields))
    directory, _ = tiny_run
    ours = reproducible(tmp_path)
    for record in ours["metrics"]:
        own = [name for name in record if name.startswith("rollout_")]
        assert len(own) == 3
        for name in own:
            del record[name]
    assert ours == reproducible(directory)


@pytest.mark.slow
def test_killed_and_resumed_with_dynamic_sampling(tmp_path):
    """SIGKILL after the fourth RL step. Steps differ in how many questions they take, so the
    resumed run goes on where the questions of the saved step ended."""
    fields = {"env.reward": "dense_reward:an_eighth", "algo.dynamic_sampling": True}
    finish(start(tmp_path / "whole", **fields))
    whole = reproducible(tmp_path / "whole")
    rounds = [record["dynamic_rounds"] for record in whole["metrics"]]
    assert len(rounds) == 6 and len(set(rounds)) > 1 and max(rounds) > 1
    killed = tmp_path / "killed"
    kill_after_records(start(killed, **fields), killed, "metrics", 4)
    finish(start(killed, "--resume", **fields))
    assert reproducible(killed) == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])  # SIGTERM: tests/test_processes.py
def test_a_signal_saves_and_leaves(tiny_run, tmp_path, name):
    """From fine-tuning on a signal ends the process with status 75; --resume gives the same run."""
    process = start(tmp_path)
    wait_for_records(process, tmp_path, "sft", 2)
    process.send_signal(getattr(signal, name))
    assert f"stopped by {name}" in finish(process, status=75)
    assert len(read_jsonl(tmp_path / "run" / "sft.jsonl")) >= 2
    # On a busy machine the signal comes late.
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) < 6
    finish(start(tmp_path, "--resume"))
    directory, _ = tiny_run
    assert reproducible(tmp_path) == reproducible(directory)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(2))
def test_killed_at_a_random_moment(tiny_run, tmp_path, attempt):
    """SIGKILL at any moment, compilation and checkpointing included, twice in a row."""
    rng = random.Random(os.getpid() + attempt)
    for resume in ([], ["--resume"]):
        process = start(tmp_path, *resume, cached=False)
        try:
            process.communicate(timeout=rng.uniform(5, 60))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    finish(start(tmp_path, *(["--resume"] if (tmp_path / "run").exists() else [])))
    directory, _ = tiny_run
    assert reproducible(tmp_path) == reproducible(directory)


def test_nan_stops_with_the_last_good_state(tiny_run, tmp_path, monkeypatch):
    """A NaN in the parameters ends the run with step and layer; the saved state is finite."""
    made, refitted = JaxEngine.train_step, JaxEngine.refit
    served = []

    def refit(self, state):
        result = refitted(self, state)
        served.append(weakref.ref(jax.tree.leaves(result.weights)[0]))
        return result

    def poisoned(self, optimizer, loss, *more, **options):
        step = made(self, optimizer, loss, *more, **options)
        calls = {"count": 0}

        def run(state, batch, rope, base):
            calls["count"] += 1
            if loss == self.loss:
                assert served[-1]() is None, "the sampler's weights are given up before the update"
            if loss == self.loss and calls["count"] == 3:
                batch = batch.replace(advantages=jnp.full_like(batch.advantages, jnp.nan))
            return step(state, batch, rope, base)

        return run

    monkeypatch.setattr(JaxEngine, "train_step", poisoned)
    monkeypatch.setattr(JaxEngine, "refit", refit)
    arguments = _from_cache(tiny_run, tmp_path, **{"run.steps": 3})
    config = load_config(str(CONFIG), arguments)
    with pytest.raises(NonFiniteError, match=r"RL step 3: loss nan"):
        train.train(config)
    monkeypatch.undo()
    numbers = sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert numbers[-1] == 8 + 2
    assert cli.run(["train", "--config", str(CONFIG), *arguments, "--resume"]) == 0
    assert reproducible(tmp_path)["metrics"] == reproducible(tiny_run[0])["metrics"][:3]


def test_nan_names_the_layer(tmp_path, monkeypatch):
    """A NaN in one layer's weights is reported with that layer's number."""
    made = JaxEngine.init_params

    def broken(self):
        params = made(self)
        kernel = np.array(params["layers"]["down_proj"]["kernel"])
        kernel[1, 5, 7] = np.nan
        params["layers"]["down_proj"]["kernel"] = jax.device_put(kernel)
        return params

    monkeypatch.setattr(JaxEngine, "init_params", broken)
    config = load_config(str(CONFIG), overrides(tmp_path))
    with pytest.raises(NonFiniteError, match=r"SFT step 1: .*layer 1 is the first"):
        train.train(config)


@pytest.mark.slow
def test_many_updates_and_a_reference(tmp_path):
    """Two updates a rollout, two micro-batches each, KL to a reference; stopped and resumed."""
    fields = {
        "algo.num_minibatches": 2,
        "learner.gradient_accumulation_steps": 2,
        "algo.kl_coef": 0.1,
        "optimizer.learning_rate": 1e-2,
        "optimizer.warmup_steps": 0,
        "sft.steps": 0,
        "run.steps": 4,
        "run.checkpoint_every": 2,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.train(load_config(str(CONFIG), overrides(whole, **fields)))
    train.train(load_config(str(CONFIG), overrides(parts, **{**fields, "run.steps": 2})))
    train.train(load_config(str(CONFIG), overrides(parts, **fields)), resume=True)
    records = reproducible(whole)["metrics"]
    assert records == reproducible(parts)["metrics"]
    assert records[-1]["kl_ref"] > records[0]["kl_ref"] >= 0
    for record in records:
        tokens = 16 * record["response_len_mean"]
        assert 0 < record["drift_tokens"] < tokens, "the first update's half of the rollout"
        assert record["train_rollout_logprob_abs_diff_max"] == 0.0
        assert record["ratio_mean"] == 1.0 != record["ratio_mean/2"], "the second is off-policy"


_POLICIES = {
    f"precision.{operand}_policy": "ema_policy:ema"
    for operand in ("weight", "activation", "gradient")
}
_DELAYED = {"precision.rollout": "fp8_delayed", "precision.learner": "fp8_delayed"}
_STATEFUL = {
    "policy of the user's": {**_DELAYED, **_POLICIES},
    "calibrated KV, FP8 attention, bf16 layers": {
        "precision.kv_cache": "fp8_calibrated",
        "precision.attention": "fp8",
        "precision.first_layers_bf16": 1,
        "precision.bf16_modules": "down_proj",
    },
    "experts, delayed": {**_DELAYED, "model.num_experts": 4, "model.moe_intermediate_size": 96},
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", _STATEFUL.values(), ids=_STATEFUL)
def test_states_are_checkpointed_and_keep_zero_drift(fields, tmp_path):
    """Scaling states and calibrated scales go through SFT, refit, updates and resume."""
    fields = {
        **fields,
        "run.steps": 4,
        "run.checkpoint_every": 2,
        "learner.gradient_accumulation_steps": 2,
        "algo.kl_coef": 0.1,
        "optimizer.learning_rate": 1e-2,
        "optimizer.warmup_steps": 0,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _, counts = train_counting(overrides(whole, **fields))
    assert set(counts.values()) == {1}
    train.train(load_config(str(CONFIG), overrides(parts, **{**fields, "run.steps": 2})))
    train.train(load_config(str(CONFIG), overrides(parts, **fields)), resume=True)
    records = reproducible(whole)["metrics"]
    assert records == reproducible(parts)["metrics"]
    for record in records:
        assert record["train_rollout_logprob_abs_diff_max"] == 0.0
        assert record["refit_checksum_ok"] is True
        assert record["grad_norm"] > 0
        if "precision.kv_cache" in fields:
            assert record["scale_age/kv"] == 0
        else:
            assert record["scale_age/weights"] == 0
            assert record["fp8_underflow_frac/gradients"] < 0.5
    assert len({record["entropy"] for record in records}) == 4, "the policy moves"
    assert any(record["reward_std"] > 0 for record in records)


@pytest.mark.slow
def test_health_can_be_switched_off(tiny_run, tmp_path):
    """The same run without counts: every other number is the same."""
    directory, _ = tiny_run
    fields = {"run.cache_dir": directory / "cache", "run.steps": 2, "precision.health": False}
    train.train(load_config(str(CONFIG), overrides(tmp_path, **fields)))
    theirs = reproducible(directory)["metrics"]
    for ours, with_health in zip(reproducible(tmp_path)["metrics"], theirs, strict=False):
        assert not any(name.startswith("fp8_") for name in ours)
        assert {k: v for k, v in with_health.items() if not k.startswith("fp8_")} == ours
        classes = {"activations", "gradients", "weights", "kv"}
        assert {name for name in with_health if name.startswith("fp8_underflow_frac")} == {
            f"fp8_underflow_frac/{name}" for name in classes
        }


@pytest.mark.slow
def test_mixed_precision_drifts(tmp_path):
    """FP8 rollout with a bf16 learner: the same metrics are visibly not zero."""
    fields = {"precision.learner": "bf16", "run.steps": 2, "sft.steps": 0}
    config = load_config(str(CONFIG), overrides(tmp_path, **fields))
    train.train(config)
    for record in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert record["train_rollout_logprob_abs_diff"] > 1e-4
        assert record["logprob_equal_frac"] < 0.5
        assert record["token_mult_prob_error"] > 1.0
        assert "refit_checksum_ok" not in record, "other recipes: other bytes by design"


def test_golden_curve(tiny_run):
    """The tiny run's numbers stay what they were, within what other CPUs and versions differ."""
    golden = json.loads((CONFIG.parents[1] / "golden" / "tiny_run.json").read_text())
    assert golden["metrics"].keys() == {"entropy", "reward_mean", "grad_norm"}
    for file, columns in golden.items():
        records = read_jsonl(tiny_run[0] / "run" / f"{file}.jsonl")
        for name, expected in columns.items():
            np.testing.assert_allclose([r[name] for r in records], expected, rtol=_GOLDEN[name])
