"""Which published results are old: how often the code that they measure has changed since.

    python docs/scripts/stale_results.py

Reads docs/results.toml and the git history. Prints a line for each result, most changes first:
commits since the result's own that touched one of its `measures`. Such a commit need not change the
result; the number says which to make again first. Results of an unknown commit come last.
"""

from __future__ import annotations

import pathlib
import subprocess
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def commits_since(result: dict) -> int | None:
    """Commits after the result's that changed a file that it measures; None if it is unknown."""
    span = f"{result['commit']}..HEAD"
    command = ["git", "-C", ROOT, "rev-list", "--count", span, "--", *result["measures"]]
    found = subprocess.run(command, capture_output=True, text=True)
    return int(found.stdout) if found.returncode == 0 else None


def main() -> None:
    results = tomllib.loads((ROOT / "docs" / "results.toml").read_text())["result"]
    counted = [(commits_since(result), result) for result in results]
    counted.sort(key=lambda pair: -1 if pair[0] is None else pair[0], reverse=True)
    print(f"{'commits since':>13}  {'commit':8}  {'date':12}  result")
    for count, result in counted:
        shown = "unknown" if count is None else count
        commit = result["commit"] if count is not None else "-"
        print(f"{shown:>13}  {commit:8}  {result['date']:12}  {result['name']} ({result['page']})")


if __name__ == "__main__":
    main()
