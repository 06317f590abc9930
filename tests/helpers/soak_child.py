"""`fp8rl` for soak.py: the clock jumps while it runs, if $SOAK_CLOCK is a seed."""

import os
import random
import time


def _jumping(clock, seed: str):
    draw = random.Random(seed)
    offset = [0.0]

    def jumping() -> float:
        if draw.random() < 0.01:
            offset[0] = draw.uniform(-1e6, 1e6)
        return clock() + offset[0]

    return jumping


if __name__ == "__main__":
    if seed := os.environ.get("SOAK_CLOCK"):
        time.time = _jumping(time.time, seed)
    from fp8rl_jax.cli import entry

    entry()
