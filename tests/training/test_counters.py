"""What quantisation lost, as metrics: shares, the layer named as the worst, and ages of scales.

Proven: each share is the sum of a count over all sites and layers by the sum of the elements; the
worst layer is that of the largest share of a single site and layer, a block that is not finite
weighing more than any share; its number is the model's, whatever layers the recipe keeps in bf16;
nothing lost names nobody, and no elements give no metric; ages are the oldest of a class. Counts of
real steps, summed over updates, are in test_train.py.
"""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8rl_jax.quant import (
    SiteScaling,
    calibrated_scales,
    get_recipe,
    init_site,
    missing_scales,
    update_site,
)
from fp8rl_jax.quant.kv import with_scales
from fp8rl_jax.training.counters import age_metrics, loss_metrics
from fp8rl_jax.training.step_metrics import learner_token_metrics, memory_metrics, rate_metrics

KEYS = ("saturated", "underflowed", "nonfinite_blocks", "elements")


def _counts(saturated, underflowed, nonfinite_blocks, elements) -> dict[str, np.ndarray]:
    """Counts of one site, a number or one per layer; float32, as a train step returns them."""
    values = np.broadcast_arrays(saturated, underflowed, nonfinite_blocks, elements)
    return {key: np.atleast_1d(v).astype(np.float32) for key, v in zip(KEYS, values, strict=True)}


def _worst(sites: dict, name: str = "activation", first_layer: int = 0) -> str | None:
    return loss_metrics({name: sites}, {"layers": first_layer, "layers_last": 7}).get(
        f"fp8_worst_layer/{name}"
    )


# Shares.


def test_shares_over_sites_and_layers():
    """Two sites of two layers and different sizes: sums by sums, and not a mean of shares."""
    sites = {
        "layers.self_attn.q_proj": _counts([1, 0], [2, 4], 0, [100, 100]),
        "layers.down_proj": _counts([0, 5], [0, 10], [3, 1], [300, 300]),
    }
    assert loss_metrics({"activation": sites}, {"layers": 0}) == {
        "fp8_saturated_frac/activation": 6 / 800,
        "fp8_underflow_frac/activation": 16 / 800,
        "fp8_nonfinite_blocks/activation": 4.0,
        "fp8_worst_layer/activation": "layer 0 down_proj",
    }


def test_classes_do_not_mix():
    """Each operand class has its own shares and its own worst layer."""
    record = loss_metrics(
        {
            "activation": {"layers.up_proj": _counts([1, 0], 0, 0, 10)},
            "gradient": {"layers.up_proj": _counts(0, [0, 2], 0, 10)},
            "weights": {"layers.o_proj": _counts(0, 0, 0, 10)},
            "kv": {"layers.self_attn": _counts([0, 4], 0, 0, 10)},
        },
        {"layers": 0},
    )
    shares = {name: record[f"fp8_saturated_frac/{name}"] for name in ("activation", "gradient")}
    assert shares == {"activation": 0.05, "gradient": 0.0}
    assert record["fp8_underflow_frac/gradient"] == 0.1
    assert record["fp8_saturated_frac/kv"] == 0.2
    names = {k.partition("/")[2]: v for k, v in record.items() if "worst" in k}
    assert names == {
        "activation": "layer 0 up_proj",
        "gradient": "layer 1 up_proj",
        "kv": "layer 1 self_attn",
    }


_COUNT = st.sampled_from([0, 0, 0, 1, 2, 500, 1000])
_LAYERS = st.lists(st.tuples(_COUNT, _COUNT, _COUNT), min_size=2, max_size=2)


@given(st.lists(_LAYERS, min_size=1, max_size=4))
def test_shares_and_worst_layer_against_plain_python(sites):
    """Any sites of two layers with a thousand elements each: what a loop over numbers says. (Among
    layers with equally many blocks that are not finite, any may be named.)"""
    health = {
        f"layers.{i}": _counts(*zip(*site, strict=True), 1000) for i, site in enumerate(sites)
    }
    record = loss_metrics({"activation": health}, {"layers": 3})
    every = [layer for site in sites for layer in site]
    for index, name in enumerate(("saturated_frac", "underflow_frac", "nonfinite_blocks")):
        total = sum(layer[index] for layer in every)
        expected = total if index == 2 else total / (1000 * len(every))
        assert record[f"fp8_{name}/activation"] == expected
    loss = {
        f"layer {3 + n} {i}": (bad, 0 if bad else saturated + underflowed)
        for i, site in enumerate(sites)
        for n, (saturated, underflowed, bad) in enumerate(site)
    }
    if max(loss.values()) == (0, 0):
        assert "fp8_worst_layer/activation" not in record
    else:
        assert loss[record["fp8_worst_layer/activation"]] == max(loss.values())


