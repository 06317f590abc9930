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
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fp8rl_jax.base.json_file import read_json
from fp8rl_jax.report.drift import drift_section
from fp8rl_jax.report.html import (
    COLOURS,
    draw_line,
    drawable,
    figure_html,
    label_text,
    panels_of,
    table_html,
    text_html,
    write_page,
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
    steps_text,
    summarise_files,
    typical,
)

_PHASES = ("rollout", "reward", "old_logprobs", "learner", "refit", "calibrate")
_NAMES = {"sft": "SFT", "rl": "RL"}
_SAMPLES_SHOWN = 12
_MOST_LINES = 24  # of a plot
_LEARNING = (("Loss", "loss"), ("Gradient norm", "grad_norm"), ("Learning rate", "lr"))
# {heading: (rows, caption, (title of a plot, metric, ...), ...)}; a * stands for any ending.
_PLOTS: dict[str, tuple] = {
    "Held-out accuracy": (
        "eval", "Evaluations during SFT and RL.",
        ("SFT", "sft/greedy", "sft/sampled"), ("RL", "rl/greedy", "rl/sampled"),
    ),
    "Reward": (
        "rl", "Training reward with its running mean, and the responses behind it.",
        ("Reward", "reward_mean", "running_mean"),
        ("Response length, tokens", "response_len_mean", "response_len_max"),
        ("Shares", "group_zero_std_frac", "truncated_frac"),
    ),
    "Drift between rollout and learner": (
        "drift", "Learner's log-probs less the rollout's. Linear near 0, logarithmic above.",
        ("|Δlogp| of a token, nats", DRIFT_MAX, DRIFT_MEAN),
        ("Share of tokens with other bits", "1 - logprob_equal_frac"),
    ),
    "FP8 health": (
        "rl", "Saturated: beyond the largest FP8 value. Underflow: not 0 before, 0 after.",
        ("Saturated share", "fp8_saturated_frac*"), ("Underflow share", "fp8_underflow_frac*"),
    ),
    "Experts": (
        "rl", "Load of the routed experts: of the worst layer and the mean of layers.",
        ("Largest load over the mean", "expert_load_max", "expert_load_max_mean"),
        ("Entropy of the load", "expert_load_entropy"),
        ("Experts without a token", "experts_unused_frac"),
    ),
    "Continuous batching": (
        "rl", "Slots and turns of the rollout that drew a token, and how often a response lost its "
        "pages and was computed anew (docs/rollout.md).",
        ("Share of slots that drew", "rollout_slots_used"),
        ("Responses computed anew", "rollout_preemptions"),
    ),
    "Time": ("time", "Recorded phases of each step, stacked, and the throughput."),
    "Optimiser": (
        "rl", "Reinforcement learning steps.", *_LEARNING, ("Entropy, nats", "entropy"),
        ("Clipped share", "clipfrac_low", "clipfrac_high"), ("KL to the reference", "kl_ref"),
    ),
    "Supervised fine-tuning": ("sft", "Updates before RL.", *_LEARNING),
}  # fmt: skip
_SYMLOG = ("Drift between rollout and learner", "FP8 health")
_OPTIONAL = ("Experts", "Continuous batching")  # a dense model; a static rollout
_LEGEND: dict[str, Any] = {"framealpha": 0.8, "edgecolor": "none"}


def _plot(rows: list[dict], panels: Sequence[tuple[str, ...]], symlog: bool) -> Figure | None:
    """A plot per (title, metric, ...), a line per recorded metric; None if there is none."""
    data, recorded = {}, keys_with(rows, "")
    for title, *patterns in panels:
        keys = [key for pattern in patterns for key in fnmatch.filter(recorded, pattern)]
        found = ((key, *series(rows, key)) for key in keys[:_MOST_LINES])
        lines = [(key, steps, drawable(values)) for key, steps, values in found]
        if lines := [line for line in lines if np.isfinite(line[2]).any()]:
            data[title] = lines
    if not data:
        return None
    figure, axes = panels_of(len(data), 3.0 if len(data) < 4 else 2.6)
    for ax, (title, lines) in zip(axes, data.items(), strict=True):
        for i, (key, steps, values) in enumerate(lines):
            width = 1.5 * (1 if values.any() else len(lines) - i)  # lines that coincide at 0 show
            label = key.rsplit("/", 1)[-1]
            draw_line(ax, steps, values, i, label=label + _zeros(values) * symlog, lw=width)
        ax.set_title(title, loc="left", fontsize=10.5)
        if symlog:
            values = np.concatenate([x[2] for x in lines])
            positive = values[np.isfinite(values) & (values > 0)]
            low = 10 ** np.floor(np.log10(max(positive.min(), 1e-9))) if positive.size else 1e-6
            ax.set_yscale("symlog", linthresh=low)
            high = max([low, *positive])
            ax.set_ylim(-0.3 * low, high * max(30, (high / low) ** 0.6))  # room for the legend
        else:
            ax.yaxis.set_major_formatter("{x:.4g}")
        if symlog or len(lines) > 1:
            ax.legend(**_LEGEND, fontsize=8, loc="upper right" if symlog else "best")
    return figure


