"""Checks on this machine the order of summation of every product in a run's programs."""

from __future__ import annotations

import dataclasses

from fp8rl_jax.kernels.machine import threads
from fp8rl_jax.kernels.reference.matmul import EXACT
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.kernels.reference.traced import Dot, dots_that_differ, ordered_dots
from fp8rl_jax.training.aot import traced_programs
from fp8rl_jax.training.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class OwnProducts:
    """The result of `try_own_products`.

    Attributes:
      tried: number of product sizes that were checked.
      most_rows: the largest number of rows among them.
      way: name of the `Way` in which this machine multiplies; '' where no order is promised.
      threads: number of threads that XLA multiplies with.
      wrong: descriptions of the first products (at most three) that are summed in another order.
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
        """Message that says what was checked, and the result."""
        if self.wrong:
            return f"of {self}, the order does not hold at least for {', '.join(self.wrong)}"
        return f"{self}: the order holds" if self.tried else str(self)


def _described(dot: Dot) -> str:
    batch, rows, depth, columns = dot.sizes
    many = f"{batch} x " if batch > 1 else ""
    return f"{many}({rows}, {depth}) times ({depth}, {columns}) in {dot.dtype.name}"


def own_dots(runtime: Runtime) -> set[Dot]:
    """Returns the products with a promised order in a run's rollout, score and train step, with the
    global number of rows and with the number on each device."""
    found = set()
    for name, program in traced_programs(runtime).items():
        devices = (runtime.sampling if name == "rollout" else runtime).mesh.size
        for dot in ordered_dots(program.jaxpr.jaxpr):
            found.add(dot)
            if (rows := dot.sizes[1]) % devices == 0:
                found.add(dot.with_rows(rows // devices))
    return found


def try_own_products(runtime: Runtime) -> OwnProducts:
    """Compares every product of `own_dots` with the order that `cpu_way` promises, bit for bit."""
    way = cpu_way()
    if runtime.resolved.learner_recipe.kernels == EXACT.name or way.exact:
        return OwnProducts(0, 0, EXACT.name, threads())
    if not way.options:
        return OwnProducts(0, 0, "", threads())
    dots = own_dots(runtime)
    rows = max((dot.sizes[1] for dot in dots), default=0)
    wrong = tuple(map(_described, dots_that_differ(way, dots)))
    return OwnProducts(len(dots), rows, way.name, threads(), wrong)
