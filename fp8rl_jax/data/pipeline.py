"""Order of examples: grain pipelines whose position is one number in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import grain


class Stream:
    """Endless shuffled batches of a sequence, exactly resumable.

    Every epoch has its own order, drawn from (seed, epoch). The position is the number of
    batches taken: a resumed stream gives the batch that would have come next.
    """

    def __init__(self, items: Sequence, batch_size: int, seed: int):
        self._data = (
            grain.MapDataset.source(items).seed(seed).shuffle().repeat().batch(
                batch_size, batch_fn=list
            )
        )  # fmt: skip
        self.position = 0

    def next(self) -> list:
        """The next batch."""
        batch = self._data[self.position]
        self.position += 1
        return batch
