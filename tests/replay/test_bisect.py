"""`fp8rl bisect` names the step, the part and the cause of planted faults."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import CONFIG, overrides

from fp8rl_jax import cli
from fp8rl_jax.base.json_file import strict_json
from fp8rl_jax.data import Stream
from fp8rl_jax.replay.bisect import Parting, cause
from fp8rl_jax.training import rl
from fp8rl_jax.training import run as training_run
from fp8rl_jax.training.engine import JaxEngine
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.rewards import Rewards

_PARTS = {
    "tokens": "its rollout",
    "rewards": "its rewards",
    "record": "its metrics",
    "state": "its update",
}
_IMPORT = "--allow-import=dense_reward"
_STEP = 2  # of three, at which a fault is planted


def _train(directory: pathlib.Path, cache: pathlib.Path, **fields) -> pathlib.Path:
    fields = {"run.cache_dir": cache, "run.steps": 3, "run.keep_every": 1, **fields}
    assert cli.run(["train", "--config", str(CONFIG), *overrides(directory, **fields)]) == 0
    return directory / "run"


@pytest.fixture(scope="module")
def honest(tiny_run, tmp_path_factory):
    """(directory of a run of three steps, cache of its fine-tuning)."""
    cache = tiny_run[0] / "cache"
    return _train(tmp_path_factory.mktemp("honest"), cache), cache


@contextlib.contextmanager
def _step_with(change):
    """In the step of the fault calls ``change(step, runtime, state, served, *more)`` instead."""
    step = rl.rl_step

    def changed(runtime, state, *more):
        if int(state.step) == _STEP - 1:
            return change(step, runtime, state, *more)
        return step(runtime, state, *more)

    with mock.patch.object(rl, "rl_step", changed):
        yield


def _state(change):
    """Changes the state before the step."""
    return _step_with(lambda step, runtime, state, *more: step(runtime, change(state), *more))


def _result(owner, name, change):
    """Changes the result of a method during the step."""
    method = getattr(owner, name)

    def planted(step, *arguments):
        def changed(self, *given, **options):
            return change(method(self, *given, **options))

        with mock.patch.object(owner, name, changed):
            return step(*arguments)

    return _step_with(planted)


def _ulp(tree, index: int):
    """The tree with the last bit of a number in its `index`-th matrix of float32 changed."""
    leaves, structure = jax.tree.flatten(tree)
    place = [i for i, x in enumerate(leaves) if x.dtype == np.float32 and x.ndim > 1][index]
    values = np.array(leaves[place])
    flat = values.reshape(-1)
    flat[flat.size // 2] = np.nextafter(flat[flat.size // 2], np.float32(1))
    leaves[place] = jax.device_put(values, leaves[place].sharding)
    return jax.tree.unflatten(structure, leaves)


def _weight(index: int):
    return _state(lambda s: dataclasses.replace(s, params=_ulp(s.params, index)))


def _moment(index: int):
    return _state(lambda s: dataclasses.replace(s, opt_state=_ulp(s.opt_state, index)))


def _key():
    return _state(lambda s: dataclasses.replace(s, rng=s.rng + jnp.uint32(1)))


def _position():
    return _result(
        JaxEngine, "advance", lambda s: dataclasses.replace(s, data_state=s.data_state + 1)
    )


def _reward(sample: int, by: float):
    def change(found):
        scores, by_name = found
        scores = scores.copy()
        scores[sample] += by
        return scores, by_name

    return _result(Rewards, "result", change)


def _questions():
    return _result(Stream, "next", lambda found: [found[1], found[0], *found[2:]])


def _token(sample: int):
    def change(rollout):
        tokens = np.array(rollout.tokens)
        tokens[sample, 0] ^= 1
        return dataclasses.replace(rollout, tokens=tokens)

    return _result(JaxEngine, "sample", change)


def _logprob(sample: int):
    def change(rollout):
        logprobs = np.array(rollout.logprobs)
        logprobs[sample, 0] = np.nextafter(logprobs[sample, 0], np.float32(0))
        return dataclasses.replace(rollout, logprobs=logprobs)

    return _result(JaxEngine, "sample", change)


def _refit_left_out():
    """The next step samples with the weights that this one began with."""

    def planted(step, runtime, state, served, *more):
        before = jax.tree.map(np.array, served.weights)
        result = step(runtime, state, served, *more)
        result.served.weights = jax.tree.map(jnp.asarray, before)
        return result

    return _step_with(planted)


def _elsewhere(fault, **values):
    """A fault of another machine, or of other versions, which the run's first line names."""
    found = training_run.made_with
    stack = contextlib.ExitStack()
    stack.enter_context(fault)
    made_with = lambda runtime: found(runtime) | values
    stack.enter_context(mock.patch.object(training_run, "made_with", made_with))
    return stack


def _field(name: str, value, step: int = 1, part: str = "state"):
    """A field of the configuration: its name, and the first step and part that it changes."""
    return contextlib.nullcontext, {name: value}, step, part, f"made with different config.{name}"


