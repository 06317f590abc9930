"""`fp8rl plan --compile`: the estimate of a train step beside what XLA plans for H200s."""

from __future__ import annotations

import pathlib
import sys

import jax
import pytest

from fp8rl_jax import cli, sharding
from fp8rl_jax.cli.plan_learner import format_compiled
from fp8rl_jax.config import load_config
from fp8rl_jax.plan.learner import plan_learner
from fp8rl_jax.plan.planned import Planned, read_planned
from fp8rl_jax.training import aot
from fp8rl_jax.training.aot import (
    Compiled,
    compile_for_h200,
    described_runtime,
    trace_decode_step,
    trace_train_step,
)

_CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
_TINY = str(_CONFIGS / "tiny_arithmetic.py")
_GIB = 2**30


def _planned(config: str, *fields: str) -> Planned:
    read = load_config(str(_CONFIGS / f"{config}.py"), [f"--config.{field}" for field in fields])
    return read_planned(read)


@pytest.fixture
def compiled(monkeypatch):
    """Programs are not compiled: 1 GiB of arguments and 3 of temporary, and 2 and 5 a layer."""
    tried = []

    def program(runtime) -> Compiled:
        layers = runtime.resolved.model.num_hidden_layers
        tried.append(layers)
        return Compiled((1 + 2 * layers) * _GIB, (3 + 5 * layers) * _GIB, {"all-gather u8": 7})

    monkeypatch.setattr(aot, "_compile", program)
    monkeypatch.setattr(aot.h200, "h200_mesh", lambda axes, hosts: tuple(axes))
    for name in ("trace_train_step", "trace_decode_step"):
        monkeypatch.setattr(aot, name, lambda runtime: runtime)
    return tried


def test_a_large_model_is_extrapolated(compiled):
    """Two and four layers beside dense first ones; the line is exact, and the output says so."""
    found = _planned("qwen3_235b_a22b", "model.name=qwen3_235b_a22b")
    program = compile_for_h200(lambda runtime: runtime, found)
    assert compiled == [2, 4]
    assert program.layers == (2, 4)
    assert program.needed == (1 + 3 + 7 * 94) * _GIB
    lines = "\n".join(
        format_compiled(found, plan_learner(found.resolved, found.mesh), lambda text: None)
    )
    assert "Extrapolated to 94 layers from programs of 2 and 4 layers" in lines
    fields = ["model.name=deepseek_v3", "mesh.fsdp=8", "mesh.expert=8"]
    deepseek = _planned("moonlight_16b", *fields, "rollout.prompts_per_step=64")
    assert compile_for_h200(lambda runtime: runtime, deepseek).needed == (4 + 7 * 61) * _GIB
    assert compiled == [2, 4] * 3 + [5, 7]


def test_other_models_are_compiled_whole(compiled):
    """The figures, their ratio and the collectives stand beside the estimate."""
    found = _planned("qwen3_8b", "model.name=qwen3_8b")
    program = compile_for_h200(lambda runtime: runtime, found)
    assert compiled == [36] and program.layers == ()
    plan = plan_learner(found.resolved, found.mesh)
    lines = "\n".join(format_compiled(found, plan, lambda text: None))
    assert "256.00 GiB" in lines and f"{plan.needed / _GIB:.2f} GiB" in lines
    assert f"{plan.needed / _GIB / 256:.2f} times the compiler's figure" in lines
    assert "Collectives in the train step: 7 all-gather u8." in lines
    assert "Extrapolated" not in lines


def test_calibrated_scales_are_weights_too():
    """What a GPU's sampler holds has a place for every array, KV scales among them."""
    resolved = _planned("tiny_arithmetic", "precision.kv_cache=fp8_calibrated").resolved
    mesh = sharding.make_mesh(resolved.config.mesh.to_dict())
    runtime = described_runtime(resolved, mesh)
    assert "k_scale" in runtime.layout.weight_shapes["layers"]["self_attn"]
    assert jax.tree.structure(runtime.layout.weight_shardings) == jax.tree.structure(
        runtime.layout.weight_shapes
    )


def test_without_the_plugin(capsys, monkeypatch, tmp_path):
    """One sentence, after the estimate."""
    from jax._src import xla_bridge

    jax.devices()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(xla_bridge, "_topology_factories", {})
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda13", None)
    status = cli.run(["plan", "--learner", "--compile", "--config", _TINY])
    output, error = capsys.readouterr()
    assert status == 2
    assert "together, with the largest at work" in output
    assert "fp8rl_jax[gpu_proofs]" in error.splitlines()[-1]


def _check(found: Planned) -> None:
    """The state within 1%; all together 1 to 1.6 times the compiler's figure."""
    program = compile_for_h200(trace_train_step, found)
    plan = plan_learner(found.resolved, found.mesh)
    assert plan.state == pytest.approx(program.arguments, rel=0.01)
    ratio = plan.needed / program.needed
    assert 1 <= ratio <= 1.6, (plan.needed / _GIB, program.needed / _GIB)


_NO_REMAT = ("learner.remat=none", "learner.tokens_per_batch=4352")
_PADDED = ("learner.tokens_per_batch=0", "learner.gradient_accumulation_steps=8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name", "fields"),
    [
        ("qwen3_8b", "qwen3_8b", ("mesh.data=2", "mesh.fsdp=4")),
        ("qwen3_4b", "qwen3_4b", ("mesh.fsdp=4", *_PADDED)),
        ("qwen3_1p7b_gsm8k", "qwen3_1p7b", _NO_REMAT),
        ("llama3p1_8b", "llama3p1_8b", ()),
        ("qwen3_8b", "qwen3_8b", ("mesh.fsdp=4", "mesh.tensor=2")),
        ("smollm2_135m", "smollm2_135m", ("mesh.fsdp=4",)),
        ("qwen3_30b_a3b", "qwen3_30b_a3b", ("mesh.fsdp=2",)),
        ("moonlight_16b", "moonlight_16b_a3b", ("mesh.fsdp=4", "mesh.expert=2")),
    ],
)
def test_the_estimate_is_an_upper_one(config, name, fields):
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    _check(_planned(config, f"model.name={name}", *fields))


@pytest.mark.slow
def test_the_estimate_of_a_large_model():
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    _check(_planned("qwen3_235b_a22b", "model.name=qwen3_235b_a22b"))


@pytest.mark.slow
def test_a_decode_step_of_the_config():
    """Weights and the cache of all sequences are its arguments; it makes no second cache."""
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    found = _planned("qwen3_8b", "model.name=qwen3_8b")
    program = compile_for_h200(trace_decode_step, found)
    weights = (6.95e9 + 2 * 1.245e9) * 1.001
    cache = 64 * 4608 * 36 * 16 * 132  # sequences of a device, tokens, layers, K and V of 8 heads
    assert program.arguments == pytest.approx(weights + cache, rel=0.03)
    assert program.temporary < 0.2 * cache
