"""One HTML page that tells what a run did: accuracy, reward, drift, FP8 health, time, samples.

`write_report` reads the JSON-lines files of a run directory and writes report.html beside them,
a single file without scripts or links. `summarise` returns the figures that it opens with. Every
statement is computed from the files: what was not recorded is said to be missing, and "exactly 0"
appears only where every recorded step is 0.0.

Drift of a step: |dlogp| = |logp_learner - logp_rollout| per response token, its mean and maximum,
and the share of tokens whose two values have the same bits; means over the run weight each step
by `drift_tokens`. Times are medians over all steps but the first, which usually compiles.

Not done: statistics across seeds; smoothing, but for the running mean of the reward, drawn over
the raw values. No jax is imported, so the report opens at once.
"""

import base64
import dataclasses
import html
import io
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's palette: distinct to colour-blind readers.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#888888")
_PHASES = ("rollout", "reward", "old_logprobs", "learner", "refit", "calibrate")
_MEAN, _MAX = "train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max"
_TOKEN_MEANS = ("logprob_equal_frac", "token_mult_prob_error", "mismatch_kl", "tis_clipfrac")
_TYPICAL = ("time_step", "time_rollout", "time_learner")
_TYPICAL += ("tokens_per_s_rollout", "tokens_per_s_learner")
_NAMES = {"warmup": "warm-up", "rl": "RL"}
_MISSING, _SAMPLES_SHOWN = "not recorded", 12
_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">"""
_CSS = """
:root{--bg:#fafaf8;--fg:#22262a;--soft:#626a72;--line:#dcdfe2;--card:#fff;--mark:#0072b2}
@media(prefers-color-scheme:dark){:root{--bg:#17191c;--fg:#e4e6e8;--soft:#9aa3ab;--line:#363b40;
--card:#1f2226;--mark:#6bb8e8}} html{color-scheme:light dark} *{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1.5rem 4rem;max-width:1120px;background:var(--bg);color:var(--fg);
font:16px/1.55 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif} h1{margin:0 0 .5rem}
h2{font-size:1.2rem;margin:2.5rem 0 .7rem} .soft,figcaption{color:var(--soft);font-size:.9rem}
.notes{border-left:4px solid #d55e00;padding:.5rem 1rem .5rem 2rem;background:var(--card)}
.scroll{overflow-x:auto;margin:.7rem 0} figure{margin:0 0 1rem} figcaption{margin-top:.4rem}
table{border-collapse:collapse;width:100%;background:var(--card);font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.4rem .75rem;border:1px solid var(--line)}
thead th{border-bottom:2px solid var(--mark)} td:first-child{min-width:9rem}
.num :is(td,th):not(:first-child){text-align:right;font-variant-numeric:tabular-nums}
.num td:not(:first-child){white-space:nowrap} .lead{font-size:1.08rem} summary{cursor:pointer}
img{display:block;width:100%;background:#fff;border:1px solid var(--line);border-radius:8px}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;max-height:18rem;overflow-y:auto;
font:13px/1.45 ui-monospace,"DejaVu Sans Mono",Menlo,monospace} details pre{max-height:none}
"""


@dataclasses.dataclass(frozen=True)
class _Run:
    """The files of one run directory; `notes` says what was missing or unreadable."""

    path: pathlib.Path
    config: dict
    notes: list[str]
    warmup: list[dict]
    metrics: list[dict]
    eval: list[dict]
    samples: list[dict]

    def field(self, section: str, key: str) -> str | None:
        value = self.config.get(section)
        value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, dict):  # a recipe may be written out in full
            value = value.get("name") or json.dumps(value, sort_keys=True)
        return None if value is None else str(value)

    def phase(self, name: str) -> list[dict]:
        return [row for row in self.eval if row.get("phase", "rl") == name]

    @property
    def compared(self) -> list[dict]:
        """Steps whose drift was measured; a step that compared no token says nothing."""
        return [row for row in self.metrics if _MAX in row and row.get("drift_tokens", 1)]

    @property
    def label(self) -> str:
        rollout, learner = (self.field("precision", k) or "?" for k in ("rollout", "learner"))
        return f"{rollout} rollout, {learner} learner"


