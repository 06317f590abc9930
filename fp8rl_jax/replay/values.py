"""The values of a step by name, and a table of one sample."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fp8rl_jax.base.errors import UserError


def arrays_of(values: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of a step, as far as it was run: P questions, G responses each, B = P * G.

    'prompts' (P, T), 'prompt_lengths' (P,); 'tokens', 'mask', 'logprobs', 'versions' (B, R),
    'finished' (B,); 'rewards' (P, G), 'rewards/NAME', 'turns' (B, K). From the part 'reward' on:
    'advantages', 'weights', 'old_logprobs', 'ref_logprobs' (B, R). After the update:
    'learner_logprobs' (N, R), those of the first update.
    """
    samples = values["drawn"].samples
    found: dict[str, Any] = {
        "prompts": samples.prompts.tokens,
        "prompt_lengths": samples.prompts.lengths,
        "versions": samples.versions,
        "rewards": samples.rewards,
        "turns": samples.turns,
        **{name: getattr(samples.rollout, name) for name in ("tokens", "mask", "logprobs")},
        "finished": samples.rollout.finished,
        **{f"rewards/{name}": array for name, array in samples.by_name.items()},
    }
    if "batch" in values:
        names = ("advantages", "weights", "old_logprobs", "ref_logprobs")
        found |= {name: getattr(values["batch"], name) for name in names}
    if "result" in values:
        found["learner_logprobs"] = values["result"].update.logp
    return {name: np.asarray(jax.device_get(x)) for name, x in found.items() if x is not None}


def sample_table(values: dict[str, Any], number: int) -> list[str]:
    """Returns lines that show one sample: its question, its reward, and for each token its text,
    both log-probabilities, advantage and weight.

    Raises:
      UserError: the step has no such sample.
    """
    samples = values["drawn"].samples
    count = len(samples.versions)
    if number >= count:
        raise UserError(f"--sample is {number}, and the step has samples 0 to {count - 1}")
    arrays = arrays_of(values)
    group = samples.rewards.shape[1]
    question = samples.questions[number // group]
    lines = [
        f"sample {number}: response {number % group} to {question.prompt!r}",
        f"reward {samples.rewards.reshape(-1)[number]:g}",
    ]
    columns = [
        name
        for name in ("logprobs", "learner_logprobs", "advantages", "weights")
        if name in arrays and len(arrays[name]) > number
    ]
    lines.append("  ".join(["place", "   token", *(f"{name:>16}" for name in columns), "text"]))
    tokenizer = values["runtime"].tokenizer
    for place in np.flatnonzero(arrays["mask"][number]):
        token = int(arrays["tokens"][number, place])
        shown = [f"{arrays[name][number, place]:16.9g}" for name in columns]
        text = repr(tokenizer.decode([token]))
        lines.append("  ".join([f"{place:5}", f"{token:8}", *shown, text]))
    return lines
