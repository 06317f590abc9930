"""FP8 layers in Flax nnx, with states of scaling policies as variables of the model.

::

    dot_general = Fp8DotGeneral("fp8_delayed", (64, 256))
    model = nnx.Linear(64, 256, dot_general=dot_general, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Any(nnx.Param, Probe)))(model, x)
        grads, seen = nnx.split_state(grads, nnx.Param, Probe)
        optimizer.update(model, grads)
        update_scaling(model, seen)

States are frozen within an optimiser step. Probes are zeros and stay so: their gradient is what the
step observed (quant/operands.py). Under a recipe without states a model has neither variable.
"""

from __future__ import annotations

import jax
from flax import nnx

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.quant.dot_general import make_dot_general
from fp8rl_jax.quant.operands import init_probe, init_site, update_site
from fp8rl_jax.quant.recipe import Recipe, get_recipe


class Scaling(nnx.Variable):
    """Variable with the states of a layer's policies: a `SiteScaling`."""


class Probe(nnx.Variable):
    """Variable of zeros whose gradient is what a layer observed: a `SiteProbe`."""


class Fp8DotGeneral(nnx.Module):
    """FP8 product of a layer: `dot_general=` of `nnx.Linear`, `nnx.LinearGeneral` and the like.
    Every layer needs an instance of its own."""

    def __init__(self, recipe: Recipe | str = "fp8", weight_shape: tuple[int, ...] | None = None):
        """
        Args:
          recipe: a Recipe or its name.
          weight_shape: (in, out) of the layer's weight as a matrix, with batch axes in front if it
            has any; needed if the recipe keeps a state.

        Raises:
          UserError: weight_shape is needed and missing.
        """
        self.recipe = get_recipe(recipe)
        if self.recipe.stateful:
            if weight_shape is None or len(weight_shape) < 2:
                raise UserError(
                    f"recipe {self.recipe.name!r} keeps a state for each weight: write its shape "
                    f"(in, out) as weight_shape, not {weight_shape}"
                )
            self.scaling = Scaling(init_site(self.recipe, weight_shape))
            self.probe = Probe(init_probe(self.recipe, weight_shape, health=False, weight=True))

    def __call__(self, lhs, rhs, dimension_numbers, **options) -> jax.Array:
        """Multiplies as `make_dot_general(recipe)` does, with the states of this layer."""
        site = probe = None
        if self.recipe.stateful:
            site = self.scaling.get_value()
            probe = self.probe.get_value()
        return make_dot_general(self.recipe, site, probe)(lhs, rhs, dimension_numbers, **options)


def update_scaling(model: nnx.Module, seen: nnx.State) -> None:
    """Updates the states of all layers of a model, in place, after an optimiser step.

    Args:
      model: module whose layers the step used.
      seen: the step's gradient with respect to all `Probe`; for micro-batches, `merge_probes` of
        their gradients.
    """
    probes = dict(nnx.to_flat_state(seen))
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Fp8DotGeneral) and module.recipe.stateful:
            found = probes[(*path, "probe")].get_value()
            site = update_site(module.recipe, module.scaling.get_value(), found.amaxes)
            module.scaling.set_value(site)
