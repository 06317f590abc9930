"""The record of a stack on which the tests of zero drift on a GPU have held."""

from __future__ import annotations

import pytest

from fp8rl_jax.kernels import machine
from fp8rl_jax.models import proven


def test_comments_are_no_code(tmp_path):
    """Comments and docstrings leave a digest as it is; a number does not."""
    versions = {
        "plain": "def f(x):\n    return x + 1\n",
        "told": '"""A module."""\n\n\ndef f(x):\n    """Adds."""\n    return x + 1  # one\n',
        "other": "def f(x):\n    return x + 2\n",
    }
    found = {}
    for name, text in versions.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.py").write_text(text)
        found[name] = proven.digest_of(tmp_path / name)
    assert found["plain"] == found["told"] != found["other"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "user_cache", lambda: tmp_path)
    return tmp_path


def test_a_proof_is_of_one_stack(cache, monkeypatch):
    """What held here is accepted here, until a version or the kernels change."""
    assert not proven.is_proven()
    assert proven.keep_proof({"date": "today"}).parent == cache
    assert proven.is_proven()
    monkeypatch.setattr(proven, "stack", lambda: {"device": "another"})
    assert not proven.is_proven()


def test_without_a_cache_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(machine, "user_cache", lambda: None)
    assert proven.keep_proof({}) is None and not proven.is_proven()
