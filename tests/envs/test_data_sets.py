"""Data sets as tasks: every form gives the same questions, nothing leaks, bad rows are named."""

from __future__ import annotations

import datetime
import json
import pathlib
import sys

import numpy as np
import pytest
from data_files import ROWS, arrow, arrow_dict, env, jsonl, parquet, trl, verl

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import ByteTokenizer, ChatFormat, ChatTemplate, encode_prompt
from fp8rl_jax.envs import Question, check_source, is_generated, load, load_questions, split_of
from fp8rl_jax.envs.digest import digest_of

_ALL = {"train": 1, "eval": 1000}
_PLAIN = "rows (question in question, answer in answer after ####)"


def _load(task, counts=_ALL, fits=None, **fields):
    section = env(task, **fields)
    check_source(section)
    return load_questions(section, counts, 0, fits)


def _texts(data, split):
    return [q.text for q in data.questions[split]]


# Forms.

_FORMS = {
    "jsonl": (lambda p: jsonl(p / "a.jsonl", ROWS), _PLAIN),
    "gz": (lambda p: jsonl(p / "a.jsonl.gz", ROWS), _PLAIN),
    "parquet": (lambda p: parquet(p / "a.parquet", ROWS), _PLAIN),
    "hub": (lambda p: parquet(p / "h/data/train-00000-of-00001.parquet", ROWS).parents[1], _PLAIN),
    "save_to_disk": (lambda p: arrow(p / "disk", ROWS), _PLAIN),
    "verl": (
        lambda p: parquet(p / "v.parquet", [verl(row) for row in ROWS]),
        "verl's rows (question in prompt, answer in reward_model.ground_truth after ####)",
    ),
    "trl": (
        lambda p: jsonl(p / "t.jsonl", [trl(row) for row in ROWS]),
        "TRL's conversational rows (question in prompt, answer in solution after ####)",
    ),
}


@pytest.mark.parametrize("name", _FORMS)
def test_every_form_gives_the_same_questions(name, tmp_path):
    """Texts, answers, whole answers, order and splits; the note says which form it is."""
    write, form = _FORMS[name]
    path = write(tmp_path)
    data = _load(path)
    expected = {"sft": [], "train": [], "eval": []}
    for row in ROWS:
        text, answer = row["question"], row["answer"]
        split = "eval" if split_of(text) == "eval" else "train"
        expected[split].append(Question(text, answer.split("#### ")[1], answer))
    assert data.questions == expected
    train, held_out = len(expected["train"]), len(expected["eval"])
    assert held_out > 0
    assert data.note == (
        f"{path}: {form}; {train} to train on, {held_out} held out (0.1 of all, by the hash of "
        "the question)"
    )
    assert data.digest == _load(path).digest != _load(path, max_questions=train - 1).digest


def test_rows_are_kept(tmp_path):
    """All columns of a row go with its question."""
    data = _load(parquet(tmp_path / "v.parquet", [verl(row) for row in ROWS]))
    assert data.questions["train"][0].row["extra_info"] == {"split": "train", "index": 3}


@pytest.mark.parametrize("held_out", ["test", "validation"])
def test_own_splits_are_kept(held_out, tmp_path):
    """Of a directory's splits; what is held out is complete, and never trained on."""
    parts = {"train": ROWS[:30], held_out: ROWS[25:]}
    for path in (arrow_dict(tmp_path / "disk", parts), tmp_path / "hub"):
        for split, rows in parts.items() if path.name == "hub" else ():
            parquet(path / split / "0000.parquet", rows)
        data = _load(path)
        assert _texts(data, "eval") == [row["question"] for row in ROWS[25:]]
        assert _texts(data, "train") == [row["question"] for row in ROWS[:25]]
        assert f"25 to train on, 15 held out (its split {held_out!r})" in data.note
        assert data.note.endswith("left out of training: 5 held out too")


def test_a_second_source_is_held_out(tmp_path):
    """env.eval_task: all of a file, or questions of a generator; nothing of task itself."""
    train = jsonl(tmp_path / "one.jsonl", ROWS[:30])
    data = _load(train, eval_task=str(jsonl(tmp_path / "two.jsonl", ROWS[20:])))
    assert len(data.questions["train"]) == 20 and len(data.questions["eval"]) == 20
    data = _load(train, {"train": 1, "eval": 3}, eval_task="basic_arithmetic")
    assert len(data.questions["train"]) == 30 and len(data.questions["eval"]) == 3
    data = _load("basic_arithmetic", {"train": 3, "eval": 9}, eval_task=str(train))
    assert len(data.questions["train"]) == 3 and len(data.questions["eval"]) == 9


