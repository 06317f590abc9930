"""Plots that are not drawn."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def quick(monkeypatch):
    """No plot is turned into an image, which takes long."""
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: None)