def _zeros(values: np.ndarray) -> str:
    zeros = int((values == 0).sum())
    if zeros == len(values):
        return f": exactly 0 at all {steps_text(zeros)}"
    return f" (0 at {zeros:,} of {steps_text(len(values))})" if zeros else ""


def _phases(rows: list[dict]) -> list[str]:
    found = {key[5:] for key in keys_with(rows, "time_")} - {"step"}
    return ([p for p in _PHASES if p in found] + sorted(found - set(_PHASES)))[:_MOST_LINES]


def _plot_time(rows: list[dict]) -> Figure | None:
    if not (phases := _phases(rows)):
        return None
    figure, (ax, rate) = panels_of(2, 3.4)
    shown = rows[1:] or rows  # the first step usually compiles
    names = [f"time_{p}" for p in phases]
    steps = np.array([row.get("step", i) for i, row in enumerate(shown)], float)
    stack = np.zeros((len(names), len(shown)))
    for name, seconds in zip(names, stack, strict=True):
        for i, row in enumerate(shown):
            if isinstance(value := row.get(name), int | float):
                seconds[i] = value
    stack = np.nan_to_num(drawable(stack))
    x = np.repeat(steps, 2) + np.tile((-0.5, 0.5), len(steps))  # a bar's two edges per step
    ax.stackplot(
        x,
        np.repeat(stack, 2, axis=1),
        labels=list(map(label_text, phases)),
        colors=COLOURS,
        alpha=0.85,
        lw=0,
    )
    ax.set_ylim(0, 1.35 * max(stack.sum(0).max(), 1e-9))
    for i, side in enumerate(("rollout", "learner")):
        draw_line(rate, *series(rows, f"tokens_per_s_{side}"), i, label=side)
    rate.set_ylim(0)
    seconds = "Seconds per step, by phase" + ", without the first" * (len(rows) > 1)
    for axis, text in ((ax, seconds), (rate, "Tokens per second")):
        axis.set_title(text, loc="left", fontsize=10.5)
        axis.legend(**_LEGEND, fontsize=8.5, ncols=2)
    return figure


def _time_table(rows: list[dict]) -> str:
    cells = []
    for phase in [*_phases(rows), "step"]:
        first = statistic(series(rows[:1], f"time_{phase}")[1], np.max)
        cells.append((phase, number(first), number(typical(rows, f"time_{phase}"))))
    return table_html(("Phase", "First step, s", "Median of the others, s"), cells)


def _devices(run: RunFiles) -> str:
    """What the run was last started on."""
    try:
        return str(read_json(run.path / "environment.json")[-1]["devices"]["layout"])
    except (OSError, ValueError, LookupError, TypeError):
        return MISSING