def test_several_sources_are_held_out(tmp_path):
    """Each is a set with its name and number of questions; nothing of any is trained on."""
    train = jsonl(tmp_path / "one.jsonl", ROWS[:30])
    parts = {"two": ROWS[20:], "three": ROWS[:5] + ROWS[35:]}
    two, three = (str(jsonl(tmp_path / f"{name}.jsonl", rows)) for name, rows in parts.items())
    data = _load(train, {"train": 1, "eval": 9}, eval_task=f"{two}, basic_arithmetic,{three}")
    sets = [q.set for q in data.questions["eval"]]
    assert sets == [two] * 9 + ["basic_arithmetic"] * 9 + [three] * 9
    assert len(data.questions["train"]) == 15
    held_out = f"9 held out ({two}), 9 held out (basic_arithmetic), 9 held out ({three})"
    assert f"; 15 to train on, {held_out}; left out of training: 15 held out too" in data.note
    alone = _load(train, {"train": 1, "eval": 9}, eval_task=f"{two},").questions["eval"]
    assert [(q.text, q.set) for q in alone] == [(q.text, "") for q in data.questions["eval"][:9]]
    with pytest.raises(UserError, match=r"env\.eval_task names 'chain_sum' twice"):
        _load(train, eval_task="chain_sum, chain_sum")


def test_shares_and_numbers(tmp_path):
    """Three tenths for fine-tuning where it is asked for; subsets do not depend on the order."""
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    data = _load(path, {"sft": 100, "train": 1, "eval": 2})
    assert all(split_of(text) == "sft" for text in _texts(data, "sft"))
    assert all(split_of(text) == "train" for text in _texts(data, "train"))
    backwards = _load(jsonl(tmp_path / "b.jsonl", ROWS[::-1]), {"train": 1, "eval": 2})
    assert set(_texts(backwards, "eval")) == set(_texts(data, "eval"))
    assert len(_load(path, max_questions=7).questions["train"]) == 7
    assert _load(path, {"eval": 2}).questions["train"] == []


def test_what_is_left_out_is_counted(tmp_path):
    """Repeated questions, empty ones, and those that do not fit."""
    rows = [
        *ROWS,
        *ROWS[:3],
        {"question": " ", "answer": "1"},
        {"question": "a", "answer": ""},
        {"question": "b", "answer": "work ####"},
        {"question": None, "answer": "1"},
    ]
    fits = lambda split, question: question.text != ROWS[0]["question"]
    data = _load(jsonl(tmp_path / "a.jsonl", rows), fits=fits)
    assert data.note.endswith(
        "left out of training: 3 repeated, 1 too long, 2 without a question, 2 without an answer"
    )
    assert sum(map(len, data.questions.values())) == len(ROWS) - 1


# Columns.


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        ({"problem": "p", "output": 42}, {}, Question("p", "42")),
        ({"prompt": "p", "label": 1.5}, {}, Question("p", "1.5")),
        ({"input": "p", "target": ["a", "b"]}, {}, Question("p", '["a", "b"]')),
        ({"q": "p", "a": "1"}, {"question_key": "q", "answer_key": "a"}, Question("p", "1")),
        (
            {"x": {"q": "p", "a": "1"}},
            {"question_key": "x.q", "answer_key": "x.a"},
            Question("p", "1"),
        ),
        ({"question": "p", "answer": "9"}, {"answer_key": "-"}, Question("p", "")),
        (
            {"question": "p", "answer": "a #### 1 b #### 1,072"},
            {},
            Question("p", "1072", "a #### 1 b #### 1,072"),
        ),
        (
            {"question": "p", "answer": "A: 1. A: 2"},
            {"answer_pattern": r"A: (\d)"},
            Question("p", "2", "A: 1. A: 2"),
        ),
        (
            {"question": "p", "answer": "12 cm"},
            {"answer_pattern": r"\d+"},
            Question("p", "12", "12 cm"),
        ),
        (
            {
                "prompt": [{"role": "user", "content": "p"}],
                "completion": [{"role": "assistant", "content": "c"}],
            },
            {},
            Question("p", "c"),
        ),
    ],
)
def test_columns(row, fields, expected, tmp_path):
    """Usual names, named ones, nested ones, no answer at all, and patterns."""
    path = jsonl(tmp_path / "a.jsonl", [row])
    data = _load(path, {"train": 1, "eval": 1}, eval_task="basic_arithmetic", **fields)
    assert data.questions["train"] == [expected]


