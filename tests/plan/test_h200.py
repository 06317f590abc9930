"""Programs compiled for H200s without one: who computes their products, and what they send."""

import pathlib
import re
import sys

import jax
import pytest
from marks import slow

pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs" / "scripts"))

import aot_h200

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.plan import h200


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(aot_h200, "SLOTS", 256)
    monkeypatch.setattr(aot_h200, "PROMPT", 64)
    monkeypatch.setattr(aot_h200, "SEQUENCES", {"decode": 8, "train": 8})


@pytest.mark.parametrize("kernels", ["auto", slow("mosaic")])
def test_decode_step(monkeypatch, kernels):
    """No product but the kernels', and no copy of the weights or of the cache.

    A layer has 10 launches: four products, attention in two and its inputs, two norms and the gate;
    the inputs of products are quantised in passing. XLA's only one counts layers.
    """
    monkeypatch.setattr(aot_h200, "SLOTS", 2048)
    programs = aot_h200.Programs("qwen3_0p6b", h200.h200_mesh({}), layers=2, kernels=kernels)
    compiled = programs.decode().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    cache = 2 * 2 * 8 * 2048 * 8 * (128 + 4)  # layers, K and V, sequences, slots, heads
    assert memory.alias_size_in_bytes > cache, "the given cache's memory is the result's"
    assert memory.temp_size_in_bytes < 0.2 * cache, "the logits, above all"
    found = h200.products(text)
    assert set(found) == {"ours"}
    assert sum("DecoderLayer" in name for name in found["ours"]) == 10
    assert not h200.collectives(text)
    assert len(h200.launches(text, 2)) == 11
    assert text.count("mosaic_gpu_v2") == (4 if kernels == "mosaic" else 0)
    assert h200.unknown_loops(text) == h200.sorts(text) == 0
    copied = [
        line
        for line in text.splitlines()
        if "f8e4m3fn[2,3072,1024]" in line.partition("=")[2].partition("(")[0]
        and any(f" {name}(" in line for name in ("copy", "transpose", "fusion"))
    ]
    assert not copied


