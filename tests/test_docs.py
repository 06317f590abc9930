"""Examples of the documents and of docstrings run, the documents name what there is, links lead
somewhere, the reference is complete, and the site builds."""

from __future__ import annotations

import datetime
import doctest
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib

import ema_policy
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.__main__ import COMMANDS as BENCHMARKS
from fp8rl_jax.cli.main import COMMANDS
from fp8rl_jax.config import FIELDS, all_fields
from fp8rl_jax.models.families import olmo
from fp8rl_jax.quant import recipe_names
from fp8rl_jax.quant.scaling import check_policy
from studies.__main__ import COMMANDS as STUDIES

_ROOT = pathlib.Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
_PAGES = [
    *_ROOT.glob("*.md"),
    *(path for path in _DOCS.rglob("*.md") if "_build" not in path.parts),
]
_TEXT = (_DOCS / "recipes.md").read_text()


def _examples(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.S)


_BLOCKS = _examples(_TEXT)


@pytest.fixture(scope="module")
def model_example() -> dict:
    """Names that the model example and the one after it leave behind, with the first loss."""
    names: dict = {}
    setup, loop = _BLOCKS[1].split("for _ in range(200):")
    exec(setup, names)
    first = float(names["step"](names["params"], names["state"])[2])
    exec("for _ in range(200):" + loop, names)
    return {**names, "first": first}


def test_policy_of_ten_lines():
    """The page's policy is at most ten lines, well-formed, and the one that the tests train."""
    names: dict = {}
    exec(_BLOCKS[0], names)
    assert len([line for line in _BLOCKS[0].splitlines() if line]) <= 10
    ours, tested = check_policy(names["ema"]()), ema_policy.ema()
    state = ours.init((2,))
    for amax in ([1.0, 0.0], [3.0, jnp.inf], [0.5, 2.0]):
        amax = jnp.asarray(amax)
        np.testing.assert_array_equal(
            ours.scale(state, amax, 448.0), tested.scale(state, amax, 448.0)
        )
        state, other = ours.update(state, amax), tested.update(state, amax)
        np.testing.assert_array_equal(state, other)


@pytest.mark.slow
def test_model_example_trains(model_example):
    """FP8 layers in a plain linen model: the loss falls by more than a half, with FP8's floor."""
    assert 1e-6 < float(model_example["loss"]) < 0.5 * model_example["first"]


@pytest.mark.slow
def test_stateful_example_runs(model_example):
    """States in a linen model and by hand: histories fill, scales follow."""
    names = dict(model_example)
    for block in _BLOCKS[2:]:
        exec(block, names)
    assert float(names["value"]) < 1.2  # about 1.5 at the start
    assert (names["scaling"]["Fp8DotGeneral_0"]["site"].site.weight.age == 0).all()
    for operand in ("weight", "activation", "gradient"):
        state = getattr(names["site"], operand).state
        assert (np.asarray(state["history"])[:3] > 0).all()
        assert not np.asarray(state["history"])[3:].any()
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(names["grad"]))


def _run_page(page: str) -> dict:
    """Names that the examples of a page leave behind, run in their order."""
    names: dict = {}
    for block in _examples((_ROOT / "docs" / page).read_text()):
        exec(block, names)
    return names


def test_concepts_examples(capsys):
    """What the pages say that the examples print."""
    _run_page("concepts/drift.md")
    assert capsys.readouterr().out.split("\n")[:2] == ["0.0 1.0", "[1.    1.125]"]
    _run_page("concepts/fp8.md")
    assert capsys.readouterr().out.startswith("[[1.5 72 -448 0]] [[0.00669643]]")