def test_template(tmp_path):
    """Other braces stay; the split is that of the bare question; generators have it too."""
    template = r"{question} Put it in \boxed{}."
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    with_it, without = _load(path, prompt_template=template), _load(path)
    for split in ("train", "eval"):
        assert _texts(with_it, split) == [
            text + r" Put it in \boxed{}." for text in _texts(without, split)
        ]
    (question,) = _load("chain_sum", {"train": 1}, prompt_template=template).questions["train"]
    assert question.text.endswith(r" Put it in \boxed{}.")


def test_conversations(tmp_path):
    """Several messages reach the chat template as they are; without one they are refused."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": messages, "answer": "4"}])
    data = _load(
        path,
        {"train": 1, "eval": 1},
        eval_task="basic_arithmetic",
        prompt_template="{question} Now.",
    )
    (question,) = data.questions["train"]
    assert question.text == "Be brief.\n\n2+2? Now."
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    chat = ChatFormat(ChatTemplate(source, {}, "here"), system="another")
    text = bytes(encode_prompt(question.prompt, ByteTokenizer(), chat)).decode()
    assert text == "system:Be brief.;user:2+2? Now.;"
    text = bytes(encode_prompt("2+2?", ByteTokenizer(), chat)).decode()
    assert text == "system:another;user:2+2?;"
    with pytest.raises(UserError, match=r"conversation of 2 messages.*set data\.chat=True"):
        encode_prompt(question.prompt, ByteTokenizer())


def test_a_function_that_returns_rows(tmp_path, monkeypatch):
    """Rows, or rows by split; what it does wrong is one sentence."""
    (tmp_path / "my_rows.py").write_text(
        "def rows():\n    return ({'input': f'{i}?', 'output': i} for i in range(50))\n"
        "def parts():\n    return {'train': rows(), 'test': [{'input': '7?', 'output': 7}]}\n"
        "def text():\n    return ['a']\n"
        "def fails():\n    yield {'input': 'a', 'output': 'b'}\n    raise OSError('gone')\n"
        "def takes(x):\n    return []\n"
        "none = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sum(map(len, _load("my_rows:rows").questions.values())) == 50
    data = _load("my_rows:parts")
    assert len(data.questions["train"]) == 49 and _texts(data, "eval") == ["7?"]
    for name, message in {
        "text": "my_rows:text train, row 1 is str; return dicts",
        "fails": "my_rows:fails train fails with OSError: gone",
        "takes": r"'my_rows:takes' fails with TypeError: .*; it takes no argument",
        "none": "'my_rows:none' is not a function",
        "gone": "'my_rows:gone' cannot be imported",
    }.items():
        with pytest.raises(UserError, match=message):
            _load(f"my_rows:{name}")


# What is wrong with a file.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b'{"question": "a", "answer": "1"}\nnonsense\n', r"a\.jsonl:2 is not JSON .*: write one"),
        (b'{"question": "a", "answer": "1"}\n\n[1]\n', r"a\.jsonl:3 is list; write one object"),
        (b'{"question": "a\xff"}\n', r"a\.jsonl:1 is not JSON .*byte 0xff.*: write .* in UTF-8"),
        (
            b'{"question": "a"}\n',
            r"a\.jsonl:1: no column is known as the answer \(.*\); the row "
            r"has question: name one by env\.answer_key, or write '-' for rows without one",
        ),
        (b'{"text": "a", "answer": "1"}\n', "no column is known as the question.*env.question_key"),
        (
            b'{"question": "a", "answer": "1"}\n{"question": "b", "reply": "1"}\n',
            r"a\.jsonl:2: the row has no 'answer', only question, reply: put it there, or name",
        ),
        (b'{"question": {"a": 1}, "answer": "1"}\n', "'question' is dict .*; name a column of"),
        (b'{"prompt": [], "answer": "1"}\n', r"'prompt' is list .*; write a conversation"),
        (
            b'{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}\n',
            r"ends with a message of the role 'assistant'",
        ),
        (b'{"question": "\\ud800", "answer": "1"}\n', "half of a character"),
        (b'{"question": "a", "answer": ""}\n', "no rows with both question and answer"),
    ],
)
def test_bad_rows_are_named(content, message, tmp_path):
    """One sentence, with the line where there is one."""
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        _load(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz"])
def test_damaged_files(name, tmp_path):
    (tmp_path / name).write_bytes(b"no such format")
    with pytest.raises(UserError, match=rf"{name} cannot be read \("):
        _load(tmp_path / name)


def test_a_pattern_that_is_not_found(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(UserError, match=r"a\.jsonl:1: env\.answer_pattern = 'A:' is not in the"):
        _load(path, answer_pattern="A:")


def test_directories_that_are_not_one_data_set(tmp_path):
    """No data, several data sets, a split that is missing: which ones stands in the sentence."""
    (tmp_path / "empty").mkdir()
    parquet(tmp_path / "two/main/train.parquet", ROWS)
    parquet(tmp_path / "two/socratic/train.parquet", ROWS)
    parquet(tmp_path / "odd/test.parquet", ROWS)
    parquet(tmp_path / "odd/validation.parquet", ROWS)
    for name, message in {
        "empty": "holds no data",
        "two": r"several data sets for the split 'train' \(main/train, socratic/train\)",
        "odd": "has the splits test, validation, and none is called 'train'",
    }.items():
        with pytest.raises(UserError, match=message):
            _load(tmp_path / name)


# What a task is.


def test_generated_tasks_are_told_from_data_sets(tmp_path, monkeypatch):
    """By the name; a directory does not hide the task of that name."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("chain_sum").mkdir()
    pathlib.Path("mine").mkdir()
    tasks = {"chain_sum": True, "mine": False, "nothing_here": True, "gsm8k": False}
    tasks |= {"tfds:gsm8k": False, "a.jsonl": False, "./a": False, "m:f": False}
    assert {task: is_generated(task) for task in tasks} == tasks


