"""Computes the figures with which a report opens from the files of a run directory.

A figure that was not recorded is None, and "exactly 0" appears only if every recorded step is 0.0.
Times are medians over all steps but the first, which usually compiles; means of drift weight each
step by its `drift_tokens`. No jax is imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import LONGEST, parse_json, read_json
from fp8rl_jax.report.metrics import DRIFT_MAX, DRIFT_MEAN, GAP
from fp8rl_jax.report.verdicts import step_verdicts

TYPICAL = (
    "time_step",
    "time_rollout",
    "time_learner",
    "tokens_per_s_rollout",
    "tokens_per_s_learner",
)
MISSING = "not recorded"
_MOST_STEPS = 8  # most steps that a note names
_MOST_FLAT = 0.5  # share of groups without a gradient above which a note says so
# Culprits of drift whose advice is a field of the configuration.
_SET_BY_THE_USER = ("recipe", "layers", "kv", "scaling")
_MOST_KEYS = 10_000  # most keys of a record, which has about a hundred
_LARGEST_BITS = 1000  # most bits of an integer; a float's range ends at 1024
_TOKEN_MEANS = ("logprob_equal_frac", "token_mult_prob_error", "mismatch_kl", "tis_clipfrac")


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The files of one run directory; `notes` lists what was missing or unreadable."""

    path: pathlib.Path
    config: dict
    notes: list[str]
    sft: list[dict]
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
        """Steps whose drift was measured, on at least one token."""
        return [row for row in self.metrics if DRIFT_MAX in row and row.get("drift_tokens", 1)]

    @property
    def graded(self) -> bool:
        """Whether the mean of held-out rewards is not the share of right answers: there are other
        rewards than 0 and 1, or an environment gives sums over replies."""
        pairs = [(row.get("accuracy_sampled"), row.get("pass@1")) for row in self.eval]
        numbers = (int, float)
        return bool(self.field("env", "step")) or any(
            isinstance(mean, numbers) and isinstance(right, numbers) and abs(mean - right) > 1e-6
            for mean, right in pairs
        )

    def held_out(self, value: float | None) -> str:
        """Formats a mean of held-out rewards: a share as a percentage."""
        return number(value) if self.graded else share(value)

    @property
    def label(self) -> str:
        rollout, learner = (self.field("precision", k) or "?" for k in ("rollout", "learner"))
        return f"{rollout} rollout, {learner} learner"


def load_run(run_dir: str | os.PathLike) -> RunFiles:
    path = pathlib.Path(run_dir)
    if not os.path.lexists(path / "config.json"):
        fault = "has no config.json" if os.path.isdir(path) else "does not exist"
        raise UserError(f"Run directory {str(path)!r} {fault}; give one that a training run wrote.")
    try:
        config = {**read_json(path / "config.json")}
    except OSError as error:
        raise UserError(
            f"{str(path / 'config.json')!r} cannot be read ({error.strerror}): put the file back."
        ) from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{str(path / 'config.json')!r} must hold one JSON object.") from error
    notes: list[str] = []
    run = RunFiles(
        path,
        config,
        notes,
        sft=_read_rows(path / "sft.jsonl", notes),
        metrics=_read_rows(path / "metrics.jsonl", notes),
        eval=_read_rows(path / "eval.jsonl", notes),
        samples=_read_rows(path / "samples.jsonl", notes),
    )
    if run.field("sft", "steps") == "0":
        notes[:] = [note for note in notes if not note.startswith("sft.jsonl")]
    # The report shows the first of several held-out sets.
    first_set = run.eval[0].get("set") if run.eval else None
    run.eval[:] = [row for row in run.eval if row.get("set") == first_set]
    return run


def _read_rows(path: pathlib.Path, notes: list[str]) -> list[dict]:
    if not os.path.isfile(path):
        notes.append(f"{path.name} is missing.")
        return []
    rows = []
    bad = []  # numbers of lines
    count = 0
    try:
        for count, line in enumerate(_lines(path), start=1):
            try:
                rows.append(_row(parse_json(line.decode("utf-8", errors="replace"))))
            except ValueError:
                bad.append(count)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): fix its permissions.") from None
    if bad:
        last = ", the last one incomplete" if bad[-1] == count else ""
        notes.append(f"{path.name}: left out {len(bad)} of {count} lines{last}.")
    if not rows:
        notes.append(f"{path.name} holds no complete line.")
    kept = [row for row in rows if GAP not in row]
    if len(kept) < len(rows):
        notes.append(f"{path.name} has a gap: its records up to a checkpoint were lost.")
    return kept


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    """Yields the lines that are not blank; a line longer than LONGEST is cut, so it is no JSON."""
    with open(path, "rb") as file:
        while line := file.readline(LONGEST):
            rest = line
            while len(rest) == LONGEST and not rest.endswith(b"\n"):
                rest = file.readline(LONGEST)  # the rest of a line that is too long
            if line.strip():
                yield line


