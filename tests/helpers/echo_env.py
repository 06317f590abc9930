"""An environment for an untrained policy: what it says depends on all that was said."""

from __future__ import annotations

import hashlib
import os
import time

from fp8rl_jax.envs import Step


def step(state: str | None, reply: str, row: dict) -> Step:
    """Says up to six digits and pays for even bytes; ends one in ten episodes. Slow by chance while
    the file that $ECHO_SLOW names is there."""
    digest = hashlib.sha256(repr((state, reply, row["question"])).encode()).hexdigest()
    chance = [int(digit, 16) for digit in digest]
    if os.path.exists(os.environ.get("ECHO_SLOW", "")):
        time.sleep(0.01 * chance[0])
    data = reply.encode()
    reward = sum(byte % 2 == 0 for byte in data) / max(len(data), 1)
    return Step(digest, digest[: chance[1] % 7], reward, done=chance[2] == 0 and chance[3] > 5)


def ends_at_once(state: None, reply: str, row: dict) -> Step:
    """Takes every reply for the answer."""
    return Step(None, done=True)


def broken(state: None, reply: str, row: dict) -> Step:
    """Fails for about one reply in twenty."""
    if hashlib.sha256(reply.encode()).digest()[0] < 12:
        raise ValueError("an unlucky reply")
    return step(state, reply, row)
