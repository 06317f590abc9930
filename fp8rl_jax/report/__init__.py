"""Reports of runs and of drift analyses, as HTML pages without scripts or links.

::

    sft, metrics, eval, samples .jsonl --> summary: figures, a sentence, notes --+
    config.json                            plots: panels as SVG -----------------+-> report.html
    drift.json --------------------------> drift: a section of panels -----------+-> drift.html
    metrics: the table of metrics: meaning of every key, and the panel that draws it

Read first: metrics.py, then summary.py (`summarise`) and run.py (`write_report`). No jax is
imported, so a report opens at once.

Not done: statistics over several seeds, interactive plots.
"""

from fp8rl_jax.report.drift import write_drift_page
from fp8rl_jax.report.run import write_report
from fp8rl_jax.report.summary import summarise