def test_generated_questions_are_as_before():
    """Without a data set nothing is noted, and rows are reasoning_gym's items."""
    data = _load("chain_sum", {"train": 2, "eval": 1})
    assert (data.note, data.digest) == ("", "")
    assert json.dumps(data.questions["train"][0].row["metadata"])


# What has changed, and what does not end.


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_digest_covers_what_a_reward_gets(suffix, tmp_path):
    """A column that only the reward reads; not the order of keys in another file."""
    write = jsonl if suffix == "jsonl" else parquet
    digests = []
    for level in (1, 2, 1):
        rows = [{**row, "level": {"of": [level]}} for row in ROWS]
        digests.append(_load(write(tmp_path / f"a.{suffix}", rows)).digest)
    assert digests[0] == digests[2] != digests[1]


def test_the_digest_of_any_rows():
    """Objects, huge numbers, circles: the same for equal rows."""

    class Thing:
        pass

    def digest(**row):
        return digest_of({"sft": [], "train": [Question("a", "b", row=row)], "eval": []})

    circle: list = []
    circle.append(circle)
    for make in (
        lambda: Thing(),
        lambda: 10**5000,
        lambda: {(1, 2): circle},
        lambda: {"b", "a"},
        lambda: np.arange(3.0),
        lambda: datetime.date(2020, 1, 1),
    ):
        assert digest(x=make()) == digest(x=make()) != digest(x=3)


def test_functions_without_end(tmp_path, monkeypatch):
    """env.max_questions is applied while rows are read; without it there is a bound."""
    (tmp_path / "endless.py").write_text(
        "import itertools\n"
        "taken = 0\n"
        "def new():\n"
        "    global taken\n"
        "    for taken in itertools.count(1):\n"
        "        yield {'question': str(taken), 'answer': 1}\n"
        "def same():\n    return itertools.repeat({'question': 'a', 'answer': 1})\n"
        "def test():\n    return {'train': [{'question': 'b', 'answer': 1}], 'test': new()}\n"
        "def leaves():\n    raise SystemExit(3)\n"
        "def one_dict():\n"
        "    row = {}\n"
        "    for row['question'] in ('a', 'b'):\n"
        "        row['answer'] = row['question']\n"
        "        yield row\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(load, "_MOST_ROWS", 5000)
    data = _load("endless:new", max_questions=100)
    assert len(data.questions["train"]) == 100 and sys.modules["endless"].taken < 130
    assert 5 < len(data.questions["eval"]) < 20
    fits = lambda split, question: int(question.text) % 3 == 0
    assert len(_load("endless:new", max_questions=100, fits=fits).questions["train"]) == 100
    for name, fields in {"new": {}, "same": {"max_questions": 100}, "test": {}}.items():
        way = "$" if name == "test" else ", or set env.max_questions"
        with pytest.raises(
            UserError, match=rf"has given [56],001 rows and goes on: let it end{way}"
        ):
            _load(f"endless:{name}", **fields)
    with pytest.raises(UserError, match="'endless:leaves' fails with SystemExit: 3"):
        _load("endless:leaves")
    rows = _load("endless:one_dict", eval_fraction=0.0).questions["train"]
    assert [q.row["answer"] for q in rows] == ["a", "b"]
