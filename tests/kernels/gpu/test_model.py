"""The model on the GPU kernels, run in Triton's interpreter: same results, no drift.

Everything that adds is a kernel here, behind the library's own wrappers. What a tensor core
adds within an instruction the interpreter adds in float32, one product after another.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

pytest.importorskip("triton", reason="needs Triton: pip install 'fp8rl_jax[dev]'")


from random_model import initial_params, quantized

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import make_batch, pack
from fp8rl_jax.kernels.gpu import (
    attention,
    attention_inputs,
    embedding,
    fast_attention,
    head,
    matmul,
    norm,
)
from fp8rl_jax.learner import ForwardPass, response_logprobs
from fp8rl_jax.models import (
    ModelConfig,
    Tokens,
    forward,
    hidden_states,
    init_cache,
    layers,
    rope_tables,
    trainable_params,
)
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.rollout import Batching, ContinuousSampler, Requests, SamplerConfig, make_sampler

_DENSE = ModelConfig(
    vocab_size=96,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    intermediate_size=256,
)
_BIASED = dict(qk_norm=False, qkv_bias=True)
_GEMMA = dict(
    sandwich_norms=True,
    unit_offset_norms=True,
    hidden_act="gelu_pytorch_tanh",
    scale_embeddings=True,
    sliding_window=4,
    sliding_window_pattern=2,
    rope_local_base_freq=100.0,
)
_OLMO2 = dict(sandwich_norms=True, pre_norms=False, qk_norm_by_head=False)
_GLM = dict(
    qkv_bias=True,
    partial_rotary_factor=0.5,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    scoring_func="sigmoid",
    n_shared_experts=1,
)
_GPT_OSS = dict(
    qk_norm=False,
    qkv_bias=True,
    o_bias=True,
    attention_sinks=True,
    sliding_window=4,
    sliding_window_pattern=2,
    hidden_act="clamped_swiglu",
    moe_bias=True,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
_LATENT = dict(
    kv_lora_rank=32,
    q_lora_rank=160,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    qk_norm=False,
    first_k_dense_replace=1,
    n_shared_experts=1,
    **_EXPERTS,
)
_PROMPTS, _NEW = 6, 5


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, interpreter):
    """The calls as they are traced: (name of the kernel, whether it quantises beside its work)."""
    calls = []

    def triton_call(kernel, *arrays, **keywords):
        calls.append((kernel.fn.__name__, keywords.get("QUANTIZE", False)))
        return interpreter.triton_call(kernel, *arrays, **keywords)

    for module in (matmul, norm, head, attention, attention_inputs, embedding, fast_attention):
        monkeypatch.setattr(module, "triton_call", triton_call)
    return calls


def _rollout(config, recipe, weights, rope, longest=_PROMPTS):
    sampler = make_sampler(config, recipe, SamplerConfig(_NEW, 2, (), 0))
    prompts = jax.random.randint(
        jax.random.key(1, impl="threefry2x32"), (2, longest), 1, config.vocab_size
    )
    lengths = jnp.asarray([longest, 3], jnp.int32)
    rows = jnp.arange(4, dtype=jnp.int32)
    key, temperature = jax.random.key(2, impl="threefry2x32"), jnp.full(4, 0.8)
    limits = jnp.full(4, _NEW, jnp.int32)
    requests = Requests(lengths, key, rows, temperature, limits, rope)
    rollout = sampler(weights, prompts, requests)
    prompts, lengths = (np.repeat(np.asarray(x), 2, 0) for x in (prompts, lengths))
    tokens = np.zeros((4, longest + _NEW), np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = prompts[row, :length]
        tokens[row, length : length + _NEW] = rollout.tokens[row]
    batch = make_batch(
        tokens,
        lengths,
        np.asarray(rollout.tokens),
        rollout.mask,
        np.asarray(temperature),
        np.zeros(4),
    )
    return rollout, batch


@pytest.mark.parametrize(
    ("name", "more"),
    [
        # Every kind of layer in float32 and FP8, every recipe once.
        slow("f32", _GEMMA, id="f32 gemma"),
        slow("f32", _GLM, id="f32 glm"),
        slow("f32", _GPT_OSS, id="f32 gpt-oss"),
        slow("fp8", _GEMMA, id="fp8 gemma"),
        slow("fp8", _OLMO2, id="fp8 olmo2"),
        slow("fp8", _GLM, id="fp8 glm"),
        slow("fp8", _GPT_OSS, id="fp8 gpt-oss"),
        slow("bf16", _BIASED, id="bf16 biased"),
        slow("fp8_blockwise", {}, id="fp8_blockwise"),
        slow("kv_formats:int8_fp8", {}, id="int8 and fp8"),
        slow("fake", {}, id="fake"),
        slow("fp8_tensorwise", {}, id="per tensor"),
    ],
)
def test_results_and_drift(interpreted, name, more):
    config = dataclasses.replace(_DENSE, **more)
    recipe = get_recipe(name)
    name = "fp8" if name.startswith(("kv_formats", "fp8_blockwise")) else name
    key = jax.random.key(3, impl="threefry2x32")
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jax.random.normal(key, x.shape)
            if path[-1].key in ("bias", "sinks", "gate_bias", "up_bias", "down_bias")
            else x
        ),
        initial_params(config),
    )
    rope = tuple(map(jnp.asarray, rope_tables(config, 16)))
    on_kernels = dataclasses.replace(recipe, kernels="triton")
    weights = quantized(params, on_kernels)
    rollout, batch = _rollout(config, on_kernels, weights, rope)

    def learn(recipe):
        def loss(params, batch):
            paired = trainable_params(params, weights, recipe)
            forward_pass = ForwardPass(config, recipe, remat="full")
            logp, entropy, _ = response_logprobs(forward_pass, paired, batch, rope)
            return (logp * batch.mask).sum(), (logp, entropy)

        (_, found), gradient = exact_jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
        return *found, gradient

    logp, entropy, gradient = learn(on_kernels)
    if recipe.row_local:  # no drift
        np.testing.assert_array_equal(np.asarray(logp), np.asarray(rollout.logprobs))
    fused = {kernel for kernel, quantised in interpreted if quantised}
    # Routed experts quantise what they sort.
    gates = not config.num_experts or config.n_shared_experts
    dense = {"gated_activation_kernel"} if gates else set()
    before = {"rms_norm_kernel"} if config.pre_norms else set()
    assert fused == (before | dense if name in ("fp8", "fake") else set())
    used = {"matmul_kernel", "rms_norm_kernel", "gated_activation_kernel", "head_statistics_kernel"}
    used |= {"logits_statistics_kernel", "combine_kernel", "head_gradient_kernel"}
    used |= {"attention_kernel", "query_gradient_kernel", "key_gradient_kernel"}
    used |= {"fast_attention_kernel"}  # for the gradients
    if name == "fp8":
        used |= {"quantize_rows_kernel", "quantize_columns_kernel"}
    assert {kernel for kernel, _ in interpreted} >= used

    want = learn(recipe)  # in jnp
    # A last bit moves a value's rounding to bf16 or FP8 now and then; where two experts nearly tie,
    # it moves a token from one to the other, so the worst tokens are left out there.
    bound, gradient_bound = {"f32": (2e-5, 2e-5), "bf16": (0.05, 0.05)}.get(name, (0.2, 0.3))
    share = 0.9 if config.num_experts and name != "f32" else 1.0
    for ours, theirs in zip((logp, entropy), want, strict=False):
        assert np.quantile(np.abs(ours - theirs), share) < bound
    size = jax.tree.map(lambda x: jnp.linalg.norm(x), want[2])
    error = jax.tree.map(
        lambda a, b, n: float(jnp.linalg.norm(a - b) / (n or 1)), gradient, want[2], size
    )
    assert np.quantile(jax.tree.leaves(error), share) < gradient_bound, error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "longest"),
    [("f32", {}, _PROMPTS), ("fp8", {}, 70), ("f32", _GEMMA, 70), ("fp8", _GPT_OSS, _PROMPTS)],
    ids=["f32 short", "fp8 shared", "f32 gemma shared", "fp8 gpt-oss short"],
)
def test_rows_of_several_sequences(monkeypatch, name, more, longest):
    """The sampler's bits, and the gradients of rows of one sequence; windows too, and a prompt that
    two sequences share. The head leaves out chunks of other tokens than the responses'."""
    monkeypatch.setattr(head, "CHUNK", 16)
    config = dataclasses.replace(_DENSE, **more)
    recipe = dataclasses.replace(get_recipe(name), kernels="triton")
    rope = tuple(map(jnp.asarray, rope_tables(config, longest + 10)))
    params = initial_params(config)
    weights = quantized(params, recipe)
    rollout, batch = _rollout(config, recipe, weights, rope, longest)
    packed, slots = pack(batch, longest + 10, 128 if longest < 64 else 192, 1, longest > 64)
    assert slots.micro_batches == 2 and slots.shared.any() == (longest > 64)

    def learn(batch):
        def loss(params, batch):
            paired = trainable_params(params, weights, recipe)
            forward_pass = ForwardPass(config, recipe, remat="full")
            logp, *_ = response_logprobs(forward_pass, paired, batch, rope)
            return (logp * batch.mask).sum(), logp

        (_, logp), gradient = exact_jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
        return np.asarray(logp), gradient

    logp, gradient = learn(packed)
    np.testing.assert_array_equal(slots.unpack(logp, _NEW), np.asarray(rollout.logprobs))
    want = learn(batch)[1]
    for ours, theirs in zip(*map(jax.tree.leaves, (gradient, want)), strict=True):
        bound = 1e-5 if name == "f32" else 0.1
        assert np.linalg.norm(ours - theirs) <= bound * np.linalg.norm(theirs)