def test_metrics_can_be_logged():
    """Floats and text, also from arrays of a device: a record is written as JSON."""
    counts = {key: jnp.asarray(value) for key, value in _counts([1, 0], 0, 1, 10).items()}
    record = loss_metrics({"activation": {"layers.up_proj": counts}}, {"layers": 0})
    assert {type(value) for value in record.values()} == {float, str}
    assert json.loads(json.dumps(record)) == record


# The worst layer.


@pytest.mark.parametrize("first_layer", [0, 2])
def test_number_of_the_worst_layer(first_layer):
    """Sites of the run 'layers' count from the first layer that is quantised; the KV cache is
    counted over all layers."""
    counts = _counts([0, 3, 1], 0, 0, 10)
    worst = _worst({"layers.self_attn.v_proj": counts}, first_layer=first_layer)
    assert worst == f"layer {1 + first_layer} self_attn.v_proj"
    worst = _worst({"layers.gate_proj": counts}, "weights", first_layer)
    assert worst == f"layer {1 + first_layer} gate_proj"
    by_head = _counts(np.array([[0, 0, 1], [0, 5, 0]]), 0, 0, 100)
    assert _worst({"layers.self_attn.k_b_proj": by_head}) == "layer 1 self_attn.k_b_proj, head 1"
    assert _worst({"layers_last.gate_proj": counts}, "weights", 2) == "layer 8 gate_proj"
    assert _worst({"layers.self_attn": counts}, "kv", first_layer) == "layer 1 self_attn"


def test_worst_is_a_share_and_not_a_number():
    """Ten of a hundred are more than twenty of a thousand; both kinds of loss add up."""
    small, large = _counts([0, 10], 0, 0, 100), _counts(20, 0, 0, 1000)
    assert _worst({"layers.q": small, "layers.up": large}) == "layer 1 q"
    both = _counts(6, [6, 0], 0, 100)
    assert _worst({"layers.q": small, "layers.up": both}) == "layer 0 up"


def test_a_block_that_is_not_finite_is_worse_than_any_share():
    """One block of a huge site against a small site that lost everything."""
    broken, lost = _counts(0, 0, [0, 1], 2.0**30), _counts([10, 0], [0, 0], 0, 10)
    assert _worst({"layers.lost": lost, "layers.broken": broken}) == "layer 1 broken"
    more = _counts(0, 0, 2, 2.0**30)
    assert _worst({"layers.more": more, "layers.broken": broken}) == "layer 0 more"


def test_the_worst_expert_is_named():
    """Counts of experts (L, E) add up with those of dense sites; a share is one expert's."""
    counts = _counts([[0, 1, 0], [0, 0, 4]], 0, 0, [[0, 10, 10], [10, 5, 20]])
    dense = _counts([1, 0], 0, 0, 100)
    sites = {"layers.experts.up_proj": counts, "layers.o_proj": dense}
    assert loss_metrics({"weights": sites}, {"layers": 1}) == {
        "fp8_saturated_frac/weights": 6 / 255,
        "fp8_underflow_frac/weights": 0.0,
        "fp8_nonfinite_blocks/weights": 0.0,
        "fp8_worst_layer/weights": "layer 2 experts.up_proj, expert 2",
    }


@pytest.mark.parametrize("health", [{}, {"activation": {}}])
def test_nothing_counted(health):
    """No class, and no site."""
    assert loss_metrics(health, {"layers": 0}) == {}


def test_nothing_lost_names_nobody():
    """Zeros are metrics; a worst layer is not."""
    assert loss_metrics({"kv": {"layers.self_attn": _counts([0, 0], 0, 0, 10)}}, {"layers": 0}) == {
        "fp8_saturated_frac/kv": 0.0,
        "fp8_underflow_frac/kv": 0.0,
        "fp8_nonfinite_blocks/kv": 0.0,
    }


