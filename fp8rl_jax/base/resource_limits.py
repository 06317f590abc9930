"""Limits of what a process may use, for programs that run what others have written."""

import resource


def limit(kind: int, value: int) -> None:
    """Limits this process to `value` of a kind such as `resource.RLIMIT_CPU`, or to what it is
    limited to already, if that is less."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
