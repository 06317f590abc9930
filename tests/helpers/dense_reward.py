"""Rewards that an untrained policy gets some of, as a user would write them."""


def share_of_even_bytes(prompt: str, response: str, answer: str) -> float:
    data = response.encode()
    return sum(byte % 2 == 0 for byte in data) / max(len(data), 1)


def an_eighth(prompt: str, response: str, answer: str) -> float:
    """1 for about one response in eight, so that most groups of four have equal rewards."""
    return float(sum(response.encode()) % 8 == 0)
