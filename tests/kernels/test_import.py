"""`fp8rl_jax.kernels` is found from a checkout, an editable installation and a wheel alike.

The directory stands at the root of the repository, and the top-level name `kernels` is another
project's: no installation may claim it.
"""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import fp8rl_jax

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SETUPTOOLS = 77  # the first major version that pyproject.toml allows
_SHOW = """
import importlib.util
import fp8rl_jax
from fp8rl_jax.kernels import block_matmul
import fp8rl_jax.kernels.reference
from fp8rl_jax import kernels
import fp8rl_jax.quant
assert kernels is fp8rl_jax.kernels and kernels.block_matmul is block_matmul
print(fp8rl_jax.__file__)
print(kernels.__file__)
print(kernels.reference.__file__)
print(importlib.util.find_spec("kernels"))
"""


def _run(command: list, directory: pathlib.Path, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    process = subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def _libraries() -> list[str]:
    """Where JAX and the others are, without the hooks of a possible editable installation."""
    return [p for p in sys.path if pathlib.Path(p).name in ("site-packages", "dist-packages")]


def _show(paths: list, directory: pathlib.Path) -> list[str]:
    """Files of the package, of kernels and of kernels.reference, and what `kernels` is.

    A new interpreter without site (-S): its path is `paths` and the libraries, nothing else.
    """
    path = [*map(str, paths), *_libraries()]
    code = f"import sys\nsys.path[:0] = {path!r}\n{_SHOW}"
    return _run([sys.executable, "-S", "-P", "-c", code], directory).split("\n")[:4]


def _checkout(copy: pathlib.Path) -> pathlib.Path:
    """Copies what a build needs."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("fp8rl_jax", "configs", "kernels"):
        shutil.copytree(_ROOT / name, copy / name, ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (_ROOT / name).is_file():
            shutil.copy(_ROOT / name, copy)
    return copy


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    """A checkout of the test's own."""
    return _checkout(tmp_path / "checkout")


@pytest.fixture(scope="module")
def build_path(tmp_path_factory) -> str:
    """PYTHONPATH under which setuptools is new enough to build the package."""
    if not importlib.util.find_spec("pip"):
        pytest.skip("pip is not installed")
    try:
        if int(importlib.metadata.version("setuptools").split(".")[0]) >= _SETUPTOOLS:
            return ""
    except importlib.metadata.PackageNotFoundError:
        pass
    target = tmp_path_factory.mktemp("setuptools")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    process = subprocess.run([*command, f"setuptools>={_SETUPTOOLS}"], capture_output=True)
    if process.returncode:
        pytest.skip(f"setuptools>={_SETUPTOOLS} is neither installed nor to be had")
    return str(target)


def _pip(*arguments, directory: pathlib.Path, build_path: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    _run(command, directory, PYTHONPATH=build_path)


@pytest.fixture(scope="module")
def wheel(build_path, tmp_path_factory) -> pathlib.Path:
    """The wheel of a checkout that is gone by the time it is used."""
    place = tmp_path_factory.mktemp("wheel")
    checkout = _checkout(place / "checkout")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", place / "dist"]
    _pip("wheel", *options, checkout, directory=place, build_path=build_path)
    shutil.rmtree(checkout)
    (path,) = (place / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def editable(build_path, tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """(Python of a virtual environment, the checkout installed there with `pip install -e`)."""
    place = tmp_path_factory.mktemp("editable")
    checkout, python = _checkout(place / "checkout"), place / "venv" / "bin" / "python"
    _run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], place)
    purelib = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], place)
    # a path in a .pth file is not searched for .pth files itself
    pathlib.Path(purelib.strip(), "libraries.pth").write_text("\n".join(_libraries()) + "\n")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--editable"]
    arguments = ["--python", python, "install", *options, checkout]
    _pip(*arguments, directory=place, build_path=build_path)
    return python, checkout


def test_bare_checkout(checkout, tmp_path):
    """The parent directory on the path is enough; kernels are those beside the package."""
    package, kernels, reference, _ = _show([checkout], tmp_path)
    assert package == str(checkout / "fp8rl_jax" / "__init__.py")
    assert kernels == str(checkout / "kernels" / "__init__.py")
    assert reference == str(checkout / "kernels" / "reference" / "__init__.py")


