"""One HTML page that tells what a run did: accuracy, reward, drift, FP8 health, time, samples.

`write_report` reads a run directory (see summary.py) and writes report.html into it, a single
file without scripts or links.

Drift of a step: |dlogp| = |logp_learner - logp_rollout| per response token, its mean and maximum,
and the share of tokens whose two values have the same bits.

Not done: statistics across seeds; smoothing, but for the running mean of the reward, drawn over
the raw values.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fp8rl_jax.report.drift import drift_section
from fp8rl_jax.report.html import (
    COLOURS,
    CSS,
    HEAD,
    draw_line,
    figure_html,
    panels_of,
    table_html,
    text_html,
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


def _panels(rows: list[dict], symlog: bool, *panels: tuple[str, ...]) -> Figure | None:
    """One plot per (title, metric, ...) with a line per recorded metric; None if there is none."""
    data = {title: [(key, *series(rows, key)) for key in keys] for title, *keys in panels}
    data = {title: [x for x in lines if np.isfinite(x[2]).any()] for title, lines in data.items()}
    data = {title: lines for title, lines in data.items() if lines}
    if not data:
        return None
    figure, axes = panels_of(len(data), 3.0 if len(data) < 4 else 2.6)
    for ax, (title, lines) in zip(axes, data.items(), strict=True):
        for i, (key, steps, values) in enumerate(lines):
            width = 1.5 * (1 if values.any() else len(lines) - i)  # lines that coincide at 0 show
            label = key.strip("_").rsplit("/", 1)[-1] + (_zeros(values) if symlog else "")
            draw_line(ax, steps, values, i, label=label, lw=width)
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
            place = "upper right" if symlog else "best"
            ax.legend(framealpha=0.8, edgecolor="none", fontsize=8, loc=place)
    return figure


def _zeros(values: np.ndarray) -> str:
    zeros = int((values == 0).sum())
    if zeros == len(values):
        return f": exactly 0 at all {steps_text(zeros)}"
    return f" (0 at {zeros:,} of {steps_text(len(values))})" if zeros else ""


def _plot_accuracy(run: RunFiles, s: dict) -> Figure | None:
    """SFT updates fill x in [-0.8, 0], RL steps [0, 1]: each phase has its own scale."""
    if not run.eval:
        return None
    figure, (ax,) = panels_of(1, 3.9)
    ticks, lines = {}, {"greedy": [], "sampled": []}
    for phase, rows, left, width in (("sft", run.sft, -0.8, 0.8), ("rl", run.metrics, 0, 1)):
        if not (evaluations := run.phase(phase)):
            continue
        last = max([1, *series(rows + evaluations, "step")[0]])
        numbers = MaxNLocator(5, integer=True).tick_values(0, last)
        for x in numbers[(numbers >= 0) & (numbers <= last)]:
            ticks.setdefault(float(left + width * x / last), f"{x:,.0f}")
        for kind, points in lines.items():
            steps, values = series(evaluations, f"accuracy_{kind}")
            points += zip(left + width * steps / last, values, strict=True)
    for i, (kind, points) in enumerate(lines.items()):
        x, values = np.array(points).reshape(-1, 2).T
        draw_line(ax, x, values, i, label=kind, marker="o", ms=3.5)
        if (best := s[kind]["sft_best"]) is not None:
            label = f"best SFT, {kind}: {share(best)}"
            ax.axhline(best, color=COLOURS[i], ls="--", lw=1.1, label=label)
    if run.phase("sft") and run.phase("rl"):
        ax.axvline(0, color="#444444", lw=1.2)
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.set_xlabel("SFT update   |   RL step   (each phase has its own scale)")
    ax.set_ylabel("held-out accuracy")
    ax.legend(frameon=False, fontsize=9)
    return figure


def _phases(rows: list[dict]) -> list[str]:
    found = {key[5:] for key in keys_with(rows, "time_")} - {"step"}
    return [p for p in _PHASES if p in found] + sorted(found - set(_PHASES))


def _plot_time(rows: list[dict]) -> Figure | None:
    if not (phases := _phases(rows)):
        return None
    figure, (ax, rate) = panels_of(2, 3.4)
    values = [series([{f"time_{p}": 0.0} | row for row in rows], f"time_{p}") for p in phases]
    steps, stack = values[0][0], np.nan_to_num([v for _, v in values])
    x = np.repeat(steps, 2) + np.tile((-0.5, 0.5), len(steps))  # a bar's two edges per step
    ax.stackplot(x, np.repeat(stack, 2, axis=1), labels=phases, colors=COLOURS, alpha=0.85, lw=0)
    total, title = stack.sum(0), "Seconds per step, by phase"
    ax.set_ylim(0, 1.35 * total.max())
    if len(steps) > 1 and total[0] > 1.5 * total[1:].max():
        ax.set_ylim(0, 1.35 * total[1:].max())
        title += f" (step {steps[0]:.0f}, off the scale: {total[0]:.3g} s)"
    for i, side in enumerate(("rollout", "learner")):
        draw_line(rate, *series(rows, f"tokens_per_s_{side}"), i, label=side)
    rate.set_ylim(0)
    for axis, text in ((ax, title), (rate, "Tokens per second")):
        axis.set_title(text, loc="left", fontsize=10.5)
        axis.legend(framealpha=0.8, edgecolor="none", fontsize=8.5, ncols=2)
    return figure


def _time_table(rows: list[dict]) -> str:
    mean = {k: typical(rows, f"time_{k}", np.mean) for k in [*_phases(rows), "step"]}
    out = []
    for phase, value in mean.items():
        first = statistic(series(rows[:1], f"time_{phase}")[1], np.max)
        median = typical(rows, f"time_{phase}")
        part = None if value is None or not mean["step"] else round(value / mean["step"], 3)
        name = "whole step" if phase == "step" else phase
        out.append((name, *map(number, (first, value, median)), share(part)))
    head = ("Phase", "First step, s", "Mean of the others, s", "Their median, s", "Share of mean")
    return table_html(head, out)


def _key_figures(s: dict) -> str:
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
        ("Reward, first → last tenth", f"{number(s['reward_first'])} → {number(s['reward_last'])}"),
        ("First step; median of the others", f"{first}; {others}"),
        ("Tokens per second, rollout; learner", "; ".join(rates)),
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


def _main_fields(run: RunFiles) -> str:
    rows = [(f"{k} recipe", run.field("precision", k) or MISSING) for k in ("rollout", "learner")]
    for section, fields in run.config.items():
        fields = fields if isinstance(fields, dict) else {section: fields}
        simple = [f"{k} = {v}" for k, v in fields.items() if not isinstance(v, dict | list)]
        rows.append((section, ", ".join(simple[:12]) + ", …" * (len(simple) > 12)))
    return table_html((), rows, "")


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
    recipes = {i: str(s["rollout_recipe"]) for i, s in enumerate(figures) if s["time_rollout"]}
    fp8 = [i for i, recipe in recipes.items() if "fp8" in recipe]
    base = [i for name in ("bf16", "f32") for i, recipe in recipes.items() if recipe == name]
    if fp8 and base:
        i, j = fp8[0], base[0]
        ratio = figures[i]["time_rollout"] / figures[j]["time_rollout"]
        text += f" Measured here: the median rollout time of {names[i]} ({recipes[i]}) is"
        text += f" {ratio:.2f} times that of {names[j]} ({recipes[j]})."
        sections = ("model", "rollout", "algo", "env")
        other = [k for k in sections if runs[i].config.get(k) != runs[j].config.get(k)]
        text += f" Their configs also differ in: {', '.join(other)}." if other else ""
    return table_html(head.split(";"), rows) + f"<p>{text_html(text)}</p>"


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
    target, page = run.path / "report.html", _page(run, others).encode("utf-8", errors="replace")
    temporary = run.path / f".report.html.{os.getpid()}.tmp"
    temporary.write_bytes(page)
    os.replace(temporary, target)
    return target


def _page(run: RunFiles, others: list[RunFiles]) -> str:
    s, rows = summarise_files(run), [dict(row) for row in run.metrics]
    window = max(2, min(20, len(rows) // 5))
    for i in range(window - 1, len(rows)):
        recent = series(rows[i + 1 - window : i + 1], "reward_mean")[1]
        rows[i]["running_mean"] = float(np.mean(recent)) if len(recent) == window else None
    drift = [dict(row) for row in run.compared]
    for row in (x for x in drift if "logprob_equal_frac" in x):
        equal = row["logprob_equal_frac"]
        row["1 - logprob_equal_frac"] = None if equal is None else 1 - equal
    accuracy = "SFT updates left of the line, RL steps right of it."
    if s["questions"]:
        error = f"{50 / math.sqrt(s['questions']):.1f} points"
        accuracy += f" With {s['questions']:,} questions one standard error is at most {error}."
    lengths = ("Response length, tokens", "response_len_mean", "response_len_max")
    shares = ("Shares", "group_zero_std_frac", "truncated_frac")
    learning = (("Loss", "loss"), ("Gradient norm", "grad_norm"), ("Learning rate", "lr"))
    clipped = ("Clipped share", "clipfrac_low", "clipfrac_high")
    policy = (("Entropy, nats", "entropy"), clipped, ("KL to the reference", "kl_ref"))
    drifts = (("|Δlogp| of a token, nats", DRIFT_MAX, DRIFT_MEAN),)
    drifts += (("Share of tokens with other bits", "1 - logprob_equal_frac"),)
    fp8 = (("Saturated share", "fp8_saturated_frac"), ("Underflow share", "fp8_underflow_frac"))
    slots = (("Share of slots that drew", "rollout_slots_used"),)
    slots += (("Responses computed anew", "rollout_preemptions"),)
    load = (("Largest load over the mean", "expert_load_max", "expert_load_max_mean"),)
    load += (("Entropy of the load", "expert_load_entropy"),)
    load += (("Experts without a token", "experts_unused_frac"),)
    plots = {
        "Held-out accuracy": (_plot_accuracy(run, s), accuracy),
        "Reward": (
            _panels(rows, False, ("Reward", "reward_mean", "running_mean"), lengths, shares),
            f"Training reward with its mean over {window} steps, and the responses behind it.",
        ),
        "Drift between rollout and learner": (
            _panels(drift, True, *drifts),
            "Learner's log-probs less the rollout's. Linear near 0, logarithmic above.",
        ),
        "FP8 health": (
            _panels(rows, True, *((title, *keys_with(rows, key)) for title, key in fp8)),
            "Saturated: beyond the largest FP8 value. Underflow: not 0 before, 0 after.",
        ),
        "Experts": (
            _panels(rows, False, *load),
            "Load of the routed experts: of the worst layer and the mean of layers.",
        ),
        "Continuous batching": (
            _panels(rows, False, *slots),
            "Slots and turns of the rollout that drew a token, and how often a response lost its "
            "pages and was computed anew (docs/rollout.md).",
        ),
        "Time": (_plot_time(rows), "Recorded phases of each step, stacked, and the throughput."),
        "Optimiser": (_panels(rows, False, *learning, *policy), "Reinforcement learning steps."),
        "Supervised fine-tuning": (_panels(run.sft, False, *learning), "Updates before RL."),
    }
    sections = {"Key figures": _key_figures(s), "Recipes and settings": _main_fields(run)}
    for title in ("Experts", "Continuous batching"):  # a dense model; a static rollout
        if plots[title][0] is None:
            del plots[title]
    sections |= {title: figure_html(*plot) for title, plot in plots.items()}
    sections["Time"] += _time_table(rows) if rows else ""
    sections["Drift between rollout and learner"] += drift_section(run.path)
    sections |= {"Comparison": _comparison([run, *others])} if others else {}
    sections["Sample transcripts"] = _samples(run)
    config = text_html(json.dumps(run.config, indent=2, ensure_ascii=False))
    config = f"<summary>Complete configuration</summary><pre>{config}</pre>"
    sections["Configuration"] = f"<details>{config}</details>"
    name = text_html(run.path.resolve().name)
    notes = "".join(f"<li>{text_html(note)}</li>" for note in s["notes"])
    notes = f'<ul class="notes">{notes}</ul>' if notes else ""
    body = f'<h1>Run {name}</h1><p class="lead">{text_html(s["sentence"])}</p>{notes}'
    body += "".join(f"<h2>{title}</h2>{content}" for title, content in sections.items())
    return f"{HEAD}<title>Run {name}</title><style>{CSS}</style></head><body>{body}</body></html>"
