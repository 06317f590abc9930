"""The reward of launch/soak.py. It dawdles while the file that $SOAK_SLOW names is there."""

import os
import time


def share_of_even_bytes(prompt: str, response: str, answer: str) -> float:
    if os.path.exists(os.environ.get("SOAK_SLOW", "")):
        time.sleep(0.2)
    data = response.encode()
    return sum(byte % 2 == 0 for byte in data) / max(len(data), 1)