@pytest.mark.slow
def test_continuous_batching():
    """On kernels over pages too it draws the static sampler's tokens with its bits."""
    recipe = dataclasses.replace(get_recipe("fp8"), kernels="triton")
    weights = quantized(initial_params(_DENSE), recipe)
    settings = SamplerConfig(_NEW, 2, (), 0)
    prompts = jax.random.randint(
        jax.random.key(1, impl="threefry2x32"), (2, _PROMPTS), 1, _DENSE.vocab_size
    )
    arguments = (
        weights,
        prompts,
        Requests(
            jnp.asarray([_PROMPTS, 3], jnp.int32),
            jax.random.key(2, impl="threefry2x32"),
            jnp.arange(4, dtype=jnp.int32),
            jnp.full(4, 0.8),
            jnp.asarray([_NEW, 2, 3, _NEW], jnp.int32),
            tuple(map(jnp.asarray, rope_tables(_DENSE, 16))),
        ),
    )
    sampler = ContinuousSampler(_DENSE, recipe, settings, Batching(2, 8, prefill_chunk=4))
    found, wanted = sampler(*arguments), make_sampler(_DENSE, recipe, settings)(*arguments)
    for field in ("tokens", "mask", "logprobs"):
        np.testing.assert_array_equal(getattr(found, field), getattr(wanted, field))
    assert sampler.progress.prefilled[0] >= _PROMPTS - 1 + 3 - 1
    assert int(sampler.progress.iterations[0]) > _NEW, "slots were refilled"


