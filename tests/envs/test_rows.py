"""Forms of rows: which columns count, what is shown, what goes to the chat template."""

from __future__ import annotations

import json

import pytest
from data_files import env, jsonl, parquet

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import ByteTokenizer, ChatFormat, ChatTemplate, encode_prompt
from fp8rl_jax.envs import Question, check_source, load_questions


def _load(path, rows, **fields):
    write = parquet if path.suffix == ".parquet" else jsonl
    section = env(write(path, rows), **({"eval_fraction": 0.0} | fields))
    check_source(section)
    return load_questions(section, {"train": 1}, 0)


def _questions(path, rows, **fields):
    return _load(path, rows, **fields).questions["train"]


_INSTRUCTIONS = [
    {"instruction": "Add.", "input": "1\n  2", "output": "3"},
    {"instruction": "Say hi.", "input": "", "output": "hi"},
    {"instruction": "Say no.", "input": None, "output": "no"},
    {"instruction": "", "input": "Why?", "output": "because"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_instruction_form(suffix, tmp_path):
    """The input is below the instruction; a row without one counts."""
    data = _load(tmp_path / f"a.{suffix}", _INSTRUCTIONS)
    texts = [q.text for q in data.questions["train"]]
    assert texts == ["Add.\n\n1\n  2", "Say hi.", "Say no.", "Why?"]
    assert ": rows (question in instruction and input, answer in output); 4 to" in data.note
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "c", "input": "d", "output": "e"}]
    (_, other) = _questions(tmp_path / "b.jsonl", rows)
    assert other.text == "c\n\nd"
    data = _load(tmp_path / "c.jsonl", _INSTRUCTIONS, question_key="instruction")
    assert data.questions["train"][0].text == "Add."
    assert data.note.endswith("1 without a question; columns not shown: input")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q", "context": "c", "answer": "a"}, "context"),
        ({"question": "q", "answer": "a", "id": 3, "hint": "h"}, "id, hint"),
        ({"prompt": "q", "question": "other", "answer": "a"}, "prompt"),
        ({"question": "q", "answer": "a", "solution": "s", "images": ["x"]}, "solution, images"),
        ({"prompt": "q", "input": "i", "answer": "a"}, "input"),
        ({"question": "q", "answer": "a", "tools": "hammer, saw"}, "tools"),
        ({"question": "q", "answer": "a", "context": None, "choices": [], "text": ""}, ""),
        (
            {
                "prompt": "q",
                "reward_model": {"ground_truth": "a"},
                "data_source": "d",
                "extra_info": {"index": 1},
            },
            "",
        ),
        (
            {
                "prompt": "q",
                "completion": [
                    {"role": "user", "content": "b"},
                    {"role": "assistant", "content": "a", "reasoning_content": "r", "name": None},
                ],
            },
            "completion.reasoning_content, completion before its last message",
        ),
        ({"question": "q", "answer": "a", "x": [[]], "y": [{}, None], "z": {"a": []}}, ""),
        ({"question": "q", "answer": "a", "demonstration": "[not messages"}, "demonstration"),
        ({"question": "q", "answer": "a", "x": [[], [0]], "y": {"a": [False]}}, "x, y"),
        ({"question": "q", "answer": "a", "b" * 99 + "\x1b": 1}, "b" * 60),
    ],
)
def test_columns_beside_the_question_are_said(row, said, tmp_path):
    """Those with a value in any row; of verl's rows not what is about a row."""
    note = _load(tmp_path / "a.jsonl", [row]).note
    assert note.endswith(f"; columns not shown: {said}" if said else "1 to train on"), note


@pytest.mark.parametrize("form", [list, tuple, json.dumps])
def test_a_demonstration_has_messages(form):
    """In a list, or as JSON text, which is all that a CSV file can hold."""
    shown = [{"role": "assistant", "content": "4"}]
    assert Question("q", "4", row={"demonstration": form(shown)}).demonstration == shown


def test_half_a_character_in_a_demonstration(tmp_path):
    row = {"question": "q", "answer": "a"}
    row["demonstration"] = [{"role": "assistant", "content": "x \ud800"}]
    with pytest.raises(UserError, match="'demonstration' has half of a character"):
        _load(tmp_path / "a.jsonl", [row])


def test_a_later_row_has_a_column_more(tmp_path):
    rows = [{"question": str(i), "answer": "1"} for i in range(2000)]
    rows[-1]["context"] = "c"
    assert _load(tmp_path / "a.jsonl", rows).note.endswith("; columns not shown: context")


