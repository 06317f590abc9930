"""Experts on several devices: every bit of one device, wherever the tokens go."""

from __future__ import annotations

import json

import numpy as np
import pytest
from devices import run_script
from marks import slow

from fp8rl_jax.models.parallel.experts import passes_of

_MESHES = [[1, 2], [2, 4], [1, 8]]  # fsdp, expert
# Of the gradient of experts: requantised along the tokens of a tile, and tiles hold other tokens.
_ERROR = {"f32": 1e-6, "bf16": 0.01, "fp8": 0.06, "mxfp8": 0.06, "fp8_delayed": 1e-4}


def _compared(**case) -> list[dict]:
    results = run_script(8, "expert_exchange.py", json.dumps(case))
    assert [result["mesh"] for result in results] == case["meshes"]
    assert all(0.1 < result["size"] < 1 for result in results), "of results that are no zeros"
    return results


# Every recipe with half of the experts, and its gradients, is below.
@pytest.mark.parametrize(
    ("recipe", "route"), [("fp8", "half"), slow("f32", "random"), slow("mxfp8", "one")]
)
def test_results_are_those_of_one_device(recipe, route):
    """Also where all tokens go to the experts of one device."""
    meshes = _MESHES if route != "half" or recipe != "fp8" else [[2, 4]]
    for result in _compared(recipe=recipe, route=route, tokens=48, meshes=meshes):
        assert result["differ"] == 0, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "biases"),
    [
        ("f32", False),
        ("f32", True),
        ("bf16", True),
        ("fp8", False),
        ("mxfp8", False),
        ("fp8_delayed", True),
    ],
)
def test_gradients_and_observations(recipe, biases):
    """Rows' gradients are summed in float32; an expert's is complete on its device."""
    case = {"recipe": recipe, "route": "half", "tokens": 48, "meshes": _MESHES, "biases": biases}
    for result in _compared(**case, gradient=True):
        assert result["differ"] == 0
        assert result["dx"] < 1e-6 and result["dweights"] < 1e-6
        assert result["dexperts"] < _ERROR[recipe]
        assert result["differently"] == []
        assert (recipe in ("f32", "bf16")) == (not any(result["observed"].values()))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["f32", "fp8_delayed"])
def test_many_rows_go_in_passes(recipe):
    """The number of rows is none that passes divide; what each pass observes is combined."""
    assert passes_of(525, 8) == 4 and passes_of(525, 4) == 2 and passes_of(512, 8) == 1
    case = {"recipe": recipe, "route": "half", "tokens": 2100, "meshes": [[1, 4]]}
    (result,) = _compared(**case, gradient=True)
    assert result["differ"] == 0
    assert result["dx"] < 1e-6 and result["dweights"] < 1e-6
    assert result["dexperts"] < _ERROR[recipe]
    assert result["differently"] == []


@pytest.mark.slow
def test_rows_that_do_not_divide():
    """All devices have all rows, and each works on a share of them."""
    case = {"recipe": "fp8", "route": "half", "tokens": 23, "meshes": [[1, 4], [2, 4]]}
    for result in _compared(**case, gradient=True):
        assert result["differ"] == 0 and result["differently"] == []
        assert result["dx"] < 1e-6 and result["dweights"] < 1e-6
        assert result["dexperts"] < _ERROR["fp8"]


def test_passes_have_room_for_two_rows_of_each():
    """In each pass a device may have to work on n / passes times its own rows."""
    assert [passes_of(513, devices) for devices in (1, 3, 5)] == [1, 2, 3]
    for devices in (2, 4, 8, 16, 32):
        rows = np.array([513, 4096, 8 * 4096])
        share = [devices / passes_of(int(count), devices) for count in rows]
        assert share == [2.0] * 3
