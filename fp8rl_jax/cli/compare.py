"""`fp8rl compare`: which of several policies answers the same questions better, and how sure that
is."""

from __future__ import annotations

import argparse

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import (
    ALLOW_IMPORT,
    Command,
    a_path,
    argument,
    keep_programs,
    note,
    whole,
    writable,
    writing,
)


def _compare(values: argparse.Namespace) -> int:
    settings = [[run for run in word.split(",") if run] for word in values.settings]
    if len(settings) < 2 or not all(settings):
        raise UserError(
            "fp8rl compare: write `fp8rl compare RUN_DIR OTHER_RUN_DIR`, or of several seeds "
            "`fp8rl compare RUN_DIR,RUN_DIR OTHER_RUN_DIR,OTHER_RUN_DIR`"
        )
    out = writable("fp8rl compare", values.out) if values.out else None
    keep_programs()
    from fp8rl_jax.base.json_file import strict_json
    from fp8rl_jax.bench.table import text_table
    from fp8rl_jax.policy.compare import compare
    from fp8rl_jax.report.compared import comparison_meaning, comparison_table, write_comparison

    fields = {"questions": values.questions, "samples": values.samples}
    given = {name: value for name, value in fields.items() if value is not None}
    rows = compare(settings, given, values.allow_import, note)
    print(*text_table(comparison_table(rows)), comparison_meaning(rows), sep="\n")
    if out:
        with writing("fp8rl compare", out):
            (out / "compare.json").write_text(strict_json(rows) + "\n")
            print(write_comparison(out, rows))
    return 0


COMPARE = Command(
    "compare",
    "accuracy of policies on the same questions with the same random numbers, in pairs",
    _compare,
    (
        argument(
            "settings",
            "directories of runs, or of Hugging Face models behind them; runs of one setting with "
            "several seeds with commas, in the order of the seeds",
            "RUN_DIR[,...]",
            nargs="*",
            type=a_path,
        ),
        argument("--questions", "number of held-out questions", "N", type=whole(1)),
        argument("--samples", "sampled answers per question", "N", type=whole(1)),
        argument("--out", "write compare.json and compare.html to this directory", "DIR"),
        ALLOW_IMPORT,
    ),
    starts="loads each policy, compiles and answers the questions; a minute or more for each",
)