@pytest.mark.parametrize(
    ("more", "changes", "before", "after"),
    [
        slow({}, {}, 4, 1, id="dense"),
        pytest.param(
            {},
            dict(bf16_modules=("[kv]_proj", "up_proj")),
            4,
            1,
            id="some in bf16",
            marks=pytest.mark.slow,
        ),
        # Left: o_proj and the two products by head of both layers, and what the experts sorted.
        pytest.param(
            {**_LATENT, "num_hidden_layers": 2}, {}, 19, 9, id="latent", marks=pytest.mark.slow
        ),
    ],
)
def test_fused_quantisation(monkeypatch, interpreted, more, changes, before, after):
    """Norm and gate quantise in passing: fewer launches, and every bit as without.

    `before` and `after` are launches that only quantise, in the layers of a rollout: one of each
    kind of layer, as the scan has them.
    """
    config = dataclasses.replace(_DENSE, **{"num_hidden_layers": 1, **more})
    recipe = dataclasses.replace(get_recipe("fp8"), kernels="triton", **changes)
    params = initial_params(config)
    weights = quantized(params, recipe)
    tokens = jax.random.randint(
        jax.random.key(1, impl="threefry2x32"), (2, _PROMPTS), 1, config.vocab_size
    )
    probe = jax.random.normal(jax.random.key(2, impl="threefry2x32"), (config.hidden_size,))

    def rollout():
        cache = init_cache(config, recipe, 2, 8)
        out = forward(weights, Tokens.of(tokens), config, recipe, cache=cache)
        return out.logits, out.cache

    def loss(params):
        paired = trainable_params(params, weights, recipe)
        hidden = hidden_states(paired, Tokens.of(tokens), config, recipe).hidden
        return (hidden.astype(jnp.float32) * probe).sum()

    def run():
        interpreted.clear()
        results = exact_jit(lambda: rollout())()
        calls = collections.Counter(interpreted)
        return calls, (results, exact_jit(jax.value_and_grad(lambda p: loss(p)))(params))

    calls, fused = run()
    monkeypatch.setattr(layers, "fuses_quantisation", lambda recipe: False)
    plain_calls, plain = run()
    assert not any(quantised for _, quantised in plain_calls)
    assert plain_calls["quantize_rows_kernel", False] == before
    assert calls["quantize_rows_kernel", False] == after
    assert calls["rms_norm_kernel", True] >= 2 and calls["gated_activation_kernel", True] >= 1
    for one, other in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
