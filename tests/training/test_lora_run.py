"""A run that trains adapters: drift 0, the base untouched, resumed bit for bit, exported whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_checkpoints import bf16
from tiny_run import CONFIG, overrides, train_counting, without_times

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.main import run
from fp8rl_jax.config import load_config
from fp8rl_jax.models import hf
from fp8rl_jax.models.masters import Adapted, merged, with_frozen
from fp8rl_jax.policy.load import open_trained
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import make_runtime

_FIELDS = {"lora.rank": 4, "lora.modules": "*_proj"}


def _trained(directory, **fields):
    """The Runtime and the newest state of a run."""
    runtime = make_runtime(load_config(str(CONFIG), overrides(directory, **fields)))
    found = open_trained(runtime, directory / "run")
    state = found.state()
    found.checkpoints.close()
    return runtime, state


@pytest.mark.parametrize("base", ["bf16", "fp8"])
def test_state_shapes(base, tmp_path):
    """The first state of a phase has the shapes that its programs are made for."""
    fields = {**_FIELDS, "lora.base": base}
    runtime = make_runtime(load_config(str(CONFIG), overrides(tmp_path, **fields)))
    optimizer = optimizer_of_phase(runtime.config, "sft")
    state = runtime.engine.new_state(runtime.engine.initial_params(), optimizer)
    own = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    shapes = runtime.engine.layout.state_shapes(optimizer)
    assert own == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"rollout.slots": 4}, id="continuous"),
        pytest.param({"model.num_experts": 4, "lora.base": "f32"}, id="experts"),
        pytest.param(
            {"algo.kl_coef": 0.1, "lora.base": "fp8"}, id="reference policy, a base in fp8"
        ),
    ],
)
def test_run(more, tmp_path):
    fields, whole, parts = {**_FIELDS, **more}, tmp_path / "whole", tmp_path / "parts"
    outcome, counts = train_counting(overrides(whole, **fields))
    assert outcome.finished and set(counts.values()) == {1}, counts
    records = [without_times(row) for row in read_jsonl(whole / "run" / "metrics.jsonl")]
    for record in records:
        assert record["train_rollout_logprob_abs_diff_max"] == 0.0 and record["refit_checksum_ok"]
        assert record["grad_norm"] > 0
    if "algo.kl_coef" in more:
        kl = [record["kl_ref"] for record in records]
        assert kl[0] == 0 and all(kl[1:]), "the reference is the adapters as RL began"

    train_counting(overrides(parts, **fields, **{"run.steps": 2}))
    _, before = _trained(parts, **fields)
    command = ["train", "--config", str(CONFIG), "--resume", *overrides(parts, **fields)]
    assert run(command) == 0
    resumed = [without_times(row) for row in read_jsonl(parts / "run" / "metrics.jsonl")]
    assert resumed == records
    runtime, after = _trained(parts, **fields)
    jax.tree.map(np.testing.assert_array_equal, after.params.base, before.params.base)
    pairs = zip(*map(jax.tree.leaves, (after.params.adapters, before.params.adapters)), strict=True)
    assert not any(np.array_equal(*pair) for pair in pairs)

    # The export in FP8 has the sampler's bytes, that in bf16 the merged weights.
    for dtype in ("fp8", "bf16"):
        command = ["convert", str(parts / "run"), str(tmp_path / dtype), f"--dtype={dtype}"]
        assert run([*command, "--allow-import=dense_reward"]) == 0
    weights = jax.device_get(runtime.engine.refit(after).weights)
    _, found = hf.load(tmp_path / "fp8", dtype="fp8")
    ours, theirs = (tree["layers"]["self_attn"]["q_proj"]["kernel"] for tree in (weights, found))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    _, found = hf.load(tmp_path / "bf16")
    ours, theirs = (
        np.asarray(tree["layers"]["self_attn"]["q_proj"]["kernel"])
        for tree in (merged(after.params), found)
    )
    np.testing.assert_array_equal(theirs, bf16(ours).astype(np.float32))

    # A run from the exported adapter begins with its bits.
    adapter = tmp_path / "adapter"
    command = ["convert", str(parts / "run"), str(adapter), "--adapter"]
    assert run([*command, "--allow-import=dense_reward"]) == 0
    again = {**fields, "lora.checkpoint": str(adapter)}
    new = make_runtime(load_config(str(CONFIG), overrides(tmp_path / "new", **again)))
    optimizer = optimizer_of_phase(new.config, "rl")
    state = new.engine.new_state(new.engine.initial_params(), optimizer)
    adapters = (state.params.adapters, after.params.adapters)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, adapters))


def test_another_base_is_refused(tmp_path):
    """Checkpoints hold adapters alone: on other weights they would be another policy."""
    base, other = ({"norm": {"weight": value(3)}} for value in (jnp.ones, jnp.zeros))
    state = {"params": Adapted(base, {"a": jnp.ones(2)}, 1.0)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(0, state, {})
    assert checkpoints.restore(0, state)["params"].base is base
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(UserError, match="0 holds adapters of another base"):
        checkpoints.restore(0, with_frozen(state, other))
    checkpoints.close()