def test_environments_of_other_systems():
    """The page's wrappers: a class in TRL's form, and one in that of verifiers 0.2."""
    *_, trl, verifiers, _ = _examples((_ROOT / "docs/guides/conversations.md").read_text())
    names: dict = {}
    exec(trl, names)
    exec(verifiers, names)
    call = '<tool_call>{"name": "add", "arguments": {"amount": 3}}</tool_call>'
    first = names["counter_step"](None, call, {"answer": "6"})
    second = names["counter_step"](first.state, call, {"answer": "6"})
    assert (first.observation, second.observation, second.done) == ("3", "6", False)
    assert first.state.total == 3, "a step does not change the state that it is given"
    last = names["counter_step"](second.state, "six", {"answer": "6"})
    assert last.done and last.reward == 1.0

    class Game:
        async def setup_state(self, state):
            state["secret"] = state["answer"]

        async def env_response(self, messages, state, **options):
            said = [{"role": "user", "content": f"{len(messages)} messages"}]
            if messages[-1]["content"] == state["secret"]:
                state["final_env_response"] = said
            return said

    step, row = names["of_verifiers"](Game(), 3), {"question": "a or b?", "answer": "b"}
    found = step(None, "a", row)
    assert (found.observation, found.done, found.state["turn"]) == ("2 messages", False, 1)
    last = step(found.state, "b", row)
    assert (last.observation, last.done, found.state["turn"]) == ("4 messages", True, 1)
    assert step(step(found.state, "c", row).state, "c", row).done, "three replies at most"


def test_policy_guide():
    """A recipe with the page's policy, from Python: the state follows the amax."""
    names = _run_page("guides/policy.md")
    np.testing.assert_array_equal(
        names["site"].activation.state, jnp.abs(names["x"].astype(jnp.bfloat16)).max()[None, None]
    )


def test_family_guide(capsys):
    """The page's family is the library's, and its row of the table of arrays is one."""
    names = _run_page("guides/family.md")
    family, *_ = _examples((_ROOT / "docs/guides/family.md").read_text())
    assert pathlib.Path(olmo.__file__).read_text().endswith(family)
    assert names["OLMO2"].presets == olmo.OLMO2.presets
    assert capsys.readouterr().out == "hidden keys linear self_attn.k_proj.weight True\n"


@pytest.mark.slow
def test_flax_guide():
    """Delayed scaling through the layers of a linen model: the loss falls, states move."""
    names = _run_page("guides/flax.md")
    assert names["losses"][-1] < 0.1 * names["losses"][0]
    for layer in ("layers_0", "layers_2"):
        (scaling,) = names["scaling"][layer].values()
        assert float(scaling["site"].site.gradient.state["amax"].min()) > 0


def test_reward_guide():
    """The page's reward pays what its docstring says."""
    names: dict = {}
    exec(
        next(
            b for b in _examples((_ROOT / "docs/guides/reward.md").read_text()) if "def score" in b
        ),
        names,
    )
    assert [names["score"](text, "7") for text in (" 7", "8", "seven")] == [1.0, 0.1, 0.0]