@pytest.mark.parametrize(
    ("rows", "key", "answers"),
    [
        ([{"answer": None, "solution": "long"}, {"answer": "1", "solution": "l"}], "answer", ["1"]),
        ([{"answer": "", "solution": "long"}, {"answer": "1", "solution": "l"}], "answer", ["1"]),
        (
            [{"answer": None, "solution": "x"}, {"answer": None, "solution": "y"}],
            "solution",
            ["x", "y"],
        ),
        (
            [
                {"reward_model": {"ground_truth": None}, "answer": "x"},
                {"reward_model": {"ground_truth": "1"}, "answer": "y"},
            ],
            "reward_model.ground_truth",
            ["1"],
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_counts_by_its_first_value(rows, key, answers, suffix, tmp_path):
    """Not by what the first row happens to have."""
    rows = [{"question": str(i)} | row for i, row in enumerate(rows)]
    data = _load(tmp_path / f"a.{suffix}", rows)
    assert f"answer in {key})" in data.note
    assert [q.answer for q in data.questions["train"]] == answers


def test_text_and_conversations_in_one_column(tmp_path):
    """Each row is what it is, whatever the first one is."""
    rows = [{"prompt": None, "answer": "0"}, {"prompt": "a", "answer": "1"}]
    rows.append({"prompt": [{"role": "user", "content": "b"}], "answer": "2"})
    assert [q.text for q in _questions(tmp_path / "a.jsonl", rows)] == ["a", "b"]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["4", "Intro\n#### Setup\npip install x"], ["4", "Intro\n#### Setup\npip install x"]),
        (["4", "/* #### */ int x;"], ["4", "/* #### */ int x;"]),
        (["/* #### */ int x;"], ["/* #### */ int x;"]),
        (["# A\n#### 5\ntext", "# B\n#### C\ntext"], ["# A\n#### 5\ntext", "# B\n#### C\ntext"]),
        (["4", "so\n#### 1,072"], ["4", "1072"]),
        (["a\n#### 5", "b\n#### -₹72", "c #### 2 1/2"], ["5", "-₹72", "2 1/2"]),
        (["a\n#### yes", "b\n#### no"], ["yes", "no"]),
        (["a\n#### yes", "b\n#### no", "4"], ["a\n#### yes", "b\n#### no", "4"]),
        (["a\n#### 5", "b\n#### c\n#### 6\n"], ["5", "6"]),
    ],
)
def test_the_mark_of_answers(answers, expected, tmp_path):
    """It is one where a number is behind it, or where all answers end with such a line."""
    rows = [{"question": str(i), "answer": answer} for i, answer in enumerate(answers)]
    assert [q.answer for q in _questions(tmp_path / "a.jsonl", rows)] == expected


# What a prompt is.


def test_white_space_makes_another_prompt(tmp_path):
    """Indented code is kept; equal prompts with another answer have a count of their own."""
    code = ["if a:\n  b", "if a:\n    b", "if a:\n    b", "if a:\n    b"]
    rows = [{"question": q, "answer": a} for q, a in zip(code, "1112", strict=True)]
    data = _load(tmp_path / "a.jsonl", rows)
    assert [q.text for q in data.questions["train"]] == code[:2]
    assert "left out of training: 1 repeated, 1 repeated with another answer" in data.note


def test_white_space_does_not_hide_what_is_held_out(tmp_path):
    held_out = jsonl(tmp_path / "test.jsonl", [{"question": "if a:\n  b", "answer": "1"}])
    rows = [{"question": "if a: b ", "answer": "1"}, {"question": "c", "answer": "1"}]
    section = env(jsonl(tmp_path / "a.jsonl", rows), eval_task=str(held_out))
    data = load_questions(section, {"train": 1, "eval": 9}, 0)
    assert [q.text for q in data.questions["train"]] == ["c"] and "1 held out too" in data.note


def _user(text: str, **fields) -> dict:
    return {"role": "user", "content": text, **fields}


_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
_PROMPTS = [
    {"prompt": [_user("a"), {"role": "assistant", "content": "b"}, _user("c")]},
    {"prompt": [_user("a"), {"role": "system", "content": "b"}, _user("c")]},
    {"prompt": [_user("a", name="Ann"), _user("b"), _user("c")]},
    {
        "prompt": [
            _user("a"),
            {"role": "assistant", "content": "b", "reasoning_content": "r"},
            _user("c"),
        ]
    },
    {
        "prompt": [
            _user("a"),
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": "b", "name": "add"},
            _user("c"),
        ]
    },
    {"prompt": [_user("c")]},
    {"prompt": [_user("c", name="Ann")]},
    {"prompt": [_user("c")], "tools": [_TOOL]},
    {"prompt": "c", "tools": json.dumps([_TOOL, _TOOL])},
]
_TEMPLATE = (
    "{{ tools | tojson }};{% for m in messages %}{{ m | tojson }}{{ m.tool_calls }}{% endfor %}"
)


def test_messages_and_tools_reach_the_template(tmp_path):
    """All fields, as transformers gives them; rows that differ in them alone are several."""
    rows = [{**row, "answer": "1"} for row in _PROMPTS]
    found = _questions(tmp_path / "a.jsonl", rows)
    assert len(found) == len(rows)
    chat = ChatFormat(ChatTemplate(_TEMPLATE, {}, "here"))
    for row, question in zip(rows, found, strict=True):
        messages, tools = row["prompt"], row.get("tools")
        messages = [_user(messages)] if isinstance(messages, str) else messages
        tools = json.loads(tools) if isinstance(tools, str) else tools
        expected = ChatTemplate(_TEMPLATE, {}, "here").render(messages, {"tools": tools})
        assert chat.render(question.prompt) == expected


