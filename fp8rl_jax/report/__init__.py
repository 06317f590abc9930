"""Reports as HTML pages without scripts or links: of a run, and of a drift analysis."""

from fp8rl_jax.report.drift import write_drift_page
from fp8rl_jax.report.run import write_report
from fp8rl_jax.report.summary import summarise
