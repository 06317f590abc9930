"""Files that are there whole or not at all."""

import pathlib
import resource

import pytest

from fp8rl_jax.base.whole_file import write_whole


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "state.json"
    write_whole(path, "old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, b"x" * 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_text_is_utf8(tmp_path):
    path = pathlib.Path(tmp_path / "page.html")
    write_whole(path, "\u00e9\ud800\n")
    assert path.read_bytes() == b"\xc3\xa9?\n"
