"""FP8 layers in Flax linen, with states of scaling policies as collections of variables.

::

    model = nn.Dense(256, dot_general_cls=functools.partial(Fp8DotGeneral, "fp8_delayed"))
    variables = model.init(key, x)  # params, fp8_scaling, fp8_probes

    def loss(params, probes):
        scaling = variables["fp8_scaling"]
        return f(model.apply({"params": params, "fp8_scaling": scaling, "fp8_probes": probes}, x))

    grads, seen = jax.grad(loss, (0, 1))(variables["params"], variables["fp8_probes"])
    variables["fp8_scaling"] = update_scaling(variables["fp8_scaling"], seen)

States are frozen within an optimiser step. Probes are zeros and stay so: their gradient is what the
step observed (quant/operands.py). Under a recipe without states neither collection exists.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from fp8rl_jax.quant.dot_general import make_dot_general, matrix_shape
from fp8rl_jax.quant.operands import SiteScaling, init_probe, init_site, update_site
from fp8rl_jax.quant.recipe import Recipe, get_recipe

SCALING = "fp8_scaling"
PROBES = "fp8_probes"
_NAME = "site"  # the variable's name in both collections


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaling:
    """A layer's entry in collection `fp8_scaling`: the states of its policies, and the recipe
    that they belong to."""

    site: SiteScaling
    recipe: Recipe = dataclasses.field(metadata={"static": True})


class Fp8DotGeneral(nn.Module):
    """FP8 product of a layer: `dot_general_cls=` of `nn.Dense`, `nn.DenseGeneral` and the like.

    Attributes:
      recipe: a Recipe or its name.
    """

    recipe: Recipe | str = "fp8"

    @nn.compact
    def __call__(
        self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None
    ) -> jax.Array:
        """Multiplies as `make_dot_general(recipe)` does, with the states of this layer.

        Without the collection `fp8_probes`, as for inference, nothing is observed.

        Raises:
          ScopeCollectionNotFound: the recipe keeps a state, and `fp8_scaling` is missing.
        """
        recipe = get_recipe(self.recipe)
        site = probe = None
        if recipe.stateful:
            shape = matrix_shape(rhs.shape, dimension_numbers)
            start = lambda: Scaling(init_site(recipe, shape), recipe)  # type: ignore[arg-type]
            site = self.variable(SCALING, _NAME, start).value.site
            if self.is_initializing() or self.has_variable(PROBES, _NAME):
                zeros = lambda: init_probe(recipe, shape, health=False, weight=True)
                probe = self.variable(PROBES, _NAME, zeros).value
        dot_general = make_dot_general(recipe, site, probe)
        return dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)


def update_scaling(scaling: Any, seen: Any) -> Any:
    """Returns the collection `fp8_scaling` updated by an optimiser step's observations.

    Args:
      scaling: the collection that the step used.
      seen: the step's gradient with respect to the collection `fp8_probes`; `merge_probes` combines
        those of micro-batches.
    """

    def advance(of_layer: Scaling, probe) -> Scaling:
        site = update_site(of_layer.recipe, of_layer.site, probe.amaxes)
        return dataclasses.replace(of_layer, site=site)

    return jax.tree.map(advance, scaling, seen, is_leaf=lambda x: isinstance(x, Scaling))
