"""A reward that an untrained policy gets some of, as a user would write one."""


def share_of_even_bytes(prompt: str, response: str, answer: str) -> float:
    data = response.encode()
    return sum(byte % 2 == 0 for byte in data) / max(len(data), 1)