def _row(value: Any) -> dict:
    """Checks a record, and replaces integers that no float can hold by infinity.

    Raises:
      ValueError: it is no object, its step is no finite number, or its phase or set is no text.
    """
    if not isinstance(value, dict) or len(value) > _MOST_KEYS:
        raise ValueError("it is no record")
    for key, number in value.items():
        if isinstance(number, int) and number.bit_length() > _LARGEST_BITS:
            value[key] = math.inf if number > 0 else -math.inf
    step = value.get("step", 0)
    if not isinstance(step, int | float) or not abs(step) < 2**53:
        raise ValueError("its step is no number")
    if not all(isinstance(value.get(key, ""), str) for key in ("phase", "set")):
        raise ValueError("a name is no text")
    return value


def series(rows: Iterable[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values of `key` in the rows that have it; null (a written NaN) is NaN."""
    pairs = [(row.get("step", i), row.get(key, "")) for i, row in enumerate(rows)]
    pairs = [(s, v) for s, v in pairs if not isinstance(v, str | list | dict)]
    return np.array([s for s, _ in pairs], float), np.array([v for _, v in pairs], float)


def statistic(values: np.ndarray, reduce: Callable) -> float | None:
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        reduced = float(reduce(values)) if values.size else math.nan
    return reduced if math.isfinite(reduced) else None


def typical(rows: list[dict], key: str) -> float | None:
    """Returns the median over all steps but the first, which usually compiles."""
    return statistic(series(rows[1:], key)[1], np.median)


def _token_mean(rows: list[dict], key: str) -> float | None:
    rows = [row for row in rows if key in row]
    values = series(rows, key)[1]
    if not values.size or not np.isfinite(values).all():
        return None  # a mean that skips a NaN would flatter the run
    if (values == values[0]).all():
        return float(values[0])  # a weighted mean of ones may round to 1 - 1e-16
    weights = series(rows, "drift_tokens")[1]
    if len(weights) != len(values) or not 0 < weights.sum() < math.inf:
        return float(values.mean())
    return float(np.average(values, weights=weights))


def summarise(run_dir: str | os.PathLike) -> dict:
    """Returns the headline figures of a run; a figure that was not recorded is None.

    Args:
      run_dir: directory with config.json and, as far as the run got, sft.jsonl, metrics.jsonl,
        eval.jsonl and samples.jsonl.

    Returns:
      A dict that `json.dumps` accepts::

        sentence: the summary sentence of the report.
        task, seed, rollout_recipe, learner_recipe: from the config, as strings.
        sft_steps, rl_steps: lines read from sft.jsonl and metrics.jsonl.
        greedy, sampled: held-out accuracy (0 to 1), each a dict of `sft_end`, `sft_best`,
          `sft_best_step`, `last` (last evaluation of the RL phase) and `last_step`.
        questions: held-out questions of the last evaluation.
        reward_first, reward_last: mean reward over the first and the last tenth of the steps.
        drift_steps, drift_tokens: steps and response tokens whose log-probs were compared.
        drift_max, drift_mean: maximum and mean |dlogp|, nats; None too if a step's is not finite.
        drift_exactly_zero: whether the maximum is 0.0 at every compared step.
        steps_with_drift: number of compared steps whose maximum is not 0.0.
        logprob_equal_frac: share of bit-equal log-probs.
        token_mult_prob_error, mismatch_kl, tis_clipfrac: means over the compared tokens.
        time_step_first: seconds of the first step.
        time_step, time_rollout, time_learner, tokens_per_s_rollout, tokens_per_s_learner: seconds
          and rates, median without the first step.
        refit_checks, refit_failures, reward_errors, rollout_preemptions: counts over the run.
        notes: sentences on what is missing, unreadable or wrong.
        advice: a sentence on what to do about drift in a run that must have none, else None.

    Raises:
      ValueError: the directory does not exist, or its config.json is missing or not an object.
    """
    return summarise_files(load_run(run_dir))


def _accuracy(run: RunFiles, kind: str) -> dict:
    out = dict.fromkeys(("sft_end", "sft_best", "sft_best_step", "last", "last_step"))
    steps, values = series(run.phase("sft"), f"accuracy_{kind}")
    if np.isfinite(values).any():
        best = int(np.nanargmax(values))
        out |= {
            "sft_best": float(values[best]),
            "sft_best_step": int(steps[best]),
            "sft_end": statistic(values[-1:], np.max),
        }
    steps, values = series(run.phase("rl"), f"accuracy_{kind}")
    if np.isfinite(values[-1:]).any():
        out |= {"last": float(values[-1]), "last_step": int(steps[-1])}
    return out


def summarise_files(run: RunFiles) -> dict:
    rows = run.metrics
    compared = run.compared
    reward = series(rows, "reward_mean")[1]
    tenth = max(1, len(reward) // 10)
    drift_max = series(compared, DRIFT_MAX)[1]
    checks = series(rows, "refit_checksum_ok")[1]
    out: dict[str, Any] = {
        "task": run.field("env", "task"),
        "seed": run.field("run", "seed"),
        "rollout_recipe": run.field("precision", "rollout"),
        "learner_recipe": run.field("precision", "learner"),
        "sft_steps": len(run.sft),
        "rl_steps": len(rows),
        "greedy": _accuracy(run, "greedy"),
        "sampled": _accuracy(run, "sampled"),
        "questions": statistic(series(run.eval, "questions")[1][-1:], np.max),
        "reward_first": statistic(reward[:tenth], np.mean),
        "reward_last": statistic(reward[-tenth:], np.mean),
        "drift_steps": len(compared),
        "drift_tokens": statistic(series(compared, "drift_tokens")[1], np.sum),
        "drift_max": statistic(drift_max, np.max) if np.isfinite(drift_max).all() else None,
        "drift_mean": _token_mean(compared, DRIFT_MEAN),
        "drift_exactly_zero": bool((drift_max == 0).all()) if compared else None,
        "steps_with_drift": int((drift_max != 0).sum()),
        "time_step_first": statistic(series(rows, "time_step")[1][:1], np.max),
        "refit_checks": int(np.isfinite(checks).sum()),
        "refit_failures": int((checks == 0).sum()),
        "reward_errors": statistic(series(rows, "reward_errors")[1], np.sum),
        "rollout_preemptions": statistic(series(rows, "rollout_preemptions")[1], np.sum),
        **{key: _token_mean(compared, key) for key in _TOKEN_MEANS},
        **{key: typical(rows, key) for key in TYPICAL},
    }
    counts = ("questions", "drift_tokens", "reward_errors", "rollout_preemptions")
    out |= {key: int(out[key]) for key in counts if out[key] is not None}
    return {
        "sentence": _sentence(run, out),
        **out,
        "notes": run.notes + _warnings(run, out),
        "advice": _advice(run, out),
    }


def _warnings(run: RunFiles, s: dict) -> list[str]:
    notes = []
    for key in ("loss", "grad_norm", DRIFT_MEAN, DRIFT_MAX):
        rows = run.compared if key in (DRIFT_MEAN, DRIFT_MAX) else run.metrics
        steps, values = series(rows, key)
        if (bad := steps[~np.isfinite(values)]).size:
            notes.append(
                f"{key} is not finite at {steps_text(bad.size)}, first at step {bad[0]:.0f}."
            )
    if s["refit_failures"]:
        notes.append(f"The refit checksum failed at {steps_text(s['refit_failures'])}.")
    if _same_recipes(run) and s["steps_with_drift"]:
        notes.append(_drift_note(run, s))
    if s["reward_errors"]:
        notes.append(f"{s['reward_errors']} calls of rewards failed, and were left out.")
    flat = series(run.metrics, "group_zero_std_frac")[1]
    flat = flat[-max(1, len(flat) // 5) :]
    if (mean := statistic(flat, np.mean)) is not None and mean > _MOST_FLAT:
        notes.append(
            f"All rewards were equal in {share(mean)} of the groups of the last "
            f"{steps_text(len(flat))}: such a group gives no gradient (docs/guides/trouble.md)."
        )
    if count := s["rollout_preemptions"]:
        notes.append(
            f"Responses lost their pages and were computed anew {count:,} times: a larger "
            "rollout.pages or fewer rollout.slots would avoid it."
        )
    for key in keys_with(run.metrics, "fp8_nonfinite_blocks"):
        if count := statistic(series(run.metrics, key)[1], np.sum):
            notes.append(f"{key}: {count:.0f} blocks held NaN or infinity.")
    return notes


def _same_recipes(run: RunFiles) -> bool:
    """Returns whether both sides have the same forward pass: their recipes have equal names, or the
    run compared checksums of the weights, which it does only for recipes with equal forward passes.
    """
    equal_names = run.field("precision", "rollout") == run.field("precision", "learner")
    return equal_names or any("refit_checksum_ok" in row for row in run.metrics)


def _drift_note(run: RunFiles, s: dict) -> str:
    """Describes the drift of a run with equal recipes: the steps that drifted, the largest drift,
    and the analysed steps with their culprits."""
    compared = np.stack(series(run.compared, DRIFT_MAX))
    steps, values = compared[:, compared[1] != 0]
    named = [f"{step:.0f}" for step in steps[:_MOST_STEPS]]
    named += ["..."] * (len(steps) > _MOST_STEPS)
    worst = int(np.argmax(np.nan_to_num(values, nan=np.inf)))
    culprits = "; ".join(
        f"RL step {row['step']} ({row['culprit']})" for row in step_verdicts(run.path)
    )
    return (
        f"The recipes are equal, but there is drift at {len(steps)} of "
        f"{steps_text(s['drift_steps'])} (RL step{'s' * (len(steps) > 1)} {', '.join(named)}), the "
        f"largest {values[worst]:.3g} at RL step {steps[worst]:.0f}. Analysed: "
        f"{culprits or 'none of them'}."
    )


def _advice(run: RunFiles, s: dict) -> str | None:
    """Returns a sentence on what to do about drift in a run that must have none, or None."""
    reports = run.field("precision", "zero_drift") == "report"
    if not s["steps_with_drift"] or reports or not _same_recipes(run):
        return None
    verdicts = step_verdicts(run.path)
    verdict = max(verdicts, key=lambda row: row["drift"], default=None)
    if verdict and verdict["culprit"] in _SET_BY_THE_USER:
        return f"What to do: {verdict['advice']}."
    ways = [
        f"report it with {run.path}/drift.json"
        if verdicts
        else f"run `fp8rl drift --checkpoint {run.path}`, which names the operation"
    ]
    if device(run, "platform") == "cpu" and run.field("precision", "cpu_products") != "exact":
        ways.insert(
            0,
            "start again with --config.precision.cpu_products=exact and another run.dir, so that "
            "no order of summation can make drift",
        )
    return f"What to do: {', and '.join(ways)}."


def device(run: RunFiles, key: str) -> str | None:
    """Returns a value that the run's last start recorded about its devices (environment.json), or
    None."""
    try:
        return str(read_json(run.path / "environment.json")[-1]["devices"][key])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keys_with(rows: list[dict], prefix: str) -> list[str]:
    return sorted({key for row in rows for key in row if key.startswith(prefix)})


def steps_text(count: int) -> str:
    return f"{count:,} step" + "s" * (count != 1)


def number(value: float | None, unit: str = "") -> str:
    if value is None:
        return MISSING
    return (f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}") + unit


def near_one(value: float | None) -> str:
    """Formats a number as 1 only if it is exactly 1: 1.0000000003 reads 1 + 3e-10."""
    return number(value) if value is None or value == 1 else f"1 + {value - 1:.3g}"


def share(value: float | None) -> str:
    """Formats a share as a percentage that is 0 % or 100 % only if the value is exactly 0 or 1."""
    if value is None:
        return MISSING
    if 0 < value < 5e-4 or 1 - 5e-4 < value < 1:
        return f"{value * 100:.1g} %" if value < 0.5 else f"all but {(1 - value) * 100:.1g} %"
    if abs(value) >= 100:  # no share
        return f"{value * 100:.3g} %"
    return f"{value * 100:.1f}".removesuffix(".0") + " %"


def drift_text(s: dict) -> str:
    if s["drift_max"] is None:
        return "not finite" if s["drift_steps"] else MISSING
    return "0 exactly" if s["drift_exactly_zero"] else f"{s['drift_max']:.3g}"


def _sentence(run: RunFiles, s: dict) -> str:
    kinds = ("sampled", "greedy")
    parts = ["no held-out evaluation recorded"]
    names = {
        "sft_end": "the last SFT evaluation",
        "last": f"RL step {max(s[kind]['last_step'] or 0 for kind in kinds):,}",
    }
    ends = [k for k in names if any(s[kind][k] is not None for kind in kinds)]
    if ends:
        values = (f"{x} {' → '.join(run.held_out(s[x][k]) for k in ends)}" for x in kinds)
        where = " and at ".join(names[k] for k in ends)
        name = "mean held-out reward" if run.graded else "held-out accuracy"
        parts = [f"{name} at {where}: {', '.join(values)}"]
    if (best := s["greedy"])["sft_best"] is not None:
        parts[0] += (
            f" (best SFT evaluation {run.held_out(best['sft_best'])}, at step "
            f"{best['sft_best_step']:,})"
        )
    if s["drift_steps"]:
        equal = share(s["logprob_equal_frac"])
        equal = "" if equal == MISSING else f", {equal} of log-probs bit-equal"
        parts.append(
            f"drift over {number(s['drift_tokens'])} tokens of {steps_text(s['drift_steps'])}: "
            f"max |Δlogp| = {drift_text(s)}{equal}"
        )
    return (
        f"{s['task'] or 'unnamed task'}, seed {s['seed'] or MISSING}, {run.label}, "
        f"{steps_text(s['rl_steps'])} of RL: {'; '.join(parts)}."
    )