def test_a_parquet_file_fills_no_fields_in(tmp_path):
    """Arrow gives each message the fields of all, as None; they are not the row's."""
    rows = [{"prompt": _PROMPTS[4]["prompt"], "answer": "1", "tools": [_TOOL]}]
    (question,) = _questions(tmp_path / "a.parquet", rows)
    assert question.messages == rows[0]["prompt"] and list(question.tools) == [_TOOL]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (_PROMPTS[4], "the chat template writes no tool_calls, and a prompt has them"),
        (_PROMPTS[7], "the chat template writes no tools, and a prompt has them"),
        (_PROMPTS[8], r"a prompt is a conversation with tools \(2\), and data.chat is False"),
    ],
)
def test_tools_that_cannot_be_shown(row, message, tmp_path):
    (question,) = _questions(tmp_path / "a.jsonl", [{**row, "answer": "1"}])
    plain = ChatFormat(ChatTemplate("{{ messages[0].content }}", {}, "here"))
    with pytest.raises(UserError, match=message):
        encode_prompt(question.prompt, ByteTokenizer(), None if "data.chat" in message else plain)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([_user("a"), {"role": "assistant", "content": "b"}], "ends with a message of the role"),
        ([{"role": "assistant"}, _user("a")], "write a conversation"),
        ([_user("a", name="\ud800")], "half of a character"),
        ([_user([{"type": "image"}])], "'prompt.content' is list"),
    ],
)
def test_conversations_that_are_none(prompt, message, tmp_path):
    with pytest.raises(UserError, match=message):
        _load(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "1"}])


def test_tools_with_half_of_a_character(tmp_path):
    rows = [{"prompt": "a", "answer": "1", "tools": '[{"name": "\\ud800"}]'}]
    with pytest.raises(UserError, match="'tools' has half of a character"):
        _load(tmp_path / "a.jsonl", rows)


@pytest.mark.parametrize(
    ("value", "counted"),
    [
        ([_user("a")], True),
        ([{"name": "x", "role": "user", "content": "y"}], True),
        ({"messages": [_user("a")]}, True),
        (_user("a"), True),
        ({"tools": [], "conversations": [{"from": "human", "value": "a"}]}, True),
        ([{"role": "assistant", "tool_calls": [{}]}], True),
        ([{"role": "admin"}], False),
        ([1, 2], False),
        ({"content": "a"}, False),
        ([], False),
    ],
)
def test_json_of_messages_is_a_text(value, counted, tmp_path):
    """As TRL takes it; the first line says so."""
    text = json.dumps(value)
    data = _load(tmp_path / "a.jsonl", [{"prompt": text, "answer": "1"}])
    assert data.questions["train"][0].prompt == text
    said = "a.jsonl are JSON of messages and asked as that text"
    assert data.note.endswith(said if counted else "1 to train on")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"instruction": "a", "output": "b"}], "instruction, answer"),
        ([{"instruction": "a", "input": "", "output": "b"}], "instruction, answer"),
        (
            [{"instruction": str(i), "output": "b"} for i in range(1100)]
            + [{"instruction": "a", "input": "c", "output": "b"}],
            "instruction and input, answer",
        ),
    ],
    ids=range(3),
)
def test_the_input_is_said_where_a_row_has_one(rows, said, tmp_path):
    assert f"(question in {said} in output)" in _load(tmp_path / "a.jsonl", rows).note


@pytest.mark.parametrize(
    "answer", ["a\n#### 5", ["a\n#### 5"], [{"role": "assistant", "content": "a\n#### 5"}]]
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_mark_is_said_in_whatever_it_stands(answer, suffix, tmp_path):
    data = _load(tmp_path / f"a.{suffix}", [{"prompt": "a", "answer": answer}])
    assert data.questions["train"][0].answer == "5"
    assert "(question in prompt, answer in answer after ####)" in data.note


@pytest.mark.parametrize("answer", [[], {}, [None], [[]], {"a": None}])
def test_answers_without_a_value(answer, tmp_path):
    rows = [{"prompt": "a", "answer": answer}, {"prompt": "b", "answer": 0}]
    data = _load(tmp_path / "a.jsonl", rows)
    assert [q.answer for q in data.questions["train"]] == ["0"]
    assert data.note.endswith("left out of training: 1 without an answer")


def test_template_and_tools(tmp_path):
    """The user's last message is in the template, also where a tool answered behind it."""
    messages = _PROMPTS[4]["prompt"][:3]
    (question,) = _questions(
        tmp_path / "a.jsonl", [{"prompt": messages, "answer": "1"}], prompt_template="<{question}>"
    )
    assert [m["content"] for m in question.messages] == ["<a>", None, "b"]
