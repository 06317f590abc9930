"""The products of a run's own programs, tried at their own sizes on this machine."""

from __future__ import annotations

import dataclasses

from fp8rl_jax.ahead.programs import traced_programs
from fp8rl_jax.kernels.machine import threads
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.kernels.reference.traced import Dot, dots_that_differ, ordered_dots
from fp8rl_jax.kernels.reference.ways import EXACT
from fp8rl_jax.training.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class OwnProducts:
    """What was tried of a run's products.

    Attributes:
      tried: number of sizes.
      most_rows: of any of them.
      way: in which this machine multiplies; '' where no order is tried, on other platforms.
      threads: that it multiplies with.
      wrong: descriptions of the first that do not keep to the order.
    """

    tried: int
    most_rows: int
    way: str
    threads: int
    wrong: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.way:
            return "no product by itself"
        if self.way == EXACT.name:
            return "products whose sums are exact"
        return (
            f"{self.tried} sizes of product of this run's programs, up to {self.most_rows} rows, "
            f"multiplied by way of {self.way} with {self.threads} thread(s)"
        )

    @property
    def sentence(self) -> str:
        """What was tried, and what came of it."""
        if self.wrong:
            return f"of {self}, the order does not hold at least for {', '.join(self.wrong)}"
        return f"{self}: the order holds" if self.tried else str(self)


def _described(dot: Dot) -> str:
    batch, rows, depth, columns = dot.sizes
    many = f"{batch} x " if batch > 1 else ""
    return f"{many}({rows}, {depth}) times ({depth}, {columns}) in {dot.dtype.name}"


def own_dots(runtime: Runtime) -> set[Dot]:
    """The products whose order is promised in the rollout, score and train step of a run, with the
    rows that each device has."""
    devices = runtime.mesh.size
    found = set()
    for program in traced_programs(runtime).values():
        for dot in ordered_dots(program.jaxpr.jaxpr):
            found.add(dot)
            if (rows := dot.sizes[1]) % devices == 0:
                found.add(dot.with_rows(rows // devices))
    return found


def try_own_products(runtime: Runtime) -> OwnProducts:
    """Compares every product of `own_dots` with the order of this machine's way."""
    way = cpu_way()
    if runtime.learner_recipe.kernels == EXACT.name or way.exact:
        return OwnProducts(0, 0, EXACT.name, threads())
    if not way.options:
        return OwnProducts(0, 0, "", threads())
    dots = own_dots(runtime)
    rows = max((dot.sizes[1] for dot in dots), default=0)
    wrong = tuple(map(_described, dots_that_differ(way, dots)))
    return OwnProducts(len(dots), rows, way.name, threads(), wrong)
