"""Products of two numbers, and a tool that multiplies.

Half of the demonstrations call the tool and repeat what it says, half answer at once, which a small
model cannot do for numbers that it has not seen. It has to find out what pays.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

_ROWS = 8192


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
      a: the first number.
      b: the second number.

    Returns:
      The product.
    """
    return a * b


TOOLS = [multiply]


def questions() -> Iterator[dict[str, Any]]:
    """Yields rows of distinct questions: 'question', 'answer', 'demonstration' (messages)."""
    drawn = random.Random(0)
    pairs = [(a, b) for a in range(11, 150) for b in range(11, 150)]
    for a, b in drawn.sample(pairs, _ROWS):
        product = str(a * b)
        shown = [{"role": "assistant", "content": product}]
        if drawn.random() < 0.5:
            call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
            shown = [
                {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
                {"role": "tool", "content": product},
                *shown,
            ]
        yield {"question": f"{a} * {b}", "answer": product, "demonstration": shown}
