"""What cannot work with continuous batching costs one sentence, before anything compiles.

With the fixtures of conftest.py, for `rollout.slots`, `rollout.pages` and what they exclude.
"""

from __future__ import annotations

import pytest
from refusals import REFUSALS, assert_words, begins, train_command

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import checks, load_config

pytestmark = REFUSALS

# Four responses of at most 28 tokens a step: a page each, three pages at least in a pool.
_EXPERTS = ["model.num_experts=4", "model.moe_intermediate_size=32"]
_REFUSED = {
    "more slots than responses": (
        ["rollout.slots=5"],
        ["rollout.slots is 5", "4 responses", "at most 4"],
    ),
    "too few pages": (
        ["rollout.slots=2", "rollout.pages=2"],
        ["rollout.pages is 2", "at least 3", "or 0"],
    ),
    "too few pages for longer responses": (
        ["rollout.slots=2", "rollout.pages=3", "rollout.max_new_tokens=64"],
        ["rollout.pages is 3", "at least 4", "or 0"],
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_refused(case, refused_fields):
    fields, words = _REFUSED[case]
    assert_words(refused_fields(*fields), words)


@pytest.mark.parametrize(
    "fields",
    [
        ["rollout.slots=4"],
        ["rollout.slots=1", "rollout.pages=3"],
        ["rollout.slots=2", "rollout.pages=4", "rollout.max_new_tokens=64"],
        ["rollout.slots=2", *_EXPERTS],
        ["rollout.prefill_chunk=1"],
    ],
)
def test_the_other_side_of_a_bound(fields):
    """Each number that a sentence advises is accepted."""
    assert begins(*train_command(*fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            ["rollout.slots=6"],
            ["rollout.slots = 6", "mesh.data x mesh.fsdp = 4 devices", "multipl"],
        ),
        (["rollout.slots=4", "rollout.pages=14"], ["rollout.pages = 14", "4 devices", "multiple"]),
        (
            ["rollout.slots=4", "rollout.pages=8"],
            ["rollout.pages is 8", "each of 4 devices", "at least 12", "or 0"],
        ),
    ],
    ids=["slots", "pages", "too few pages on each"],
)
def test_refused_on_four_devices(fields, words):
    """Each device has the same number of slots and pages, and room for one sequence."""
    sizes = ["rollout.prompts_per_step=4", "eval.batch_size=4", "sft.batch_size=4"]

    def check(*more: str) -> None:
        checks.check_mesh(load_config("tiny.py", [f"--config.{s}" for s in (*sizes, *more)]), 4, 4)

    check("rollout.slots=4", "rollout.pages=12")
    with pytest.raises(UserError) as error:
        check(*fields)
    assert "\n" not in str(error.value)
    assert_words(str(error.value), words)
