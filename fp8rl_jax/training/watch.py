"""What looks at the parts of an RL step while it runs: `fp8rl replay`."""

from __future__ import annotations

from typing import Any, Protocol


class Watch(Protocol):
    """Looks at the parts of RL steps; may end the run by an error."""

    def __call__(self, part: str, step: int, **values: Any) -> None:
        """Called behind a part of a step, with its values: 'sample' (`runtime`, `drawn`, and the
        `state` before it), 'reward' (`batch`, with advantages and weights), 'update' (`result`)."""


def unwatched(part: str, step: int, **values: Any) -> None:
    """The `Watch` of a run that nobody watches."""
