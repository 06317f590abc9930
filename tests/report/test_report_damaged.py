"""Reports of runs whose files lack something, or hold what they must not."""

import base64
import os
import re
from xml.etree import ElementTree

import pytest
from fuzz import time_limit
from report_run import CONFIG, make_run, metrics_row, plots_of, read_page

from fp8rl_jax import report
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.report import summary

_HOSTILE = "</svg><script>alert(1)</script>--><b>\u202e]]>&x;$\\frac{$"


@pytest.mark.usefixtures("quick")
def test_samples_are_text_not_markup(tmp_path):
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\x00\ud800"
    sample = {"phase": "eval<b>", "step": 1, "prompt": attack, "response": attack, "answer": attack}
    config = CONFIG | {"env": {"task": attack}, attack: 1}
    root = make_run(tmp_path / "a<i>b", samples=[sample], config=config)
    raw = report.write_report(root).read_text(encoding="utf-8")
    for tag in ("<script", "<img src=x", "<b>", "<i>", "\x00"):
        assert tag not in raw
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in raw
    assert "&amp;amp;\\x00" in raw


@pytest.mark.usefixtures("quick")
def test_truncated_last_line(tmp_path):
    root = make_run(tmp_path / "run")
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "reward_me')
    page = read_page(report.write_report(root))
    assert "metrics.jsonl: left out 1 of 13 lines, the last one incomplete." in page
    assert "12 steps of RL" in page


@pytest.mark.parametrize(
    ("name", "empty"),
    [("sft", True), ("metrics", False), ("metrics", True), ("eval", False), ("samples", True)],
)
@pytest.mark.usefixtures("quick")
def test_one_missing_or_empty_file(tmp_path, name, empty):
    root = make_run(tmp_path / "run")
    file = root / f"{name}.jsonl"
    file.write_text("") if empty else file.unlink()
    page = read_page(report.write_report(root))
    assert f"{name}.jsonl {'holds no complete line' if empty else 'is missing'}." in page
    assert "Not recorded in this run." in page
    if name == "metrics":
        assert "exactly" not in page


def test_only_a_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    page = read_page(report.write_report(tmp_path))
    assert "no held-out evaluation recorded" in page
    assert "<img" not in page and "exactly" not in page


def test_hostile_records_are_shown_as_they_are(tmp_path):
    """Marks of direction, controls, halves of pairs and a very long line; names that are TeX."""
    attack = "a\u202eb\x9b31m\x7f\r\u2066\ud800<b>" + "x" * 3_000_000
    samples = [{"phase": "rl", "step": 1, "prompt": attack, "response": [attack], "answer": None}]
    rows = [metrics_row(i) | {f"fp8_saturated_frac/{_HOSTILE}": 0.1} for i in (1, 2)]
    rows[1] |= {"loss": 1e308, "reward_mean": 10**400, "time_$x<b>": 1.0, "time_rollout": "soon"}
    root = make_run(tmp_path / "run", samples=samples, metrics=rows)
    other = make_run(tmp_path / "<b>$", config={"<b>": {"\x1b": attack}})
    page = report.write_report(root, [other])
    assert page.stat().st_size < 2_000_000
    raw = page.read_text(encoding="utf-8")
    text = re.sub(r"data:image/svg\+xml;base64,[^\"]*", "", raw)
    assert r"a\u202eb\x9b31m\x7f\r\u2066\ud800&lt;b&gt;" in text
    assert "characters left out" in text and "<b>" not in text and "<script" not in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert [x for x in plots_of(page)["FP8 health"]["Saturated share"] if x.endswith("$\\frac{$")]


def test_hostile_names_stay_text_in_an_image(tmp_path):
    """Of operations, which are the only names in it: well-formed, and no more than shapes."""
    rows = [{"op": _HOSTILE, "layer": i, "differ": 1, "relative": 0.1} for i in (0, 1)]
    panels = [report.drift._of_values(rows)]
    panels += report.drift._of_causes(
        {
            "by_operation": [{"op": _HOSTILE, "adds": 0.1}],
            "by_layer": [{"layer": 0, "left": 0.1}],
            "drift_without_swaps": 0.1,
        }
    )
    for panel in panels:
        tags = [*ElementTree.fromstring(base64.b64decode(panel.svg)).iter()]
        names = {tag.tag.rpartition("}")[2] for tag in tags}
        assert names <= {
            *("svg", "metadata", "RDF", "Work", "type", "format", "creator", "Agent", "title"),
            *("defs", "style", "g", "path", "use", "clipPath", "rect", "image"),
        }
        links = {v for tag in tags for k, v in tag.attrib.items() if k.endswith("href")}
        assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
        assert not any(k.startswith("on") for tag in tags for k in tag.attrib)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"step": NaN}',
        '{"step": 1e999}',
        '{"step": "x"}',
        '{"step": null}',
        '{"phase": [1]}',
        '{"set": {}}',
        "[1]",
        "3",
        "\ud800",
        "x" * 2**24,
        '{"a": "' + "x" * 2**24 + '"}',
        '{"step": 1' + "0" * 5000 + "}",
        "{" + ", ".join(f'"k{i}": 0' for i in range(20_000)) + "}",
    ],
    ids=range(15),
)
def test_lines_that_are_no_records(line, tmp_path):
    """Left out, and counted, in every file; the others count."""
    root = make_run(tmp_path / "run")
    whole = summary.summarise(root)
    for name in ("metrics", "sft", "eval", "samples"):
        file = root / f"{name}.jsonl"
        file.write_bytes(line.encode(errors="surrogatepass") + b"\n" + file.read_bytes())
    s = summary.summarise(root)
    assert [note for note in s["notes"] if "left out 1 of" in note] == s["notes"][:4]
    assert {k: v for k, v in s.items() if k != "notes"} == {
        k: v for k, v in whole.items() if k != "notes"
    }


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "drift.json"])
def test_files_that_never_open(name, tmp_path):
    root = make_run(tmp_path / "run")
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    with time_limit():
        if name == "config.json":
            with pytest.raises(UserError, match=r"config\.json' cannot be read"):
                report.write_report(root)
        else:
            report.drift.drift_section(root)
            notes = summary.summarise(root)["notes"]
            assert ("metrics.jsonl is missing." in notes) == (name == "metrics.jsonl")
