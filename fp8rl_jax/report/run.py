"""Writes one HTML page about a run: accuracy, reward, drift, FP8 health, time, samples.

`write_report` reads a run directory (see summary.py) and writes report.html into it, a single
file without scripts or links.

Drift of a step: |dlogp| = |logp_learner - logp_rollout| per response token, its mean and maximum,
and the share of tokens whose two values have the same bits.

Not done: statistics across seeds; smoothing, except for the running mean of the reward.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.report.drift import drift_section
from fp8rl_jax.report.html import render, write_page
from fp8rl_jax.report.metrics import DRIFT_MAX, SECTIONS, Metric
from fp8rl_jax.report.plots import (
    MOST_LINES,
    Line,
    Panel,
    draw_panel,
    drawable,
    left_out,
    lines_panel,
    mark,
    thinned,
)
from fp8rl_jax.report.summary import (
    MISSING,
    TYPICAL,
    RunFiles,
    device,
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {"sft": "SFT", "rl": "RL"}
_SAMPLES_SHOWN = 12
_MOST_FIELDS = 200  # most fields that are listed as different between runs
_DRIFT = "Drift between rollout and learner"
# {section of SECTIONS: caption of its plots}, in the order of the page.
_CAPTIONS = {
    "Held-out accuracy": "Evaluations during SFT and RL; RL's step 0 is the last one of SFT.",
    "Reward": "Training reward with its running mean, and the responses behind it.",
    _DRIFT: "Learner's log-probs less the rollout's. Linear near 0, logarithmic above.",
    "FP8 health": "Saturated: beyond the largest FP8 value. Underflow: not 0 before, 0 after.",
    "Experts": "Load of the routed experts: of the worst layer and the mean of layers.",
    "Continuous batching": (
        "Slots and turns of the rollout that drew a token, and how often a response lost its "
        "pages and was computed anew (docs/rollout.md)."
    ),
    "Time": "Recorded phases of each step, stacked, and the throughput.",
    "Optimiser": "Reinforcement learning steps.",
    "Supervised fine-tuning": "Updates before RL.",
}
_SYMLOG = (_DRIFT, "FP8 health")
# Steps that a reader may want to run again: {what is odd: (metric, which value of it)}.
_ODD: dict[str, tuple[str, Callable]] = {
    "Largest |Δlogp|": (DRIFT_MAX, np.argmax),
    "Largest gradient norm": ("grad_norm", np.argmax),
    "Largest loss": ("loss", np.argmax),
    "Lowest reward": ("reward_mean", np.argmin),
}
_OPTIONAL = ("Experts", "Continuous batching")  # sections that are left out without panels


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Returns running means (N,) over the last 20 values, or over a fifth of a shorter run."""
    window = max(2, min(20, len(values) // 5))
    recent = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return np.array([statistic(part, np.mean) for part in recent], float)


# Lines that are functions of a metric's values: {metric: {label of a line: function}}.
_DRAWN: dict[str, dict[str, Callable[[np.ndarray], np.ndarray]]] = {
    "reward_mean": {"reward_mean": np.asarray, "running_mean": _running_mean},
    "logprob_equal_frac": {"1 - logprob_equal_frac": lambda values: 1 - values},
}


def _lines(rows: list[dict], metrics: Iterable[Metric]) -> list[Line]:
    """Returns the lines of the metrics that were recorded."""
    recorded = keys_with(rows, "")
    lines = []
    for key in [key for metric in metrics for key in metric.among(recorded)][:MOST_LINES]:
        steps, values = series(rows, key)
        drawn = _DRAWN.get(key, {key.rsplit("/", 1)[-1]: np.asarray})
        lines += [(label, steps, function(values)) for label, function in drawn.items()]
    return lines


def _panels(run: RunFiles, section: str) -> list[Panel | None]:
    """Draws a section's plots, with a line for each recorded metric; None for an empty plot."""
    if section == "Held-out accuracy":
        return _accuracy_panels(run)
    if section == "Time":
        return _time_panels(run.metrics)
    file, metrics = SECTIONS[section]
    rows = run.compared if section == _DRIFT else getattr(run, file)
    by_title: dict[str, list[Metric]] = {}
    for metric in metrics:
        if metric.panel:
            by_title.setdefault(metric.panel, []).append(metric)
    symlog = section in _SYMLOG
    return [
        lines_panel(title, _lines(rows, of_it), symlog=symlog) for title, of_it in by_title.items()
    ]


def _accuracy(run: RunFiles, phase: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps of a phase and its accuracies of a kind, 'greedy' or 'sampled'; RL begins
    with the last accuracy of SFT, as step 0."""
    rows = run.phase(phase)
    of_sft = run.phase("sft")
    if phase == "rl" and of_sft and rows and rows[0].get("step", 0) > 0:
        rows = [of_sft[-1] | {"step": 0}, *rows]
    return series(rows, f"accuracy_{kind}")


def _mean_reward(run: RunFiles) -> tuple[np.ndarray, np.ndarray]:
    steps, values = series(run.metrics, "reward_mean")
    return steps, _running_mean(values)


# {title of a plot of several runs: function of a run that returns steps and values of its line}.
_COMPARED: dict[str, Callable[[RunFiles], tuple[np.ndarray, np.ndarray]]] = {
    "Reward": _mean_reward,
    "Accuracy, greedy": lambda run: _accuracy(run, "rl", "greedy"),
    "Accuracy, sampled": lambda run: _accuracy(run, "rl", "sampled"),
    "|Δlogp| of a token, nats: maximum": lambda run: series(run.compared, DRIFT_MAX),
}


def _accuracy_panels(run: RunFiles) -> list[Panel | None]:
    """Draws a plot for SFT and one for RL, with the same scale."""
    kinds = ("greedy", "sampled")
    lines = {
        name: [(kind, *_accuracy(run, phase, kind)) for kind in kinds]
        for phase, name in _NAMES.items()
    }
    values = np.concatenate([line[2] for of_phase in lines.values() for line in of_phase])
    values = values[np.isfinite(drawable(values))]
    limits: tuple[float | None, float | None] = (None, None)
    if values.size:
        margin = 0.05 * float(np.ptp(values)) or 0.05
        limits = float(values.min()) - margin, float(values.max()) + margin
    return [lines_panel(name, of_phase, limits=limits) for name, of_phase in lines.items()]


def _phases(rows: list[dict]) -> list[str]:
    """Lists the recorded phases of a step: those of the table in its order, then others."""
    known = [name[5:] for name, *_ in SECTIONS["Time"][1] if name.startswith("time_")]
    recorded = {key[5:] for key in keys_with(rows, "time_")} - {"step"}
    return ([p for p in known if p in recorded] + sorted(recorded - set(known)))[:MOST_LINES]


def _time_panels(rows: list[dict]) -> list[Panel | None]:
    if not (phases := _phases(rows)):
        return []
    shown = rows[1:] or rows  # the first step usually compiles
    steps = np.array([row.get("step", i) for i, row in enumerate(shown)], float)
    seconds = ([row.get(f"time_{phase}") for row in shown] for phase in phases)
    numbers = [[x if isinstance(x, int | float) else 0.0 for x in row] for row in seconds]
    stack = np.nan_to_num(drawable(np.array(numbers, float)))
    kept = thinned(stack.sum(0))
    legend = [mark(i, phase) for i, phase in enumerate(phases)]

    def draw(ax: Axes) -> None:
        x = np.repeat(steps[kept], 2) + np.tile((-0.5, 0.5), len(kept))  # two edges per step
        ax.stackplot(
            x, np.repeat(stack[:, kept], 2, axis=1), colors=[row.colour for row in legend], lw=0
        )
        ax.set_ylim(0, 1.05 * max(stack.sum(0).max(), 1e-9))
        ax.set_xlabel("step")

    title = "Seconds per step, by phase" + ", without the first" * (len(rows) > 1)
    title += left_out(steps, kept)
    rates = [(side, *series(rows, f"tokens_per_s_{side}")) for side in ("rollout", "learner")]
    return [
        draw_panel(title, draw, legend),
        lines_panel("Tokens per second", rates, limits=(0, None)),
    ]


def _times(rows: list[dict]) -> list[tuple[str, str, str]]:
    """Returns (phase, seconds of the first step, median of the later steps) as text."""
    names = [*_phases(rows), "step"] if rows else []
    first = (statistic(series(rows[:1], f"time_{name}")[1], np.max) for name in names)
    later = (typical(rows, f"time_{name}") for name in names)
    return [*zip(names, map(number, first), map(number, later), strict=True)]


def _key_figures(run: RunFiles, s: dict) -> list[tuple[str, str]]:
    checks = f"{s['refit_checks'] - s['refit_failures']:,} of {s['refit_checks']:,} matched"
    seconds = (number(s[key], " s") for key in ("time_step_first", "time_step"))
    rates = (number(s[f"tokens_per_s_{side}"]) for side in ("rollout", "learner"))
    sampled, greedy = (
        " → ".join(run.held_out(s[kind][when]) for when in ("sft_end", "last"))
        for kind in ("sampled", "greedy")
    )
    name = "Reward" if run.graded else "Accuracy"
    return [
        (f"{name}, sampled: last of SFT → last of RL", sampled),
        (f"{name}, greedy: last of SFT → last of RL", greedy),
        (f"{name}, greedy: best of SFT", run.held_out(s["greedy"]["sft_best"])),
        ("Held-out questions", number(s["questions"])),
        ("Devices", device(run, "layout") or MISSING),
        ("Reward, first → last tenth", f"{number(s['reward_first'])} → {number(s['reward_last'])}"),
        ("First step; median of the others", "; ".join(seconds)),
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
    """Returns the samples of the last step that has any, and a sentence that names the step."""
    where = [(row.get("phase", "rl"), row.get("step")) for row in run.samples]
    rows = [row for row, w in zip(run.samples, where, strict=True) if w == where[-1]]
    shown = [
        [row.get(key, "") for key in ("prompt", "response", "answer", "reward")]
        for row in rows[:_SAMPLES_SHOWN]
    ]
    step = f"{_NAMES.get(where[-1][0], where[-1][0])} step {where[-1][1]}" if rows else ""
    return {"samples": shown, "samples_of": f"{len(shown)} of the {len(rows)} samples of {step}."}


def _odd_steps(run: RunFiles) -> list[tuple[str, str, str, str]]:
    """Returns (what is odd, RL step, value, command that runs it again) of some steps."""
    rows = []
    for what, (key, choose) in _ODD.items():
        steps, values = series(run.metrics, key)
        if values.size and (key != DRIFT_MAX or values.any()):
            place = choose(values)  # NaN, if there is one
            command = f"fp8rl replay {run.path.resolve().name} {steps[place]:.0f}"
            rows.append((what, f"{steps[place]:.0f}", f"{values[place]:.4g}", command))
    return rows


def _comparison(runs: list[RunFiles]) -> dict[str, Any]:
    """Returns plots with a line per run, a table of figures with a row per run, and a table of the
    configurations' differing fields with a column per run."""
    names = [run.path.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    rows = []
    for run, name in zip(runs, names, strict=True):
        s = summarise_files(run)
        rows.append(
            (
                f"{run.label} ({name})",
                *(number(s[key]) for key in TYPICAL[1:]),
                run.held_out(s["greedy"]["last"]),
                run.held_out(s["sampled"]["last"]),
                drift_text(s),
                near_one(s["token_mult_prob_error"]),
            )
        )
    drawn = [*zip(names, runs, strict=True)][:MOST_LINES]
    panels = (
        lines_panel(title, [(name, *line(run)) for name, run in drawn], symlog="|Δlogp|" in title)
        for title, line in _COMPARED.items()
    )
    configs = [dict(_fields(run.config)) for run in runs]
    fields = sorted({field for config in configs for field in config} - {"run.dir"})
    differences = [(field, *(config.get(field, "") for config in configs)) for field in fields]
    differences = [row for row in differences if any(value != row[1] for value in row[2:])]
    return {
        "panels": [panel for panel in panels if panel],
        "head": [
            "Run",
            "Rollout, s",
            "Learner, s",
            "Rollout tokens/s",
            "Learner tokens/s",
            "Greedy",
            "Sampled",
            "Drift max",
            "Token mult. prob. error",
        ],
        "rows": rows,
        "fields": ["Field", *names],
        "differing": len(differences),
        "differences": differences[:_MOST_FIELDS],
    }


def _fields(config: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (section.field, value) of a configuration."""
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
    run, *others = map(load_run, (run_dir, *compare))
    s = summarise_files(run)
    body = render(
        "run.html",
        summary=s,
        key_figures=_key_figures(run, s),
        sections=list(_sections(run, s)),
        comparison=_comparison([run, *others]) if others else None,
        odd_steps=_odd_steps(run),
        config=json.dumps(run.config, indent=2, ensure_ascii=False),
        **_samples(run),
    )
    return write_page(run.path / "report.html", f"Run {run.path.resolve().name}", body)


def _sections(run: RunFiles, s: dict) -> Iterator[tuple]:
    """Yields (heading, panels, caption, times of phases or None, analysis of drift or "")."""
    for title, caption in _CAPTIONS.items():
        panels = [panel for panel in _panels(run, title) if panel]
        if title == "Held-out accuracy" and (s["questions"] or 0) > 0 and not run.graded:
            caption += (
                f" With {s['questions']:,} questions one standard error is at most "
                f"{50 / math.sqrt(s['questions']):.1f} points."
            )
        if panels or title not in _OPTIONAL:
            yield (
                title,
                panels,
                caption,
                _times(run.metrics) if title == "Time" else None,
                drift_section(run.path) if title == _DRIFT else "",
            )