@pytest.mark.slow
def test_continuous_batching_keeps_its_pool_in_place(monkeypatch):
    """The loop of continuous batching: no product but the kernels', and no second pool.

    A layer has 10 launches in a decode step, those above, and as many in a chunk of prefill.
    """
    monkeypatch.setattr(aot_h200, "SLOTS", 1024)
    monkeypatch.setattr(aot_h200, "SEQUENCES", {"decode": 64})
    programs = aot_h200.Programs("qwen3_0p6b", h200.h200_mesh({}), layers=2)
    compiled = programs.continuous().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    found = h200.products(text)
    assert set(found) == {"ours"}
    assert sum("DecoderLayer" in name for name in found["ours"]) in (19, 20)
    assert h200.unknown_loops(text) == 3
    pages = 2 * (64 * 16 + 1)
    keys = pages * 64 * 8 * 128
    pool = 2 * (keys + 4 * keys // 128)
    assert memory.alias_size_in_bytes > pool, "the given state's memory is the result's"
    assert memory.temp_size_in_bytes < pool / 3
    # Arrays of the pool's size: what the loops carry, and writes into it; none in another type.
    shape = rf"\[{pages},64,8(?:,128)?\]"
    made = re.findall(rf" = (\w+){shape}\{{([\d,]*)\}} ([\w-]+)\(", text)
    assert {layout for _, layout, _ in made} == {"3,2,1,0", "2,1,0"}
    assert {kind for kind, *_ in made} == {"s8", "f32"}
    stored = {operation for *_, operation in made}
    assert stored == {"parameter", "get-tuple-element", "fusion", "scatter"}
    assert all(
        "calls=%fused_scatter" in line
        for line in text.splitlines()
        if re.search(rf" = \w+{shape}\S* fusion\(", line)
    )


@pytest.mark.slow
def test_decode_step_of_sharded_experts(monkeypatch):
    """Qwen3-235B on eight devices, 64 rows each: a device has an eighth of the experts, and
    receives the rows, their scales and choices, and the results of a layer, and nothing else.

    13 launches a layer: two products around attention, attention and its inputs, the router's
    product and three of experts, two norms and the gate; rows and the inputs of down_proj are
    quantised.
    """
    monkeypatch.setattr(aot_h200, "SEQUENCES", {"decode": 512})
    programs = aot_h200.Programs("qwen3_235b_a22b", h200.h200_mesh({"expert": 8}), layers=2)
    compiled = programs.decode().compile()
    text, memory, model = (
        compiled.as_text(),
        compiled.memory_analysis(),
        programs.runtime(8).resolved.model,
    )
    tables = 2 * 2 * model.vocab_size * model.hidden_size  # bf16
    cache = 2 * 2 * 4 * 256 * 64 * (128 + 4)  # layers, K and V, heads, slots, rows
    layer = (memory.argument_size_in_bytes - tables - cache) / 2
    assert (94 * layer + tables) / 2**30 < 36
    assert h200.collectives(text) == {"all-gather u8": 1, "ragged-all-to-all f32": 1}
    rows, width, chosen = 64, model.hidden_size, model.num_experts_per_tok
    # JAX 0.11.2's XLA runs the gather at once, JAX 0.10.2's starts it and waits for it later.
    ended = re.findall(r" = (.*) (all-gather|ragged-all-to-all)(?:-done)?\(", text)
    received = {kind: set(re.findall(r"\w+\[[\d,]+\]", arrays)) for arrays, kind in ended}
    every = 8 * rows
    assert received == {
        "all-gather": {
            f"u8[{every},{width}]",
            f"f32[{every},{width // 128}]",
            f"s32[{every},{chosen}]",
        },
        "ragged-all-to-all": {f"f32[{rows * chosen},{width}]"},
    }
    found = h200.products(text)
    assert set(found) == {"ours"}
    assert sum("DecoderLayer" in name for name in found["ours"]) == 13


_PROGRAM = """HloModule m

%fused (p: f32[2]) -> f32[2] {
  ROOT %p = f32[2]{0} parameter(0)
}

%cond.1 (c: (s32[], f32[2])) -> pred[] {
  ROOT %more = pred[] compare(%a, %b), direction=LT
}

%layer.1 (c: (s32[], f32[2])) -> (s32[], f32[2]) {
  %c = (s32[], /*index=1*/f32[2]{0}) parameter(0)
  %x = f32[2]{0} get-tuple-element(%c), index=1
  %norm.3 = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/norm/add"}
  %k = (f32[2]{0}, /*index=1*/f32[2]{0}) custom-call(%norm.3), custom_call_target="ours"
  %s = (f32[2]{0}, s32[2]{0}) sort(%x, %x), dimensions={0}
  ROOT %t = (s32[], /*index=1*/f32[2]{0}) tuple(%c, %x)
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %w = (s32[], /*index=1*/f32[2]{0}) while(%i), body=%layer.1, {"known_trip_count":{"n":"6"}}
  %v = (s32[], /*index=1*/f32[2]{0}) while(%w), condition=%cond.1, body=%other
  ROOT %r = (s32[], /*index=1*/f32[2]{0}) conditional(%p, %v, %v), branch_computations={%a, %b}
}
"""


def test_what_a_loop_starts():
    """Kernels, custom calls and sorts; not what only names values."""
    found = h200.launches(_PROGRAM, 6)
    assert found == [("norm.3", "jit(f)/norm/add"), ("k", ""), ("s", "")]
    assert h200.launches(_PROGRAM, 7) == []
    assert h200.unknown_loops(_PROGRAM) == 2
    assert h200.sorts(_PROGRAM) == 1


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_train_step(axes):
    programs = aot_h200.Programs("qwen3_0p6b", h200.h200_mesh(axes), layers=2)
    text = programs.train(1).compile().as_text()
    found = h200.products(text)
    assert len(found.pop("ours")) >= 40
    assert not found
    sent = h200.collectives(text)
    assert bool(sent) == bool(axes)
    if axes:
        assert sent["all-gather u8"]  # weights as bytes; XLA may send several at once


@pytest.mark.slow
def test_a_layer_of_sharded_experts(monkeypatch):
    """A further layer needs temporary bytes of at most three times its float32 shard. Experts that
    are replicated would need 20 times as much."""
    name = "qwen3_30b_a3b"
    mesh = h200.h200_mesh({"fsdp": 4, "expert": 4}, 2)
    monkeypatch.setattr(aot_h200, "SEQUENCES", {"train": 2 * mesh.size})
    temporary, text = {}, ""
    for layers in (2, 4):
        programs = aot_h200.Programs(name, mesh, layers)
        compiled = programs.train(2).compile()
        temporary[layers] = compiled.memory_analysis().temp_size_in_bytes
        text = compiled.as_text()
    shapes = programs.runtime(2 * mesh.size).layout.param_shapes["layers"]
    layer = sum(x.size // 4 for x in jax.tree.leaves(shapes))
    assert (temporary[4] - temporary[2]) / 2 < 3 * 4 * layer / mesh.size
    sent = h200.collectives(text)
    assert sent["all-gather u8"] and sent["reduce-scatter f32"] >= 8  # seven kernels, and the head


def test_without_the_plugin_it_says_what_to_install(monkeypatch):
    from jax._src import xla_bridge

    jax.devices()
    monkeypatch.setattr(xla_bridge, "_topology_factories", {})
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda13", None)
    with pytest.raises(UserError, match=r"fp8rl_jax\[gpu_proofs\]"):
        h200.h200_mesh({})
