"""Guessing a number from 0 to 31: a conversation in which every reply tells more.

The policy guesses; the environment says ``<`` if the number is lower, ``>`` if it is higher. Who
halves what is left finds 31 of 32 numbers in five guesses. The demonstrations guess any number that
is left, and find about half of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from fp8rl_jax.envs.step import Step

_GAMES = 8192
_NUMBERS = 32
_GUESSES = 5


def questions() -> Iterator[dict[str, Any]]:
    """Yields rows: 'question', the game's number; 'answer'; 'demonstration', messages of a game."""
    drawn = random.Random(0)
    for game in range(_GAMES):
        number = drawn.randrange(_NUMBERS)
        shown: list[dict[str, str]] = []
        low = 0
        high = _NUMBERS - 1
        for _ in range(_GUESSES):
            guess = drawn.randint(low, high)
            shown.append({"role": "assistant", "content": str(guess)})
            said = _said(guess, number)
            if not said:
                break
            shown.append({"role": "tool", "content": said})
            if said == "<":
                high = guess - 1
            else:
                low = guess + 1
        else:
            shown.pop()  # nobody reads it
        yield {"question": f"game {game}", "answer": str(number), "demonstration": shown}


def step(state: None, reply: str, row: Mapping[str, Any]) -> Step:
    """Compares a guess with the row's answer: reward 1 and the end if it is right."""
    guess = reply.strip()
    if not guess.isdecimal() or len(guess) > 9:
        return Step(state, "?")
    said = _said(int(guess), int(row["answer"]))
    return Step(state, said, reward=float(not said), done=not said)


def _said(guess: int, number: int) -> str:
    return "<" if number < guess else ">" if number > guess else ""
