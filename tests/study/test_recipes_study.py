"""Study `recipes` and `gradients`: verdicts of planted numbers, the arms, and the sums of
gradients against numpy's own."""

import json

import numpy as np
import pytest
from study_cells import arm_config, result_of, run_numbers

from fp8rl_jax.config.precision import side_recipe
from fp8rl_jax.quant import get_recipe, same_forward
from studies import __main__ as commands
from studies import frame, gradients, recipes
from studies.frame import Size


def _study(gains, noise, average=0.0, seeds=6):
    """The study's result if an arm's snapshots are above bf16's by `gains`, but for noise."""

    def numbers(seed: int, arm: str):
        rng = np.random.default_rng([seed, *arm.encode()])
        right = 0.4 + 0.1 * seed % 0.3 + gains.get(arm, 0.0) + noise * rng.normal()
        # One snapshot moves by far more than the mean of all.
        moved = right + 0.05 * (np.arange(5) - 2)
        after = {"snapshots": moved.tolist(), "average": right + average}
        return {**run_numbers(bf16=right, own=right), "after": {"bf16": after, "own": after}}

    made = [{arm: numbers(seed, arm) for arm in recipes.ARMS} for seed in range(seeds)]
    return result_of(recipes.STUDY, made, Size(steps=4))


def _verdicts(result) -> dict[str, str]:
    return {verdict["name"]: verdict["verdict"] for verdict in result["hypotheses"]}


def test_verdicts_of_recipes(tmp_path):
    equal = _verdicts(_study({"fp8_blockwise": -0.05}, 0.002, average=0.03))
    assert equal.pop("fp8_blockwise_equals") == "not supported"
    assert set(equal.values()) == {"supported"} and len(equal) == 9
    lost = _verdicts(_study({"fp8_linear": -0.05}, 0.002, average=-0.03))
    assert lost["fp8_linear_equals"] == lost["kv_costs"] == "not supported"
    assert lost["average_gains_bf16"] == "not supported"
    noisy = _study({}, 0.1, seeds=3)
    assert set(_verdicts(noisy).values()) >= {"not resolved"}
    assert _verdicts(noisy)["fp8_linear_equals"] == "not resolved"
    frame.write(recipes.STUDY, noisy, tmp_path)
    assert "| fp8_linear_dequantized |" in (tmp_path / "study.md").read_text()
    assert "NaN" not in (tmp_path / "study.json").read_text()


def test_the_margin_of_recipes():
    """0.011 is within it, with little noise; what may be on either side of it is not."""
    assert _verdicts(_study({"fp8": -0.011}, 0.001))["fp8_equals"] == "supported"
    assert _verdicts(_study({"fp8": -0.02}, 0.004))["fp8_equals"] == "not resolved"


def test_arms_of_recipes():
    """Each has equal recipes on both sides and no correction; two share a forward pass."""
    found = {}
    for arm, fields in recipes.ARMS.items():
        config, resolved = arm_config(fields)
        assert resolved.same_forward and not resolved.algorithm.corrections
        found[arm] = side_recipe(config.precision, "learner", 2)
        assert found[arm] == resolved.learner_recipe
    assert found["bf16"] == get_recipe("bf16") and found["fp8"] == get_recipe("fp8")
    assert found["fp8_blockwise"] == get_recipe("fp8_blockwise")
    assert found["fp8_linear"] == get_recipe("fp8_linear")
    control = found["fp8_linear_dequantized"]
    assert control.backward == "dequantized" and same_forward(control, found["fp8_linear"])