def _load(run_dir: str | os.PathLike) -> _Run:
    path, notes = pathlib.Path(run_dir), []
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise ValueError(f"Run directory {str(path)!r} {what}; give one that a training run wrote.")
    try:
        config = {**json.loads((path / "config.json").read_text(encoding="utf-8"))}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(path / 'config.json')!r} must hold one JSON object.") from error
    names = ("warmup", "metrics", "eval", "samples")
    return _Run(path, config, notes, *(_read_rows(path / f"{n}.jsonl", notes) for n in names))


def _read_rows(path: pathlib.Path, notes: list[str]) -> list[dict]:
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return []
    lines = [x for x in path.read_text(encoding="utf-8", errors="replace").split("\n") if x.strip()]
    rows, bad = [], []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append({**json.loads(line)})
        except (ValueError, TypeError):
            bad.append(number)
    if bad:
        last = ", the last one incomplete" if bad[-1] == len(lines) else ""
        notes.append(f"{path.name}: left out {len(bad)} of {len(lines)} lines{last}.")
    if not rows:
        notes.append(f"{path.name} holds no complete line.")
    return rows


def _series(rows: Iterable[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of `key` where a row has it; null (how NaN may be written) becomes NaN."""
    pairs = [(row.get("step", i), row.get(key, "")) for i, row in enumerate(rows)]
    pairs = [(s, v) for s, v in pairs if not isinstance(v, str | list | dict)]
    return np.array([s for s, _ in pairs], float), np.array([v for _, v in pairs], float)


def _stat(values: np.ndarray, reduce: Callable) -> float | None:
    values = values[np.isfinite(values)]
    return float(reduce(values)) if values.size else None


def _typical(rows: list[dict], key: str, reduce: Callable = np.median) -> float | None:
    """Median over all steps but the first, which usually compiles."""
    return _stat(_series(rows[1:], key)[1], reduce)


def _token_mean(rows: list[dict], key: str) -> float | None:
    rows = [row for row in rows if key in row]
    values, weights = _series(rows, key)[1], _series(rows, "drift_tokens")[1]
    if not values.size or not np.isfinite(values).all():
        return None  # a mean that skips a NaN would flatter the run
    if (values == values[0]).all():
        return float(values[0])  # a weighted mean of ones may round to 1 - 1e-16
    return float(np.average(values, weights=weights if len(weights) == len(values) else None))


def summarise(run_dir: str | os.PathLike) -> dict:
    """Headline figures of a run; a figure that was not recorded is None.

    Args:
      run_dir: directory with config.json and, as far as the run got, warmup.jsonl, metrics.jsonl,
        eval.jsonl and samples.jsonl.

    Returns:
      A dict that `json.dumps` accepts:
        sentence: the summary sentence of the report.
        task, seed, rollout_recipe, learner_recipe: from the config, as strings.
        warmup_steps, rl_steps: lines read from warmup.jsonl and metrics.jsonl.
        greedy, sampled: held-out accuracy (0 to 1), each a dict of `warmup_end`, `warmup_best`,
          `warmup_best_step`, `last` (last evaluation of the RL phase) and `last_step`.
        questions: held-out questions of the last evaluation.
        reward_first, reward_last: mean reward over the first and the last tenth of the steps.
        drift_steps, drift_tokens: steps and response tokens whose log-probs were compared.
        drift_max, drift_mean: maximum and mean |dlogp|, nats; None too if a step's is not finite.
        drift_exactly_zero: whether the maximum is 0.0 at every compared step.
        logprob_equal_frac: share of bit-equal log-probs.
        token_mult_prob_error, mismatch_kl, tis_clipfrac: means over the compared tokens.
        time_step_first: seconds of the first step.
        time_step, time_rollout, time_learner, tokens_per_s_rollout, tokens_per_s_learner: seconds
          and rates, median without the first step.
        refit_checks, refit_failures, reward_errors: counts over the run.
        notes: sentences on what is missing, unreadable or wrong.

    Raises:
      ValueError: the directory does not exist, or its config.json is missing or not an object.
    """
    return _summarise(_load(run_dir))


def _accuracy(run: _Run, kind: str) -> dict:
    out = dict.fromkeys(("warmup_end", "warmup_best", "warmup_best_step", "last", "last_step"))
    steps, values = _series(run.phase("warmup"), f"accuracy_{kind}")
    if np.isfinite(values).any():
        best = int(np.nanargmax(values))
        out["warmup_best"], out["warmup_best_step"] = float(values[best]), int(steps[best])
        out["warmup_end"] = _stat(values[-1:], np.max)
    steps, values = _series(run.phase("rl"), f"accuracy_{kind}")
    if np.isfinite(values[-1:]).any():
        out["last"], out["last_step"] = float(values[-1]), int(steps[-1])
    return out


def _summarise(run: _Run) -> dict:
    rows, compared = run.metrics, run.compared
    reward, drift_max = _series(rows, "reward_mean")[1], _series(compared, _MAX)[1]
    tenth, checks = max(1, len(reward) // 10), _series(rows, "refit_checksum_ok")[1]
    out = {"task": run.field("env", "task"), "seed": run.field("run", "seed")}
    out |= {f"{side}_recipe": run.field("precision", side) for side in ("rollout", "learner")}
    out |= {"warmup_steps": len(run.warmup), "rl_steps": len(rows)}
    out |= {kind: _accuracy(run, kind) for kind in ("greedy", "sampled")}
    out |= {
        "questions": _stat(_series(run.eval, "questions")[1][-1:], np.max),
        "reward_first": _stat(reward[:tenth], np.mean),
        "reward_last": _stat(reward[-tenth:], np.mean),
        "drift_steps": len(compared),
        "drift_tokens": _stat(_series(compared, "drift_tokens")[1], np.sum),
        "drift_max": _stat(drift_max, np.max) if np.isfinite(drift_max).all() else None,
        "drift_mean": _token_mean(compared, _MEAN),
        "drift_exactly_zero": bool((drift_max == 0).all()) if compared else None,
        "time_step_first": _stat(_series(rows, "time_step")[1][:1], np.max),
        "refit_checks": int(np.isfinite(checks).sum()),
        "refit_failures": int((checks == 0).sum()),
        "reward_errors": _stat(_series(rows, "reward_errors")[1], np.sum),
    }
    counts = ("questions", "drift_tokens", "reward_errors")
    out |= {key: int(out[key]) for key in counts if out[key] is not None}
    out |= {key: _token_mean(compared, key) for key in _TOKEN_MEANS}
    out |= {key: _typical(rows, key) for key in _TYPICAL}
    return {"sentence": _sentence(run, out)} | out | {"notes": run.notes + _warnings(run, out)}


def _warnings(run: _Run, s: dict) -> list[str]:
    notes = []
    for key in ("loss", "grad_norm", _MEAN, _MAX):
        steps, values = _series(run.compared if key in (_MEAN, _MAX) else run.metrics, key)
        if (bad := steps[~np.isfinite(values)]).size:
            notes.append(f"{key} is not finite at {_steps(bad.size)}, first at step {bad[0]:.0f}.")
    if s["refit_failures"]:
        notes.append(f"The refit checksum failed at {_steps(s['refit_failures'])}.")
    if s["reward_errors"]:
        notes.append(f"{s['reward_errors']} rewards raised an error and were scored 0.")
    for key in _keys(run.metrics, "fp8_nonfinite_blocks"):
        if count := _stat(_series(run.metrics, key)[1], np.sum):
            notes.append(f"{key}: {count:.0f} blocks held NaN or infinity.")
    return notes


def _keys(rows: list[dict], prefix: str) -> list[str]:
    return sorted({key for row in rows for key in row if key.startswith(prefix)})


def _steps(count: int) -> str:
    return f"{count:,} step" + "s" * (count != 1)


def _num(value: float | None, unit: str = "") -> str:
    if value is None:
        return _MISSING
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}") + unit


def _near_one(value: float | None) -> str:
    """1 only when it is exactly 1: 1.0000000003 reads 1 + 3e-10."""
    return _num(value) if value in (None, 1) else f"1 + {value - 1:.3g}"


def _share(value: float | None) -> str:
    """A percentage that reads 0 % or 100 % only when the value is exactly 0 or 1."""
    if value is None:
        return _MISSING
    if 0 < value < 5e-4 or 1 - 5e-4 < value < 1:
        return f"{value * 100:.1g} %" if value < 0.5 else f"all but {(1 - value) * 100:.1g} %"
    return f"{value * 100:.1f}".removesuffix(".0") + " %"


def _drift(s: dict) -> str:
    if s["drift_max"] is None:
        return "not finite" if s["drift_steps"] else _MISSING
    return "0 exactly" if s["drift_exactly_zero"] else f"{s['drift_max']:.3g}"


def _sentence(run: _Run, s: dict) -> str:
    kinds, parts = ("sampled", "greedy"), ["no held-out evaluation recorded"]
    names = {"warmup_end": "the last warm-up evaluation"}
    names["last"] = f"RL step {max(s[kind]['last_step'] or 0 for kind in kinds):,}"
    ends = [k for k in names if any(s[kind][k] is not None for kind in kinds)]
    if ends:
        values = (f"{x} {' → '.join(_share(s[x][k]) for k in ends)}" for x in kinds)
        where = " and at ".join(names[k] for k in ends)
        parts = [f"held-out accuracy at {where}: {', '.join(values)}"]
    if (best := s["greedy"])["warmup_best"] is not None:
        parts[0] += f" (best warm-up evaluation {_share(best['warmup_best'])},"
        parts[0] += f" at step {best['warmup_best_step']:,})"
    if s["drift_steps"]:
        equal = _share(s["logprob_equal_frac"])
        equal = "" if equal == _MISSING else f", {equal} of log-probs bit-equal"
        over = f"{_num(s['drift_tokens'])} tokens of {_steps(s['drift_steps'])}"
        parts.append(f"drift over {over}: max |Δlogp| = {_drift(s)}{equal}")
    start = f"{s['task'] or 'unnamed task'}, seed {s['seed'] or _MISSING}, {run.label}, "
    return f"{start}{_steps(s['rl_steps'])} of RL: {'; '.join(parts)}."


def _axes(count: int, height: float) -> tuple[Figure, list[Axes]]:
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(11, height * rows), layout="constrained", facecolor="white")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#e6e6e6", lw=0.7)
        ax.set_axisbelow(True)
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _line(ax: Axes, steps: np.ndarray, values: np.ndarray, index: int, **style) -> None:
    marker = "o" if len(steps) <= 40 else None  # a run of one step must show too
    style = {"color": _COLOURS[index % len(_COLOURS)], "lw": 1.6, "marker": marker, "ms": 3} | style
    ax.plot(steps, values, **style)


def _panels(rows: list[dict], symlog: bool, *panels: tuple[str, ...]) -> Figure | None:
    """One plot per (title, metric, ...) with a line per recorded metric; None if there is none."""
    data = {title: [(key, *_series(rows, key)) for key in keys] for title, *keys in panels}
    data = {title: [x for x in lines if np.isfinite(x[2]).any()] for title, lines in data.items()}
    data = {title: lines for title, lines in data.items() if lines}
    if not data:
        return None
    figure, axes = _axes(len(data), 3.0 if len(data) < 4 else 2.6)
    for ax, (title, lines) in zip(axes, data.items(), strict=True):
        for i, (key, steps, values) in enumerate(lines):
            width = 1.5 * (1 if values.any() else len(lines) - i)  # lines that coincide at 0 show
            label = key.strip("_").rsplit("/", 1)[-1] + (_zeros(values) if symlog else "")
            _line(ax, steps, values, i, label=label, lw=width)
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
        return f": exactly 0 at all {_steps(zeros)}"
    return f" (0 at {zeros:,} of {_steps(len(values))})" if zeros else ""


def _plot_accuracy(run: _Run, s: dict) -> Figure | None:
    """Warm-up steps fill x in [-0.8, 0], RL steps [0, 1]: each phase has its own scale."""
    if not run.eval:
        return None
    figure, (ax,) = _axes(1, 3.9)
    ticks, lines = {}, {"greedy": [], "sampled": []}
    for phase, rows, left, width in (("warmup", run.warmup, -0.8, 0.8), ("rl", run.metrics, 0, 1)):
        if not (evaluations := run.phase(phase)):
            continue
        last = max([1, *_series(rows + evaluations, "step")[0]])
        numbers = MaxNLocator(5, integer=True).tick_values(0, last)
        for x in numbers[(numbers >= 0) & (numbers <= last)]:
            ticks.setdefault(float(left + width * x / last), f"{x:,.0f}")
        for kind, points in lines.items():
            steps, values = _series(evaluations, f"accuracy_{kind}")
            points += zip(left + width * steps / last, values, strict=True)
    for i, (kind, points) in enumerate(lines.items()):
        x, values = np.array(points).reshape(-1, 2).T
        _line(ax, x, values, i, label=kind, marker="o", ms=3.5)
        if (best := s[kind]["warmup_best"]) is not None:
            label = f"best warm-up, {kind}: {_share(best)}"
            ax.axhline(best, color=_COLOURS[i], ls="--", lw=1.1, label=label)
    if run.phase("warmup") and run.phase("rl"):
        ax.axvline(0, color="#444444", lw=1.2)
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.set_xlabel("warm-up step   |   RL step   (each phase has its own scale)")
    ax.set_ylabel("held-out accuracy")
    ax.legend(frameon=False, fontsize=9)
    return figure


def _phases(rows: list[dict]) -> list[str]:
    found = {key[5:] for key in _keys(rows, "time_")} - {"step"}
    return [p for p in _PHASES if p in found] + sorted(found - set(_PHASES))


def _plot_time(rows: list[dict]) -> Figure | None:
    if not (phases := _phases(rows)):
        return None
    figure, (ax, rate) = _axes(2, 3.4)
    values = [_series([{f"time_{p}": 0.0} | row for row in rows], f"time_{p}") for p in phases]
    steps, stack = values[0][0], np.nan_to_num([v for _, v in values])
    x = np.repeat(steps, 2) + np.tile((-0.5, 0.5), len(steps))  # a bar's two edges per step
    ax.stackplot(x, np.repeat(stack, 2, axis=1), labels=phases, colors=_COLOURS, alpha=0.85, lw=0)
    total, title = stack.sum(0), "Seconds per step, by phase"
    ax.set_ylim(0, 1.35 * total.max())
    if len(steps) > 1 and total[0] > 1.5 * total[1:].max():
        ax.set_ylim(0, 1.35 * total[1:].max())
        title += f" (step {steps[0]:.0f}, off the scale: {total[0]:.3g} s)"
    for i, side in enumerate(("rollout", "learner")):
        _line(rate, *_series(rows, f"tokens_per_s_{side}"), i, label=side)
    rate.set_ylim(0)
    for axis, text in ((ax, title), (rate, "Tokens per second")):
        axis.set_title(text, loc="left", fontsize=10.5)
        axis.legend(framealpha=0.8, edgecolor="none", fontsize=8.5, ncols=2)
    return figure


def _time_table(rows: list[dict]) -> str:
    mean = {k: _typical(rows, f"time_{k}", np.mean) for k in [*_phases(rows), "step"]}
    out = []
    for phase, value in mean.items():
        first = _stat(_series(rows[:1], f"time_{phase}")[1], np.max)
        median = _typical(rows, f"time_{phase}")
        share = None if value is None or not mean["step"] else round(value / mean["step"], 3)
        name = "whole step" if phase == "step" else phase
        out.append((name, *map(_num, (first, value, median)), _share(share)))
    head = ("Phase", "First step, s", "Mean of the others, s", "Their median, s", "Share of mean")
    return _table(head, out)


def _figure(figure: Figure | None, caption: str) -> str:
    if figure is None:
        return f'<p class="soft">{_MISSING.capitalize()} in this run.</p>'
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).figure.savefig(buffer, format="png", dpi=160)
    data, text = base64.b64encode(buffer.getvalue()).decode("ascii"), html.escape(caption)
    image = f'<img alt="{text}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def _text(value: object) -> str:
    """HTML-escaped text, with control characters made visible."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return html.escape(text.translate({c: f"\\x{c:02x}" for c in range(32) if c not in (9, 10)}))


def _table(head: Sequence, rows: Iterable[Sequence], style: str = "num", cell: str = "{}") -> str:
    """A table of escaped cells, each put into the template `cell`."""
    titles = "".join(f"<th>{_text(x)}</th>" for x in head)
    titles = f"<thead><tr>{titles}</tr></thead>" if head else ""
    lines = ("".join(f"<td>{cell.format(_text(x))}</td>" for x in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="{style}">{titles}<tbody>{body}</tbody></table></div>'


def _key_figures(s: dict) -> str:
    checks = f"{s['refit_checks'] - s['refit_failures']:,} of {s['refit_checks']:,} matched"
    first, typical = _num(s["time_step_first"], " s"), _num(s["time_step"], " s")
    rates = (_num(s[f"tokens_per_s_{side}"]) for side in ("rollout", "learner"))
    sampled, greedy = (
        " → ".join(_share(s[kind][when]) for when in ("warmup_end", "last"))
        for kind in ("sampled", "greedy")
    )
    rows = [
        ("Accuracy, sampled: last of warm-up → last of RL", sampled),
        ("Accuracy, greedy: last of warm-up → last of RL", greedy),
        ("Best warm-up accuracy, greedy", _share(s["greedy"]["warmup_best"])),
        ("Held-out questions", _num(s["questions"])),
        ("Reward, first → last tenth", f"{_num(s['reward_first'])} → {_num(s['reward_last'])}"),
        ("First step; median of the others", f"{first}; {typical}"),
        ("Tokens per second, rollout; learner", "; ".join(rates)),
        ("Max |Δlogp|", _drift(s)),
        ("Mean |Δlogp|", _num(s["drift_mean"])),
        ("Bit-equal log-probs", _share(s["logprob_equal_frac"])),
        ("Tokens compared", _num(s["drift_tokens"])),
        ("token_mult_prob_error", _near_one(s["token_mult_prob_error"])),
        ("mismatch_kl", _num(s["mismatch_kl"])),
        ("Refit checksums", checks if s["refit_checks"] else _MISSING),
    ]
    half = len(rows) // 2
    return _table((), [a + b for a, b in zip(rows[:half], rows[half:], strict=True)], "")


def _main_fields(run: _Run) -> str:
    rows = [(f"{k} recipe", run.field("precision", k) or _MISSING) for k in ("rollout", "learner")]
    for section, fields in run.config.items():
        fields = fields if isinstance(fields, dict) else {section: fields}
        simple = [f"{k} = {v}" for k, v in fields.items() if not isinstance(v, dict | list)]
        rows.append((section, ", ".join(simple[:12]) + ", …" * (len(simple) > 12)))
    return _table((), rows, "")


def _samples(run: _Run) -> str:
    where = [(row.get("phase", "rl"), row.get("step")) for row in run.samples]
    rows = [row for row, w in zip(run.samples, where, strict=True) if w == where[-1]]
    if not rows:
        return _figure(None, "")
    keys, phase = ("prompt", "response", "answer", "reward"), where[-1][0]
    shown = [[row.get(key, "") for key in keys] for row in rows[:_SAMPLES_SHOWN]]
    text = f"{len(shown)} of the {len(rows)} samples of {_NAMES.get(phase, phase)} step {where[-1][1]}."
    table = _table([key.capitalize() for key in keys], shown, "", "<pre>{}</pre>")
    return f'<p class="soft">{_text(text)}</p>{table}'


def _comparison(runs: list[_Run]) -> str:
    names = [run.path.resolve().name for run in runs]
    figures, rows = [_summarise(run) for run in runs], []
    for run, name, s in zip(runs, names, figures, strict=True):
        accuracy = [_share(s[kind]["last"]) for kind in ("greedy", "sampled")]
        drift = (_drift(s), _near_one(s["token_mult_prob_error"]))
        times = [_num(s[key]) for key in _TYPICAL[1:]]
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
    return _table(head.split(";"), rows) + f"<p>{_text(text)}</p>"


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
    run, others = _load(run_dir), [_load(path) for path in compare]
    target, page = run.path / "report.html", _page(run, others).encode("utf-8", errors="replace")
    temporary = run.path / f".report.html.{os.getpid()}.tmp"
    temporary.write_bytes(page)
    os.replace(temporary, target)
    return target


def _page(run: _Run, others: list[_Run]) -> str:
    s, rows = _summarise(run), [dict(row) for row in run.metrics]
    window = max(2, min(20, len(rows) // 5))
    for i in range(window - 1, len(rows)):
        recent = _series(rows[i + 1 - window : i + 1], "reward_mean")[1]
        rows[i]["running_mean"] = float(np.mean(recent)) if len(recent) == window else None
    drift = [dict(row) for row in run.compared]
    for row in (x for x in drift if "logprob_equal_frac" in x):
        equal = row["logprob_equal_frac"]
        row["1 - logprob_equal_frac"] = None if equal is None else 1 - equal
    accuracy = "Warm-up steps left of the line, RL steps right of it."
    if s["questions"]:
        error = f"{50 / math.sqrt(s['questions']):.1f} points"
        accuracy += f" With {s['questions']:,} questions one standard error is at most {error}."
    lengths = ("Response length, tokens", "response_len_mean", "response_len_max")
    shares = ("Shares", "group_zero_std_frac", "truncated_frac")
    learning = (("Loss", "loss"), ("Gradient norm", "grad_norm"), ("Learning rate", "lr"))
    clipped = ("Clipped share", "clipfrac_low", "clipfrac_high")
    policy = (("Entropy, nats", "entropy"), clipped, ("KL to the reference", "kl_ref"))
    drifts = (("|Δlogp| of a token, nats", _MAX, _MEAN),)
    drifts += (("Share of tokens with other bits", "1 - logprob_equal_frac"),)
    fp8 = (("Saturated share", "fp8_saturated_frac"), ("Underflow share", "fp8_underflow_frac"))
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
            _panels(rows, True, *((title, *_keys(rows, key)) for title, key in fp8)),
            "Saturated: beyond the largest FP8 value. Underflow: not 0 before, 0 after.",
        ),
        "Time": (_plot_time(rows), "Recorded phases of each step, stacked, and the throughput."),
        "Optimiser": (_panels(rows, False, *learning, *policy), "Reinforcement learning steps."),
        "Warm-up": (_panels(run.warmup, False, *learning), "Supervised steps before RL."),
    }
    sections = {"Key figures": _key_figures(s), "Recipes and settings": _main_fields(run)}
    sections |= {title: _figure(*plot) for title, plot in plots.items()}
    sections["Time"] += _time_table(rows) if rows else ""
    sections |= {"Comparison": _comparison([run, *others])} if others else {}
    sections["Sample transcripts"] = _samples(run)
    config = _text(json.dumps(run.config, indent=2, ensure_ascii=False))
    config = f"<summary>Complete configuration</summary><pre>{config}</pre>"
    sections["Configuration"] = f"<details>{config}</details>"
    name = _text(run.path.resolve().name)
    notes = "".join(f"<li>{_text(note)}</li>" for note in s["notes"])
    notes = f'<ul class="notes">{notes}</ul>' if notes else ""
    body = f'<h1>Run {name}</h1><p class="lead">{_text(s["sentence"])}</p>{notes}'
    body += "".join(f"<h2>{title}</h2>{content}" for title, content in sections.items())
    return f"{_HEAD}<title>Run {name}</title><style>{_CSS}</style></head><body>{body}</body></html>"
