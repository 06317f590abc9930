"""SIGTERM, SIGHUP and Ctrl-C during a run: it ends at the next step's end, with a checkpoint."""

from __future__ import annotations

import os
import signal

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupt:
    """Records signals from its first call to the end of its `with` block.

    A call returns the name of the signal that was received, or None. Before the first call, and at
    a second Ctrl-C, a signal ends the process at once. Signals that were ignored (`nohup`) stay
    ignored.
    """

    def __init__(self):
        self._received: str | None = None
        self._waits = False

    def __enter__(self) -> Interrupt:
        self._before = {
            number: signal.signal(number, self._note)
            for number in _SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __call__(self) -> str | None:
        self._waits = True
        return self._received

    def _note(self, number, frame) -> None:
        if self._waits and not (self._received and number == signal.SIGINT):
            self._received = signal.Signals(number).name
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def __exit__(self, *exc) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