def test_no_elements():
    """A class without elements has no share; a layer without any spoils no other."""
    assert loss_metrics({"gradient": {"layers.up": _counts(0, 0, 0, [0, 0])}}, {"layers": 0}) == {}
    record = loss_metrics(
        {"gradient": {"layers.up": _counts([0, 1], 0, 0, [0, 10])}}, {"layers": 0}
    )
    assert record["fp8_saturated_frac/gradient"] == 0.1
    assert record["fp8_worst_layer/gradient"] == "layer 1 up"


# Ages.

_SHAPE = (3, 8, 4)  # a weight of three layers
_DELAYED = get_recipe("fp8_delayed")


def _after(*steps: dict[str, list[float]]) -> SiteScaling:
    """A site's state after steps that observed, per operand, an amax in each of three layers."""
    site = init_site(_DELAYED, _SHAPE)
    for step in steps:
        seen = {name: jnp.float32(step.get(name, [1, 1, 1])).reshape(3, 1, 1) for name in _NAMES}
        site = update_site(_DELAYED, site, seen)
    return site


_NAMES = ("weight", "activation", "gradient")


def test_age_of_the_oldest_layer():
    """Three layers, of which one's gradient was zero at the last two steps and another's NaN."""
    steps = [{}, {"gradient": [1, 0, 1]}, {"gradient": [1, 0, np.nan]}]
    assert age_metrics({"layers.up_proj": _after(*steps)}, 9) == {
        "scale_age/weights": 0,
        "scale_age/activations": 0,
        "scale_age/gradients": 2,
    }
    assert age_metrics({"layers.up_proj": _after(*steps, {})}, 9)["scale_age/gradients"] == 0


def test_age_of_the_oldest_site():
    """The maximum over sites, in whichever order they come; an infinite amax is not seen."""
    old = _after({"activation": [np.inf] * 3}, {"activation": [0, 0, 1]})
    new = _after({}, {"weight": [0, 1, 1]})
    for sites in ({"a": old, "b": new}, {"b": new, "a": old}):
        assert age_metrics(sites, 0) == {
            "scale_age/weights": 1,
            "scale_age/activations": 2,
            "scale_age/gradients": 0,
        }


def test_operands_without_a_state_have_no_age():
    """A site that keeps the weight's state alone; dynamic scales keep none."""
    site = SiteScaling(weight=_after({}, {"weight": [0, 0, 0]}).weight)
    assert age_metrics({"layers.up_proj": site}, 5) == {"scale_age/weights": 1}
    assert age_metrics({}, 5) == {}


def test_age_of_calibrated_scales():
    """RL steps since the calibration, beside the others; plain integers, to be logged."""
    scales = calibrated_scales({name: jnp.ones(2) for name in "qkv"}, 1.05, jnp.int32(5))
    assert age_metrics(with_scales({}, scales), 5) == {"scale_age/kv": 0}
    ages = age_metrics(with_scales({"layers.up_proj": _after({})}, scales), 7)
    assert ages["scale_age/kv"] == 2 and len(ages) == 4
    assert {type(age) for age in ages.values()} == {int}


def test_age_of_scales_that_were_never_calibrated():
    """Older than any step."""
    assert age_metrics(with_scales({}, missing_scales(2)), 0)["scale_age/kv"] > 0


def test_tokens_of_the_learner():
    updates = [{"computed": 6400, "padding": 6000}, {"computed": 6400, "padding": 3600}]
    assert learner_token_metrics(updates) == {"learner_tokens": 12_800, "learner_padding": 0.75}


def test_rates_of_a_device():
    """MFU only where the peak of a device is known."""
    record = {"tokens_per_s_rollout": 80.0, "tokens_per_s_learner": 16.0, "time_learner": 4.0}
    rates = {"tokens_per_s_device_rollout": 10.0, "tokens_per_s_device_learner": 2.0}
    for peak, more in ((None, {}), (5.0, {"mfu_learner": 0.25})):
        assert rate_metrics(record, 40.0, 8, 8, peak) == rates | more


def test_most_memory_in_use(monkeypatch):
    """The fullest device's; nothing where JAX does not count, as on a CPU."""
    assert memory_metrics() == {}
    counted = None, {"peak_bytes_in_use": 2**31}, {"peak_bytes_in_use": 3 * 2**30}, {"limit": 9}
    devices = [types.SimpleNamespace(memory_stats=lambda found=found: found) for found in counted]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory_metrics() == {"memory_peak": 3.0}