def _anchors(text: str) -> set[str]:
    """Anchors of the headings, as Git hosts make them."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_links_lead_somewhere():
    """Relative links name files that exist, and headings that the files have."""
    broken = []
    for page in _PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if ":" in path:
                continue
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in _anchors(file.read_text())):
                broken.append(f"{page.relative_to(_ROOT)}: {target}")
    assert not broken


def test_tables_name_what_there_is():
    for name in recipe_names():
        assert f"`{name}`" in _TEXT, name
    for name in re.findall(r"`precision\.(\w+)`", _TEXT):
        assert name in FIELDS["precision"], name


def test_documents_name_files_and_tests_that_exist():
    """Paths are from the root, the package or the tests; a bare name is unique enough to find."""
    bases = (_ROOT, _ROOT / "fp8rl_jax", _ROOT / "tests", _ROOT / "tests" / "kernels")
    folders = [
        _ROOT / name for name in ("fp8rl_jax", "kernels", "tests", "docs", "configs", "launch")
    ]
    names = {path.name for folder in folders for path in folder.rglob("*.*")}
    missing = []
    for page in _PAGES:
        if page.name == "CHANGELOG.md":  # history
            continue
        text = page.read_text()
        for path, test in re.findall(
            r"`(?:\w+=\S+ )*(?:python |bash )?((?:\w+/)*\w+\.(?:py|sh)\b)(?:::(\w+))?", text
        ):
            if path.startswith("my_"):
                continue
            files = [base / path for base in (*bases, page.parent) if (base / path).is_file()]
            known = bool(files) if "/" in path else bool(files) or path in names
            if not known or (test and f"def {test}(" not in files[0].read_text()):
                missing.append(f"{page.name}: {path} {test}")
    assert not missing


@pytest.fixture(scope="module")
def generated():
    """{page of the reference: its Markdown with what is generated from the code}."""
    sys.path.insert(0, str(_DOCS / "_ext"))
    try:
        generate = importlib.import_module("generated").generate
        yield {page: generate(page.read_text()) for page in _DOCS.glob("reference/**/*.md")}
    finally:
        sys.path.remove(str(_DOCS / "_ext"))


def test_reference_has_every_public_name_with_a_docstring(generated):
    """Every name that a public package or module offers is on a page."""
    api = importlib.import_module("api")
    public = (
        "api base.errors base.exact_jit config data drift envs kernels learner models quant report "
        "rl rollout sharding"
    )
    pages = "\n".join(generated.values())
    for package in (f"fp8rl_jax.{name}" for name in public.split()):
        module = importlib.import_module(package)
        assert inspect.getdoc(module), package
        for name in api.public_names(package):
            value = getattr(module, name)
            if api.is_constant(value):
                assert f"`{name}`" in pages and api.comment(package, name), f"{package}.{name}"
            else:
                text = inspect.getdoc(value) or ""
                assert f":: {package}.{name}\n" in pages, f"{package}.{name}"
                assert text and not text.startswith(f"{name}("), f"{package}.{name}: no docstring"


def test_reference_has_every_field_command_and_result(generated):
    pages = {page.stem: text for page, text in generated.items()}
    for name, field in all_fields().items():
        assert f"`{name}`" in pages["configuration"], name
        assert all(repr(choice) in pages["configuration"] for choice in field.choices), name
    for name in COMMANDS:
        assert f"## fp8rl {name}\n" in pages["commands"], name
    assert "`--fail-above` `X`" in pages["commands"]
    assert "`train_rollout_logprob_abs_diff_max`" in pages["metrics"]
    assert "`bash launch/cpu_zoo.sh`" in pages["measurements"]


def test_results_are_complete_and_name_what_there_is():
    """docs/results.toml; whether a result is old is for docs/scripts/stale_results.py to say."""
    for result in tomllib.loads((_DOCS / "results.toml").read_text())["result"]:
        name, command = result["name"], result["command"].split()
        assert set(result) == {
            "name",
            "page",
            "command",
            "measures",
            "commit",
            "cpu",
            "jax",
            "date",
        }, name
        assert all(result.values()), name
        assert re.fullmatch("[0-9a-f]{7}|not recorded", result["commit"]), name
        if result["date"] != "not recorded":
            datetime.date.fromisoformat(result["date"])
        for path in ("docs/" + result["page"], *result["measures"]):
            assert (_ROOT / path).is_file(), f"{name}: {path}"
        if command[0] == "fp8rl":
            assert command[1] in COMMANDS or " ".join(command[1:3]) in COMMANDS, name
        beside = {"studies": STUDIES, "benchmarks": BENCHMARKS}
        study = command[:2] == ["python", "-m"] and command[2] in beside
        assert not study or command[3] in beside[command[2]], name
        files = [word for word in command if re.fullmatch(r"[\w/]+\.(py|sh)", word)]
        assert files or study or command[0] == "fp8rl", name
        assert all((_ROOT / file).is_file() for file in files), name


_WITH_EXAMPLES = [
    path
    for folder in ("fp8rl_jax", "kernels")
    for path in sorted((_ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("path", _WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_of_docstrings(path):
    parts = path.relative_to(_ROOT).with_suffix("").parts
    module = importlib.import_module(
        ".".join(parts if parts[0] == "fp8rl_jax" else ("fp8rl_jax", *parts))
    )
    failed, tried = doctest.testmod(module)
    assert tried and not failed


@pytest.mark.slow
def test_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    for package in ("sphinx", "furo", "myst_nb", "sphinx_copybutton"):
        pytest.importorskip(package, reason="extra [docs] is not installed")
    sphinx = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-b", "html"]
    built = subprocess.run([*sphinx, _DOCS, tmp_path], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(_PAGES) - 3  # README, CHANGELOG and CONTRIBUTING are no pages
    for page in pages:
        remote = r"<(?:script|img|iframe)[^>]* src=.https?:|<link[^>]*stylesheet[^>]*href=.https?:"
        assert not re.search(remote, page.read_text()), page
    assert "saturated" in (tmp_path / "searchindex.js").read_text()
