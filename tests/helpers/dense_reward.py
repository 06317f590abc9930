"""Rewards that an untrained policy gets some of, as a user would write them."""

import os
import time


def share_of_even_bytes(prompt: str, response: str, answer: str) -> float:
    data = response.encode()
    return sum(byte % 2 == 0 for byte in data) / max(len(data), 1)


def share_at_leisure(prompt: str, response: str, answer: str) -> float:
    """`share_of_even_bytes`, slow while the file that $SOAK_SLOW names is there."""
    if os.path.exists(os.environ.get("SOAK_SLOW", "")):
        time.sleep(0.2)
    return share_of_even_bytes(prompt, response, answer)


def share_or_failure(prompt: str, response: str, answer: str) -> float:
    """`share_of_even_bytes`; fails while the file that $SOAK_FAILS names is there."""
    if os.path.exists(os.environ.get("SOAK_FAILS", "")):
        raise OSError("the server is down")
    return share_of_even_bytes(prompt, response, answer)


def an_eighth(prompt: str, response: str, answer: str) -> float:
    """1 for about one response in eight, so that most groups of four have equal rewards."""
    return float(sum(response.encode()) % 8 == 0)