def test_sums_of_gradients():
    """Against numpy on the gradients themselves: one biased by a tenth, one of noise alone."""
    rng = np.random.default_rng(0)
    shapes, count = ((5, 7), (40,)), 30
    signal = [rng.standard_normal(shape) for shape in shapes]
    batches = [[x + rng.standard_normal(x.shape) for x in signal] for _ in range(count)]
    reference, biased, noisy = gradients._Sums(), gradients._Sums(), gradients._Sums()
    ratios = []
    for batch in batches:
        given = [x.astype(np.float32) for x in batch]
        reference.add(given, given)
        biased.add([np.float32(1.1) * x for x in given], given)
        other = [x + (0.2 * rng.standard_normal(x.shape)).astype(np.float32) for x in given]
        noisy.add(other, given)
        one, two = (np.concatenate([x.ravel() for x in xs]) for xs in (other, given))
        ratios.append([np.linalg.norm(one - two) / np.linalg.norm(two), (one - two) @ two])
        ratios[-1][1] /= two @ two
    own = reference.numbers(reference)
    assert own["error"] == [0] * count and own["cosine_of_adam"] == 1
    flat = np.stack([np.concatenate([x.ravel() for x in batch]) for batch in batches])
    noise = np.sqrt(
        flat.var(axis=0, ddof=1).sum() / (np.concatenate([*map(np.ravel, signal)]) ** 2).sum()
    )
    assert own["noise"] == pytest.approx(noise, rel=0.1)
    up = biased.numbers(reference)
    np.testing.assert_allclose(up["bias"], 0.1, rtol=1e-4)
    np.testing.assert_allclose([up["cosine_of_mean"], up["cosine_of_adam"]], 1, rtol=1e-6)
    found = noisy.numbers(reference)
    np.testing.assert_allclose(found["error"], np.array(ratios)[:, 0], rtol=1e-4)
    np.testing.assert_allclose(found["bias"], np.array(ratios)[:, 1], rtol=1e-3, atol=1e-6)
    assert 0.9 < found["cosine_of_mean"] < 0.9999


def _gradients(bias: float, share: float, seeds=3):
    """The study's result: a biased FP8 backward pass; INT8 adds a share of E4M3's variance."""
    made = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        noise = 1e-4 * rng.normal()

        def backward(name, noise=noise):
            own = bias * (name == "fp8") + noise
            each = {"cosine": [0.999] * 4, "error": [0.03] * 4, "bias": [own] * 4}
            return {**each, "noise": 3.0, "cosine_of_mean": 0.999, "cosine_of_adam": 0.99}

        plain = -np.abs(rng.standard_normal(200))
        linear, cache = 0.1 * rng.standard_normal((2, 200))
        size = {"FP8 linear layers": 0.0, "and K and V in INT8": np.sqrt(share)}
        forward = {"bf16": plain.tolist()}
        for part in gradients.FORWARDS:
            forward[part] = (plain + linear + size.get(part, 1.0) * cache).tolist()
        made.append(
            {"backward": {name: backward(name) for name in gradients.BACKWARDS}, "forward": forward}
        )
    return result_of(gradients.STUDY, made, Size(sequences=4))


def test_verdicts_of_gradients(tmp_path):
    good, bad = _gradients(0.0, 0.05), _gradients(0.05, 0.9)
    assert set(_verdicts(good).values()) == {"supported"}
    found = _verdicts(bad)
    assert found["unbiased"] == found["int8_halves"] == "not supported"
    frame.write(gradients.STUDY, good, tmp_path)
    text = (tmp_path / "study.md").read_text()
    assert "| and K in INT8, V in E4M3 |" in text and "| fp8, gradients in E5M2 | 0.99900" in text


def test_the_backward_passes_have_one_forward_pass():
    *same, other = gradients.BACKWARDS.values()
    assert all(same_forward(same[0], recipe) for recipe in same) and len(same) == 4
    assert not same_forward(same[0], other)
    assert {recipe.backward for recipe in same} == {"fp8", "dequantized", "bf16"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recipes", "gradients"])
def test_the_quick_commands(name, tmp_path, capsys):
    command = [name, "--quick", f"--out={tmp_path}"]
    assert commands.run(command) == 0
    output, _ = capsys.readouterr()
    result = json.loads((tmp_path / "study.json").read_text())
    for verdict in result["hypotheses"]:
        assert verdict["sentence"] in output
    if name == "recipes":
        for (run,) in result["runs"].values():
            assert max(run["series"]["train_rollout_logprob_abs_diff"]) == 0
            assert len(run["after"]["bf16"]["snapshots"]) == 4  # three steps, and the start
    else:
        (exact,), (fp8,) = (result["backward"][key] for key in ("exact", "fp8"))
        assert exact["error"] == [0, 0] and 0.005 < min(fp8["error"]) < max(fp8["error"]) < 0.1
    assert commands.run([*command, "--resume"]) == 0
    assert json.loads((tmp_path / "study.json").read_text()) == result
