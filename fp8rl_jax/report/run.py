"""One HTML page that tells what a run did: accuracy, reward, drift, FP8 health, time, samples.

`write_report` reads a run directory (see summary.py) and writes report.html into it, a single
file without scripts or links.

Drift of a step: |dlogp| = |logp_learner - logp_rollout| per response token, its mean and maximum,
and the share of tokens whose two values have the same bits.

Not done: statistics across seeds; smoothing, but for the running mean of the reward, drawn over
the raw values.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.report.drift import drift_section
from fp8rl_jax.report.html import render, write_page
from fp8rl_jax.report.plots import (
    MOST_LINES,
    Panel,
    draw_panel,
    drawable,
    left_out,
    lines_panel,
    mark,
    thinned,
)
from fp8rl_jax.report.summary import (
    DRIFT_MAX,
    DRIFT_MEAN,
    MISSING,
    TYPICAL,
    RunFiles,
    drift_text,
    keys_with,
    load_run,
    near_one,
    number,
    series,
    share,
    statistic,
    summarise_files,
    typical,
)

_PHASES = ("rollout", "reward", "old_logprobs", "learner", "refit", "calibrate")
_NAMES = {"sft": "SFT", "rl": "RL"}
_SAMPLES_SHOWN = 12
_MOST_FIELDS = 200  # that differ between runs
_LEARNING = (("Loss", "loss"), ("Gradient norm", "grad_norm"), ("Learning rate", "lr"))
# {heading: (rows, caption, (title of a plot, metric, ...), ...)}; a * stands for any ending.
_PLOTS: dict[str, tuple] = {
    "Held-out accuracy": (
        "eval",
        "Evaluations during SFT and RL; RL's step 0 is the last one of SFT.",
        ("SFT", "sft/greedy", "sft/sampled"),
        ("RL", "rl/greedy", "rl/sampled"),
    ),
    "Reward": (
        "rl",
        "Training reward with its running mean, and the responses behind it.",
        ("Reward", "reward_mean", "running_mean"),
        ("Response length, tokens", "response_len_mean", "response_len_max"),
        ("Shares", "group_zero_std_frac", "truncated_frac"),
    ),
    "Drift between rollout and learner": (
        "drift",
        "Learner's log-probs less the rollout's. Linear near 0, logarithmic above.",
        ("|Δlogp| of a token, nats", DRIFT_MAX, DRIFT_MEAN),
        ("Share of tokens with other bits", "1 - logprob_equal_frac"),
    ),
    "FP8 health": (
        "rl",
        "Saturated: beyond the largest FP8 value. Underflow: not 0 before, 0 after.",
        ("Saturated share", "fp8_saturated_frac*"),
        ("Underflow share", "fp8_underflow_frac*"),
    ),
    "Experts": (
        "rl",
        "Load of the routed experts: of the worst layer and the mean of layers.",
        ("Largest load over the mean", "expert_load_max", "expert_load_max_mean"),
        ("Entropy of the load", "expert_load_entropy"),
        ("Experts without a token", "experts_unused_frac"),
    ),
    "Continuous batching": (
        "rl",
        "Slots and turns of the rollout that drew a token, and how often a response lost its "
        "pages and was computed anew (docs/rollout.md).",
        ("Share of slots that drew", "rollout_slots_used"),
        ("Responses computed anew", "rollout_preemptions"),
    ),
    "Time": ("time", "Recorded phases of each step, stacked, and the throughput."),
    "Optimiser": (
        "rl",
        "Reinforcement learning steps.",
        *_LEARNING,
        ("Entropy, nats", "entropy"),
        ("Clipped share", "clipfrac_low", "clipfrac_high"),
        ("KL to the reference", "kl_ref"),
    ),
    "Supervised fine-tuning": ("sft", "Updates before RL.", *_LEARNING),
}
_SYMLOG = ("Drift between rollout and learner", "FP8 health")
_OPTIONAL = ("Experts", "Continuous batching")  # a dense model; a static rollout
_COMPARED = (  # title of a plot, source, metric
    ("Reward", "rl", "running_mean"),
    ("Accuracy, greedy", "eval", "rl/greedy"),
    ("Accuracy, sampled", "eval", "rl/sampled"),
    ("|Δlogp| of a token, nats: maximum", "drift", DRIFT_MAX),
)


def _panels(section: str, rows: list[dict], panels: Sequence[tuple[str, ...]]) -> list[Panel]:
    """A panel per (title, metric, ...), a line per recorded metric."""
    data, recorded = [], keys_with(rows, "")
    for title, *patterns in panels:
        keys = [key for pattern in patterns for key in fnmatch.filter(recorded, pattern)]
        lines = [(key.rsplit("/", 1)[-1], *series(rows, key)) for key in keys[:MOST_LINES]]
        data.append((title, lines))
    limits: tuple[float | None, float | None] = (None, None)
    if section == "Held-out accuracy":  # SFT and RL share a scale
        values = np.array([value for _, lines in data for line in lines for value in line[2]])
        values = values[np.isfinite(drawable(values))]
        if values.size:
            margin = 0.05 * float(np.ptp(values)) or 0.05
            limits = float(values.min()) - margin, float(values.max()) + margin
    found = (lines_panel(*each, symlog=section in _SYMLOG, limits=limits) for each in data)
    return [panel for panel in found if panel]


def _phases(rows: list[dict]) -> list[str]:
    found = {key[5:] for key in keys_with(rows, "time_")} - {"step"}
    return ([p for p in _PHASES if p in found] + sorted(found - set(_PHASES)))[:MOST_LINES]


def _time_panels(rows: list[dict]) -> list[Panel]:
    if not (phases := _phases(rows)):
        return []
    shown = rows[1:] or rows  # the first step usually compiles
    steps = np.array([row.get("step", i) for i, row in enumerate(shown)], float)
    found = ([row.get(f"time_{phase}") for row in shown] for phase in phases)
    numbers = [[x if isinstance(x, int | float) else 0.0 for x in row] for row in found]
    stack = np.nan_to_num(drawable(np.array(numbers, float)))
    kept, legend = thinned(stack.sum(0)), [mark(i, phase) for i, phase in enumerate(phases)]

    def draw(ax: Axes) -> None:
        x = np.repeat(steps[kept], 2) + np.tile((-0.5, 0.5), len(kept))  # two edges per step
        colours = [row.colour for row in legend]
        ax.stackplot(x, np.repeat(stack[:, kept], 2, axis=1), colors=colours, lw=0)
        ax.set_ylim(0, 1.05 * max(stack.sum(0).max(), 1e-9))
        ax.set_xlabel("step")

    title = "Seconds per step, by phase" + ", without the first" * (len(rows) > 1)
    title += left_out(steps, kept)
    rates = [(side, *series(rows, f"tokens_per_s_{side}")) for side in ("rollout", "learner")]
    rate = lines_panel("Tokens per second", rates, limits=(0, None))
    return [draw_panel(title, draw, legend), *([rate] if rate else [])]


def _times(rows: list[dict]) -> list[tuple[str, str, str]]:
    """(phase, first step, median of the others) as text."""
    return [
        (
            phase,
            number(statistic(series(rows[:1], f"time_{phase}")[1], np.max)),
            number(typical(rows, f"time_{phase}")),
        )
        for phase in [*_phases(rows), "step"]
        if rows
    ]


def _devices(run: RunFiles) -> str:
    """What the run was last started on."""
    try:
        return str(read_json(run.path / "environment.json")[-1]["devices"]["layout"])
    except (OSError, ValueError, LookupError, TypeError):
        return MISSING


def _key_figures(run: RunFiles, s: dict) -> list[tuple[str, str]]:
    checks = f"{s['refit_checks'] - s['refit_failures']:,} of {s['refit_checks']:,} matched"
    first, others = number(s["time_step_first"], " s"), number(s["time_step"], " s")
    rates = (number(s[f"tokens_per_s_{side}"]) for side in ("rollout", "learner"))
    sampled, greedy = (
        " → ".join(share(s[kind][when]) for when in ("sft_end", "last"))
        for kind in ("sampled", "greedy")
    )
    return [
        ("Accuracy, sampled: last of SFT → last of RL", sampled),
        ("Accuracy, greedy: last of SFT → last of RL", greedy),
        ("Best SFT accuracy, greedy", share(s["greedy"]["sft_best"])),
        ("Held-out questions", number(s["questions"])),
        ("Devices", _devices(run)),
        ("Reward, first → last tenth", f"{number(s['reward_first'])} → {number(s['reward_last'])}"),
        ("First step; median of the others", f"{first}; {others}"),
        ("Tokens per second, rollout; learner", "; ".join(rates)),
        ("Seed", s["seed"] or MISSING),
        ("Max |Δlogp|", drift_text(s)),
        ("Mean |Δlogp|", number(s["drift_mean"])),
        ("Bit-equal log-probs", share(s["logprob_equal_frac"])),
        ("Tokens compared", number(s["drift_tokens"])),
        ("token_mult_prob_error", near_one(s["token_mult_prob_error"])),
        ("mismatch_kl", number(s["mismatch_kl"])),
        ("Refit checksums", checks if s["refit_checks"] else MISSING),
    ]


def _samples(run: RunFiles) -> dict[str, Any]:
    """The samples of the last step that has some, and a sentence on what they are."""
    where = [(row.get("phase", "rl"), row.get("step")) for row in run.samples]
    rows = [row for row, w in zip(run.samples, where, strict=True) if w == where[-1]]
    keys = ("prompt", "response", "answer", "reward")
    shown = [[row.get(key, "") for key in keys] for row in rows[:_SAMPLES_SHOWN]]
    step = f"{_NAMES.get(where[-1][0], where[-1][0])} step {where[-1][1]}" if rows else ""
    return {"samples": shown, "samples_of": f"{len(shown)} of the {len(rows)} samples of {step}."}


def _comparison(runs: list[RunFiles]) -> dict[str, Any]:
    """Plots with a line per run, a table of figures with a row per run, and one of the fields of
    the configuration that differ with a column per run."""
    names, rows = [run.path.resolve().name for run in runs], []
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    for run, name in zip(runs, names, strict=True):
        s = summarise_files(run)
        accuracy = [share(s[kind]["last"]) for kind in ("greedy", "sampled")]
        drift = (drift_text(s), near_one(s["token_mult_prob_error"]))
        times = [number(s[key]) for key in TYPICAL[1:]]
        rows.append((f"{run.label} ({name})", *times, *accuracy, *drift))
    head = "Run;Rollout, s;Learner, s;Rollout tokens/s;Learner tokens/s;Greedy;Sampled"
    head += ";Drift max;Token mult. prob. error"
    drawn = [_rows(run) for run in runs[:MOST_LINES]]
    panels = (
        lines_panel(
            title,
            [
                (name, *series(found[source], metric))
                for name, found in zip(names, drawn, strict=False)
            ],
            symlog=source == "drift",
        )
        for title, source, metric in _COMPARED
    )
    configs = [dict(_fields(run.config)) for run in runs]
    fields = sorted({field for config in configs for field in config} - {"run.dir"})
    differences = [(field, *(config.get(field, "") for config in configs)) for field in fields]
    differences = [row for row in differences if any(value != row[1] for value in row[2:])]
    return {
        "panels": [panel for panel in panels if panel],
        "head": head.split(";"),
        "rows": rows,
        "fields": ["Field", *names],
        "differing": len(differences),
        "differences": differences[:_MOST_FIELDS],
    }


def _fields(config: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(section.field, value) of a configuration."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def write_report(
    run_dir: str | os.PathLike, compare: Sequence[str | os.PathLike] = ()
) -> pathlib.Path:
    """Writes run_dir/report.html, replacing an older one atomically, and returns its path.

    Args:
      run_dir: directory of a run, finished or in progress; see `summarise` for its files.
      compare: other run directories, which add plots and tables of all the runs together.

    Raises:
      ValueError: a directory does not exist, or its config.json is missing or not an object.
    """
    run, others = load_run(run_dir), [load_run(path) for path in compare]
    s = summarise_files(run)
    body = render(
        "run.html",
        summary=s,
        key_figures=_key_figures(run, s),
        sections=list(_sections(run, s)),
        comparison=_comparison([run, *others]) if others else None,
        config=json.dumps(run.config, indent=2, ensure_ascii=False),
        **_samples(run),
    )
    return write_page(run.path / "report.html", f"Run {run.path.resolve().name}", body)


def _rows(run: RunFiles) -> dict[str, list[dict]]:
    """What `_PLOTS` draws: rows with the metrics that are computed from others."""
    rows, drift = ([dict(row) for row in x] for x in (run.metrics, run.compared))
    window = max(2, min(20, len(rows) // 5))
    for i, row in enumerate(rows):
        recent = series(rows[max(0, i + 1 - window) : i + 1], "reward_mean")[1]
        row["running_mean"] = statistic(recent, np.mean)
    for row in drift:
        if isinstance(equal := row.get("logprob_equal_frac"), int | float):
            row["1 - logprob_equal_frac"] = 1 - equal
    evaluations: list[dict] = []
    of_sft, of_rl = run.phase("sft"), run.phase("rl")
    if of_sft and of_rl and of_rl[0].get("step", 0) > 0:
        of_rl = [of_sft[-1] | {"step": 0}, *of_rl]
    for phase, found in (("sft", of_sft), ("rl", of_rl)):
        for i, row in enumerate(found):
            kinds = {f"{phase}/{k}": row.get(f"accuracy_{k}") for k in ("greedy", "sampled")}
            evaluations.append({"step": row.get("step", i)} | kinds)
    return {"rl": rows, "sft": run.sft, "drift": drift, "eval": evaluations}


def _sections(run: RunFiles, s: dict) -> Iterator[tuple]:
    """(heading, panels, caption, times of phases or None, analysis of drift or "")."""
    rows = _rows(run)
    for title, (source, caption, *names) in _PLOTS.items():
        timed = source == "time"
        panels = _time_panels(run.metrics) if timed else _panels(title, rows[source], names)
        if title == "Held-out accuracy" and (s["questions"] or 0) > 0:
            error = f"{50 / math.sqrt(s['questions']):.1f} points"
            caption += f" With {s['questions']:,} questions one standard error is at most {error}."
        if panels or title not in _OPTIONAL:
            analysis = drift_section(run.path) if source == "drift" else ""
            yield title, panels, caption, _times(run.metrics) if timed else None, analysis