def test_broken_kernels_are_named(checkout, tmp_path):
    """An error inside kernels is shown as itself, and a second import does not half-succeed."""
    (checkout / "kernels" / "reference" / "__init__.py").write_text(
        "raise RuntimeError('broken here')\n"
    )
    code = (
        f"import sys\nsys.path[:0] = {[str(checkout), *_libraries()]!r}\n"
        "for _ in range(2):\n"
        "    try:\n        import fp8rl_jax.kernels\n"
        "    except RuntimeError as error:\n        print(error)\n"
    )
    output = _run([sys.executable, "-S", "-P", "-c", code], tmp_path)
    assert output.split("\n")[:2] == ["broken here", "broken here"]


def test_without_triton(tmp_path):
    """Nothing that runs on a CPU imports Triton or the kernels that need it."""
    code = (
        f"import sys\nsys.path[:0] = {[str(_ROOT), *_libraries()]!r}\n"
        "sys.modules |= {'triton': None, 'jax_triton': None}  # importing them fails\n"
        "import fp8rl_jax.train, fp8rl_jax.cli.main\n"
        "from fp8rl_jax.kernels import triton_installed\n"
        "print([name for name in sys.modules if name.startswith('fp8rl_jax.kernels.gpu')])\n"
    )
    assert _run([sys.executable, "-S", "-P", "-c", code], tmp_path) == "[]\n"


@pytest.mark.slow
def test_editable_installation(editable, tmp_path):
    """Both packages come from the checkout; `kernels` is no name of its own."""
    python, checkout = editable
    package, kernels, reference, other = _run([python, "-c", _SHOW], tmp_path).split("\n")[:4]
    assert package == str(checkout / "fp8rl_jax" / "__init__.py")
    assert kernels == str(checkout / "kernels" / "__init__.py")
    assert reference == str(checkout / "kernels" / "reference" / "__init__.py")
    if not any(pathlib.Path(path, "kernels").exists() for path in _libraries()):
        assert other == "None"
    assert (python.parent / "fp8rl").is_file()


def test_second_checkout_beside_an_editable_installation(editable, checkout, tmp_path):
    """A checkout that is first on the path brings its own kernels: two are never mixed."""
    python, _ = editable
    package, kernels, reference, _ = _run(
        [python, "-c", _SHOW], tmp_path, PYTHONPATH=str(checkout)
    ).split("\n")[:4]
    assert package == str(checkout / "fp8rl_jax" / "__init__.py")
    assert kernels == str(checkout / "kernels" / "__init__.py")
    assert reference == str(checkout / "kernels" / "reference" / "__init__.py")


def test_wheel(wheel, build_path, tmp_path):
    """The installed files alone are enough."""
    site = tmp_path / "site"
    options = ["--no-deps", "--no-index", "--target", site]
    _pip("install", *options, wheel, directory=tmp_path, build_path=build_path)
    package, kernels, reference, _ = _show([site], tmp_path)
    assert package == str(site / "fp8rl_jax" / "__init__.py")
    assert kernels == str(site / "fp8rl_jax" / "kernels" / "__init__.py")
    assert reference == str(site / "fp8rl_jax" / "kernels" / "reference" / "__init__.py")
    code = f"import sys\nsys.path.insert(0, {str(site)!r})\nimport kernels"
    with pytest.raises(AssertionError, match="No module named 'kernels'"):
        _run([sys.executable, "-S", "-P", "-c", code], tmp_path)


def test_wheel_holds_the_library_and_nothing_else(wheel):
    """Every source file once, under one top-level name; metadata beside it."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (scripts,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        entry, fields = archive.read(scripts).decode(), archive.read(metadata).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fp8rl_jax"}
    expected = set()
    for folder, prefix in (("fp8rl_jax", "fp8rl_jax"), ("kernels", "fp8rl_jax/kernels")):
        files = (p for p in (_ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)
        expected |= {f"{prefix}/{p.relative_to(_ROOT / folder).as_posix()}" for p in files}
    assert {name for name in names if name.startswith("fp8rl_jax/")} >= expected
    assert "fp8rl = fp8rl_jax.cli:entry" in entry
    assert "Requires-Python: >=3.11" in fields
    assert "Requires-Dist: jax<0.12,>=0.10.2" in fields
    assert f"Version: {fp8rl_jax.__version__}\n" in fields
    assert wheel.name.endswith("-py3-none-any.whl")
