"""Tests zero drift on this machine before a run begins.

XLA does not promise that decode and train step give the same bits; it was measured for some
versions and processors. So a run that relies on it first runs a *cut* of its model: the same
widths, heads, vocabulary, cache length and recipe; two layers (three if both ends stay in bf16);
few sequences of few tokens. The cut has fewer rows than the run, so the run's programs are traced
as well, and each of their products with a promised order is compared with that order. A check that
passed is cached for the configuration, the code and the kind of machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable

import jax
import jaxlib
import ml_collections
import numpy as np

from fp8rl_jax.base import processes
from fp8rl_jax.base.json_file import plain
from fp8rl_jax.base.user_cache import cache_name, files_of_functions
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.batch import slots_of
from fp8rl_jax.config.functions import named_functions
from fp8rl_jax.drift.attribute import run_both
from fp8rl_jax.drift.compare import bits_differ
from fp8rl_jax.drift.own_products import OwnProducts, try_own_products
from fp8rl_jax.drift.programs import Programs
from fp8rl_jax.kernels import backend
from fp8rl_jax.quant import Recipe
from fp8rl_jax.sharding import batch_divisor
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.run_directory import cache_root
from fp8rl_jax.training.runtime import Runtime

_NEW_TOKENS = 16
_WINDOW = 8  # tokens of a sliding window in the cut


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """The result of the check.

    Attributes:
      tokens: number of log-probabilities compared.
      differing: number of them whose bits differ.
      largest: the largest |dlogp|.
      layers: number of layers of the cut.
      products: result of the check of the run's products.
      kept: whether this is the cached result of an earlier run.
      drifted: step of an earlier run with this configuration that drifted all the same; else ''.
    """

    tokens: int
    differing: int
    largest: float
    layers: int
    products: OwnProducts
    kept: bool = False
    drifted: str = ""

    @property
    def holds(self) -> bool:
        return self.differing == 0 and not self.products.wrong

    def __str__(self) -> str:
        where = f"{backend()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"
        cut = f"{self.tokens} tokens of a {self.layers}-layer cut"
        if self.holds:
            when = ", as an earlier run found" if self.kept else ""
            tried = f"{cut} and {self.products}, bit for bit"
            but = f"; but {self.drifted} drifted" if self.drifted else ""
            return f"self-check: no drift in what was tried here{when} ({tried}; {where}){but}"
        faults = []
        if self.differing:
            faults.append(f"{self.differing} of {cut} differ, by at most {self.largest:.1e}")
        if self.products.wrong:
            faults.append(self.products.sentence)
        return f"self-check: zero drift does NOT hold here: {'; '.join(faults)} ({where})"


def self_check(runtime: Runtime) -> SelfCheck:
    """Runs sampler and train step of the cut on a few questions, and checks the run's products."""
    cut = _cut(runtime)
    config = cut.config
    state = cut.engine.new_state(cut.engine.init_params(), optimizer_of_phase(config, "rl"))
    questions = cut.questions["train"][: config.rollout.prompts_per_step]
    rollout, _, logp = run_both(Programs.on(cut, state, questions))
    mask = np.asarray(rollout.mask)
    differ = bits_differ(logp, rollout.logprobs)[mask]
    gap = np.abs(logp.astype(np.float64) - rollout.logprobs)[mask]
    return SelfCheck(
        int(mask.sum()),
        int(differ.sum()),
        float(gap.max()),
        cut.resolved.model.num_hidden_layers,
        try_own_products(runtime),
    )


def kept_self_check(runtime: Runtime, note: Callable[[str], None]) -> SelfCheck:
    """Returns the cached result of a check that passed for this configuration; without one calls
    `note` with a line and runs `self_check`."""
    path = _place(runtime)
    if path and (kept := processes.decided(lambda: _read(path))):
        return kept
    note("self-check: compiles and runs sampler and learner of two layers, about half a minute")
    checked = self_check(runtime)
    if path and checked.holds and processes.first():
        _keep(checked, path)
    return checked


def note_drift(runtime: Runtime, where: str) -> None:
    """Records in the cached check of the run's configuration that the step `where` drifted."""
    with contextlib.suppress(OSError):  # a file of the user no longer exists
        path = _place(runtime)
        if path and processes.first() and (kept := _read(path)):
            _keep(dataclasses.replace(kept, drifted=where), path)


def _place(runtime: Runtime) -> pathlib.Path | None:
    """Returns the file of the cached check for this configuration, code and machine, or None."""
    config = runtime.config
    sections = {name: plain(fields.to_dict()) for name, fields in config.items() if name != "run"}
    sections |= {"shapes": repr(runtime.resolved.model), "seed": config.run.seed}
    files = files_of_functions(named_functions(config))
    if (root := cache_root(config)) is None:
        return None
    return root / (cache_name("self-check", sections, files) + ".json")


def _keep(checked: SelfCheck, path: pathlib.Path) -> None:
    fields = dataclasses.asdict(checked)
    del fields["kept"]
    with contextlib.suppress(OSError):  # then the next run checks again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(fields))


def _read(path: pathlib.Path) -> SelfCheck | None:
    """Reads the cached check; None if there is none, or it is damaged."""
    try:
        fields = json.loads(path.read_text())
        products = OwnProducts(**fields.pop("products"))
        return SelfCheck(**fields, products=products, kept=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _cut(runtime: Runtime) -> Runtime:
    """Returns the Runtime of the cut: fewer layers, prompts and new tokens."""
    recipes = (runtime.resolved.rollout_recipe, runtime.resolved.learner_recipe)
    ends = sum(any(getattr(r, end) for r in recipes) for end in ("first_layers", "last_layers"))
    layers = min(max(2, 1 + ends), runtime.resolved.model.num_hidden_layers)
    config = ml_collections.ConfigDict(runtime.config.to_dict())
    cache_slots = runtime.resolved.sequence_tokens
    if config.rollout.slots:  # fewer than responses, so that slots are refilled here too
        config.rollout.slots = batch_divisor(runtime.sampling.mesh)
        config.rollout.pages = 0
        cache_slots = 0
    config.rollout.max_new_tokens = min(config.rollout.max_new_tokens, _NEW_TOKENS)
    both = math.lcm(batch_divisor(runtime.mesh), batch_divisor(runtime.sampling.mesh))
    config.rollout.prompts_per_step = min(max(2, both), config.rollout.prompts_per_step)
    config.rollout.group_size = 2
    config.learner.gradient_accumulation_steps = 1
    if config.learner.tokens_per_batch:
        longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
        config.learner.tokens_per_batch = 2 * slots_of(longest)
    config.precision.health = False
    model = runtime.resolved.model
    if model.sliding_window:  # keys that it hides, and a layer of each kind
        model = dataclasses.replace(
            model,
            sliding_window=min(model.sliding_window, _WINDOW),
            sliding_window_pattern=min(model.sliding_window_pattern, 2),
        )

    def shorten(recipe: Recipe) -> Recipe:
        first = min(recipe.first_layers, 1)
        return dataclasses.replace(
            recipe, first_layers=first, last_layers=min(recipe.last_layers, 1, layers - first)
        )

    resolved = dataclasses.replace(
        runtime.resolved,
        config=config,
        model=dataclasses.replace(
            model,
            num_hidden_layers=layers,
            first_k_dense_replace=min(model.first_k_dense_replace, 1),
        ),
        rollout_recipe=shorten(runtime.resolved.rollout_recipe),
        learner_recipe=shorten(runtime.resolved.learner_recipe),
    )
    return dataclasses.replace(runtime, resolved=resolved, cache_slots=cache_slots)
