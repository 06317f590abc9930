"""What is installed: a wheel that works away from the repository, and FP8 numerics without [train].

The wheel is built with the setuptools that are here, and its packages are those of this
environment: nothing is downloaded.
"""

from __future__ import annotations

import configparser
import os
import pathlib
import subprocess
import sys
import sysconfig
import zipfile

import pytest

pytestmark = pytest.mark.slow
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_LIGHT = ("quant", "models", "rollout", "kernels", "rl", "learner", "sharding")
# Distributions of [train] whose modules are called otherwise; what Flax brings is there without it.
_MODULES = {"orbax-checkpoint": "orbax"}
_OF_FLAX = {"optax", "orbax", "rich", "scipy"}


def _run(*command: str, cwd: pathlib.Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """Built of what git knows, so that nothing that lies about gets into it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=_ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((_ROOT / name).read_bytes())
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(target))
    _run(sys.executable, *build, cwd=source, PATH=os.environ["PATH"])
    (path,) = target.glob("*.whl")
    return path


def test_what_is_in_the_wheel(wheel):
    """Every module, config and kernel, the marker of types, templates; no tests, docs or caches."""
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    for folder, package in (("fp8rl_jax", ""), ("configs", "configs/"), ("kernels", "kernels/")):
        here = {path.relative_to(_ROOT / folder) for path in (_ROOT / folder).rglob("*.py")}
        assert {f"fp8rl_jax/{package}{path}" for path in here} <= names
    assert "fp8rl_jax/py.typed" in names
    assert all(name.startswith("fp8rl_jax/") for name in names)
    assert {pathlib.Path(name).suffix for name in names} == {".html", ".py", ".typed"}
    assert not any("test" in pathlib.Path(name).parts for name in names)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
    """The bin directory of an environment with the wheel, and the other packages of this one."""
    venv = tmp_path_factory.mktemp("venv")
    _run(sys.executable, "-m", "venv", "--without-pip", str(venv), cwd=venv)
    paths = sysconfig.get_paths(vars={"base": str(venv), "platbase": str(venv)})
    pip = ("-m", "pip", "--python", str(venv / "bin/python"), "install", "--no-deps", "--no-index")
    _run(sys.executable, *pip, str(wheel), cwd=venv, PATH=os.environ["PATH"])
    # A plain directory: .pth files in it, such as that of an editable install, are not read.
    (pathlib.Path(paths["purelib"]) / "others.pth").write_text(sysconfig.get_path("purelib"))
    return venv / "bin"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("fp8rl --help", "train"),
        ("fp8rl --version", "fp8rl_jax 0."),
        ("fp8rl recipe list", "fp8_blockwise"),
        ("fp8rl plan --config tiny_arithmetic", "The train step fits"),
        ("fp8rl plan --config qwen3_8b --config.model.name=qwen3_8b", "An RL step takes"),
        ("python -m fp8rl_jax algo list", "grpo"),
        ("python -c 'import fp8rl_jax.kernels, fp8rl_jax as f; print(f.__file__)'", "VENV"),
        (
            "python -c 'from fp8rl_jax.configs import qwen3_8b; print(qwen3_8b.get_config().run)'",
            "runs/qwen3_8b",
        ),
    ],
)
def test_commands_away_from_the_repository(command, said, installed, tmp_path):
    """In an empty directory, with an empty home and no PYTHONPATH."""
    output = _run(
        "bash",
        "-c",
        command,
        cwd=tmp_path,
        HOME=str(tmp_path),
        JAX_PLATFORMS="cpu",
        PATH=f"{installed}:/usr/bin:/bin",
    )
    assert said.replace("VENV", str(installed.parent)) in output


def _of_train() -> set[str]:
    """Modules of the packages that [train] adds to a bare installation."""
    setup = configparser.ConfigParser()
    setup.read(_ROOT / "setup.cfg")
    lines = setup["options.extras_require"]["train"].split()
    names = {line.split(">")[0].split("<")[0] for line in lines}
    return {_MODULES.get(name, name.replace("-", "_")) for name in names} - _OF_FLAX


def test_numerics_without_train(tmp_path):
    """A dense layer in FP8, and imports, where the packages of [train] cannot be imported."""
    code = f"""
import importlib, sys
REFUSED = {_of_train()!r}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"refused: {{name}}", name=name)
sys.meta_path.insert(0, Refuse())
for room in {_LIGHT!r}:
    importlib.import_module(f"fp8rl_jax.{{room}}")
import flax.linen as nn, jax, jax.numpy as jnp
from fp8rl_jax.quant import make_dot_general
layer = nn.Dense(16, dot_general=make_dot_general("fp8"))
x = jnp.ones((8, 64))
params = jax.jit(layer.init)(jax.random.key(0), x)
print(jax.jit(layer.apply)(params, x).shape, len(REFUSED))
"""
    output = _run(
        sys.executable,
        "-c",
        code,
        cwd=tmp_path,
        PYTHONPATH=str(_ROOT),
        HOME=str(tmp_path),
        JAX_PLATFORMS="cpu",
        PATH=os.environ["PATH"],
    )
    assert output.startswith("(8, 16) ") and int(output.split()[-1]) > 10