def _key_figures(run: RunFiles, s: dict) -> str:
    checks = f"{s['refit_checks'] - s['refit_failures']:,} of {s['refit_checks']:,} matched"
    first, others = number(s["time_step_first"], " s"), number(s["time_step"], " s")
    rates = (number(s[f"tokens_per_s_{side}"]) for side in ("rollout", "learner"))
    sampled, greedy = (
        " → ".join(share(s[kind][when]) for when in ("sft_end", "last"))
        for kind in ("sampled", "greedy")
    )
    rows = [
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
    half = len(rows) // 2
    return table_html((), [a + b for a, b in zip(rows[:half], rows[half:], strict=True)], "")


def _samples(run: RunFiles) -> str:
    where = [(row.get("phase", "rl"), row.get("step")) for row in run.samples]
    rows = [row for row, w in zip(run.samples, where, strict=True) if w == where[-1]]
    if not rows:
        return figure_html(None, "")
    keys, phase = ("prompt", "response", "answer", "reward"), where[-1][0]
    shown = [[row.get(key, "") for key in keys] for row in rows[:_SAMPLES_SHOWN]]
    step = f"{_NAMES.get(phase, phase)} step {where[-1][1]}"
    text = f"{len(shown)} of the {len(rows)} samples of {step}."
    table = table_html([key.capitalize() for key in keys], shown, "", "<pre>{}</pre>")
    return f'<p class="soft">{text_html(text)}</p>{table}'


def _comparison(runs: list[RunFiles]) -> str:
    names = [run.path.resolve().name for run in runs]
    figures, rows = [summarise_files(run) for run in runs], []
    for run, name, s in zip(runs, names, figures, strict=True):
        accuracy = [share(s[kind]["last"]) for kind in ("greedy", "sampled")]
        drift = (drift_text(s), near_one(s["token_mult_prob_error"]))
        times = [number(s[key]) for key in TYPICAL[1:]]
        rows.append((f"{run.label} ({name})", *times, *accuracy, *drift))
    head = "Run;Rollout, s;Learner, s;Rollout tokens/s;Learner tokens/s;Greedy;Sampled"
    head += ";Drift max;Token mult. prob. error"
    text = "Times and rates are medians without the first step. On a CPU, FP8 is emulated in wider "
    text += "types and is slower there than BF16: CPU times say nothing about FP8 hardware."
    return table_html(head.split(";"), rows) + f"<p>{text}</p>"


def write_report(
    run_dir: str | os.PathLike, compare: Sequence[str | os.PathLike] = ()
) -> pathlib.Path:
    """Writes run_dir/report.html, replacing an older one atomically, and returns its path.

    Args:
      run_dir: directory of a run, finished or in progress; see `summarise` for its files.
      compare: other run directories, which add a section with one row per run.

    Raises:
      ValueError: a directory does not exist, or its config.json is missing or not an object.
    """
    run, others = load_run(run_dir), [load_run(path) for path in compare]
    s = summarise_files(run)
    notes = "".join(f"<li>{text_html(note)}</li>" for note in s["notes"])
    body = f'<p class="lead">{text_html(s["sentence"])}</p>'
    body += f'<ul class="notes">{notes}</ul>' if notes else ""
    body += f"<p>{text_html(s['advice'])}</p>" if s["advice"] else ""
    for title, content in _sections(run, others, s).items():
        body += f"<h2>{title}</h2>{content}"
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
    evaluations = [
        {"step": row.get("step", i)}
        | {f"{phase}/{kind}": row.get(f"accuracy_{kind}") for kind in ("greedy", "sampled")}
        for phase in ("sft", "rl")
        for i, row in enumerate(run.phase(phase))
    ]
    return {"rl": rows, "sft": run.sft, "drift": drift, "eval": evaluations}


def _sections(run: RunFiles, others: list[RunFiles], s: dict) -> dict[str, str]:
    """{heading: what is below it}."""
    sections, rows = {"Key figures": _key_figures(run, s)}, _rows(run)
    for title, (source, caption, *panels) in _PLOTS.items():
        if source == "time":
            figure = _plot_time(run.metrics)
        else:
            figure = _plot(rows[source], panels, title in _SYMLOG)
        if title == "Held-out accuracy" and (s["questions"] or 0) > 0:
            error = f"{50 / math.sqrt(s['questions']):.1f} points"
            caption += f" With {s['questions']:,} questions one standard error is at most {error}."
        if figure is not None or title not in _OPTIONAL:
            sections[title] = figure_html(figure, caption)
    sections["Time"] += _time_table(run.metrics) if run.metrics else ""
    sections["Drift between rollout and learner"] += drift_section(run.path)
    if others:
        sections["Comparison"] = _comparison([run, *others])
    sections["Sample transcripts"] = _samples(run)
    config = text_html(json.dumps(run.config, indent=2, ensure_ascii=False))
    sections["Configuration"] = f"<pre>{config}</pre>"
    return sections
