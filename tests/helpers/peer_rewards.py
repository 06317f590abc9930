"""What the scorers of TRL, verl and math-verify pay for the pairs of tests/envs/rewards/pairs.json.

    python tests/helpers/peer_rewards.py     prints them; with --write records them in the file

Needs an environment with trl, verl and math-verify (trl's and verl's dependencies are not needed:
`pip install --no-deps trl verl`, beside transformers). Versions are recorded with the scores.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable

FILE = pathlib.Path(__file__).parents[1] / "envs/rewards/pairs.json"
PEERS = ("math-verify", "trl", "verl math_verify", "verl math", "verl gsm8k")
_PACKAGES = ("math-verify", "trl", "verl")


def _of_verl(name: str):
    """A module of verl's scorers by its file: importing verl needs much that scoring does not."""
    package = importlib.util.find_spec("verl")
    assert package is not None and package.submodule_search_locations
    (folder,) = package.submodule_search_locations
    path = pathlib.Path(folder, "utils/reward_score", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scorers() -> dict[str, Callable[[str, str], float | None]]:
    """Of an answer and a response, by the names of PEERS; None says 'not scored'.

    Raises:
      ImportError: a peer is not installed.
    """
    import math_verify
    from trl.rewards import accuracy_reward

    if importlib.util.find_spec("verl") is None:
        raise ImportError("verl is not installed")
    verify, math, gsm8k = map(_of_verl, ("math_verify", "math_reward", "gsm8k"))

    def by_trl(answer: str, response: str) -> float | None:
        return accuracy_reward([[{"role": "assistant", "content": response}]], [answer])[0]

    def alone(answer: str, response: str) -> float | None:
        return float(math_verify.verify(math_verify.parse(answer), math_verify.parse(response)))

    return {
        "math-verify": alone,
        "trl": by_trl,
        # What its pool of processes calls, here.
        "verl math_verify": lambda a, r: verify._verify_in_subprocess(rf"\boxed{{{a}}}", r),
        "verl math": lambda a, r: math.compute_score(r, a),
        "verl gsm8k": lambda a, r: float(gsm8k.compute_score(r, a)),
    }


def main(arguments: list[str]) -> None:
    content = json.loads(FILE.read_text())
    found = scorers()
    for pair in content["pairs"]:
        pair["peers"] = [found[name](pair["answer"], pair["response"]) for name in PEERS]
    content["versions"] = {name: importlib.metadata.version(name) for name in _PACKAGES}
    lines = ",\n".join("  " + json.dumps(pair, ensure_ascii=False) for pair in content["pairs"])
    head = json.dumps({k: v for k, v in content.items() if k != "pairs"}, ensure_ascii=False)
    text = f'{head[:-1]}, "pairs": [\n{lines}\n]}}\n'
    if "--write" in arguments:
        FILE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