_OTHERWISE = "of the second run is not as recorded: it was computed otherwise"
# {name: (what plants it, fields, step at which the runs part, first part, words of the cause)}.
_FAULTS = {
    **{
        f"weight {i}": (
            lambda i=i: _weight(i),
            {},
            2,
            part,
            _OTHERWISE,
        )  # some change a byte of FP8
        for i, part in enumerate(("state", "state", "state", "record", "state", "record"))
    },
    **{f"moment {i}": (lambda i=i: _moment(i), {}, 2, "state", _OTHERWISE) for i in (0, 3)},
    "key": (_key, {}, 2, "tokens", _OTHERWISE),
    "position": (_position, {}, 2, "state", _OTHERWISE),
    **{
        f"reward {s} by {b}": (lambda s=s, b=b: _reward(s, b), {}, 2, "rewards", _OTHERWISE)
        for s, b in ((0, 0.25), (3, np.nan), (7, 1e-9), (8, 1e-16), (15, -3.0))
    },
    "questions": (_questions, {}, 2, "prompts", _OTHERWISE),
    **{f"token {s}": (lambda s=s: _token(s), {}, 2, "tokens", _OTHERWISE) for s in (0, 9, 15)},
    **{
        f"log-probability {s}": (lambda s=s: _logprob(s), {}, 2, "tokens", _OTHERWISE)
        for s in (1, 3, 14)
    },
    "refit": (_refit_left_out, {}, 3, "tokens", _OTHERWISE),
    **{
        name: (
            lambda name=name, plant=plant: _elsewhere(plant(), **{name: "another"}),
            {},
            2,
            part,
            f"made with different {name} (",
        )
        for name, plant, part in (
            ("machine.products", lambda: _weight(1), "state"),
            ("machine.machine", lambda: _moment(0), "state"),
            ("machine.kind", lambda: _logprob(5), "tokens"),
            ("versions.jaxlib", lambda: _weight(0), "state"),
            ("versions.fp8rl_jax", lambda: _token(2), "tokens"),
            ("versions.numpy", lambda: _reward(4, 1e-12), "rewards"),
            ("functions.dense_reward.py", lambda: _reward(2, 0.5), "rewards"),
            ("data", _questions, "prompts"),
        )
    },
    "learning rate": _field("optimizer.learning_rate", 2e-4, part="record"),
    "b2": _field("optimizer.b2", 0.9),
    "weight decay": _field("optimizer.weight_decay", 0.3, part="record"),
    "warmup": _field("optimizer.warmup_steps", 3, part="record"),
    "KL": _field("algo.kl_coef", 0.1, part="record"),
    "aggregation": _field("algo.loss_aggregation", "seq_mean_token_mean", part="record"),
    "baseline": _field("algo.baseline", "none", part="record"),
    "scale": _field("algo.scale", "none", part="record"),
    "epochs": _field("algo.epochs", 2, part="record"),
    "mini-batches": _field("algo.num_minibatches", 2, part="record"),
    "temperature": _field("rollout.temperature", 0.9, part="tokens"),
    "top-p": _field("rollout.top_p", 0.9, part="tokens"),
    "top-k": _field("rollout.top_k", 5, part="tokens"),
    "questions of a step": _field("rollout.prompts_per_step", 2, part="prompts"),
    "rollouts ahead": _field("rollout.ahead", 1, part="record"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _FAULTS)
def test_planted_fault(name, honest, tmp_path, capsys):
    directory, cache = honest
    plant, fields, step, part, words = _FAULTS[name]
    with plant():
        other = _train(tmp_path, cache, **fields)
    capsys.readouterr()
    assert cli.run(["bisect", str(directory), str(other), _IMPORT]) == 1
    out = capsys.readouterr().out
    assert f"the runs part at RL step {step}: " in out
    assert f"({part} differ)" in out or f"({part}, " in out
    assert words in out, out


def test_causes():
    """What is said for each outcome of the two replays."""
    same = Parting("rl", 4, ["tokens"], {})
    other = dataclasses.replace(same, made_with={"config.run.seed": (0, 1)})
    assert "config.run.seed (0, 1)" in cause(other, None)
    assert "RL step 4 of the first run is not as recorded" in cause(same, (False, True))
    assert "of the first and the second run is not" in cause(other, (False, False))
    assert "not in what they were made with" in cause(same, None)
    assert "a reward, an environment or a tool" in cause(same, (True, True))
    start = Parting("sft", 0, ["state"], {})
    assert "before the first step of fine-tuning" in str(start)


def test_a_file_in_the_place_of_a_run(tiny_run, tmp_path, capsys):
    """The last line of a run's digests.jsonl, which a repository may keep."""
    run = tiny_run[0] / "run"
    (line,) = read_jsonl(run / "digests.jsonl")[-1:]
    file = tmp_path / "bits.json"
    for digest, status, said in (
        (line["state"], 0, "equal bit for bit up to RL step 6"),
        ("0" * 16, 1, "the runs part at RL step 6: its update (state differ)"),
    ):
        file.write_text(strict_json(line | {"state": digest}) + "\n")
        assert cli.run(["bisect", str(file), str(run)]) == status
        assert capsys.readouterr().out.startswith(said)
    file.write_text(strict_json(line | {"step": 7}) + "\n")
    assert cli.run(["bisect", str(file), str(run)]) == 2
    assert "have no step in common" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tokens", "rewards", "record", "state"])
def test_edited_digests(part, honest, tmp_path, capsys):
    """A record that was changed afterwards."""
    directory, _ = honest
    other = tmp_path / "run"
    shutil.copytree(directory, other)
    lines = read_jsonl(other / "digests.jsonl")
    lines[-1][part] = "0" * 16
    (other / "digests.jsonl").write_text("".join(strict_json(line) + "\n" for line in lines))
    assert cli.run(["bisect", str(directory), str(other), _IMPORT]) == 1
    out = capsys.readouterr().out
    assert f"the runs part at RL step 3: {_PARTS[part]} ({part} differ)" in out
    assert _OTHERWISE in out, out
