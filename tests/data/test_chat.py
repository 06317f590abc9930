"""Chat templates: the text that a model was trained on, whatever the template does."""

from __future__ import annotations

import datetime
import json

import pytest
import tiny_checkpoint
from fuzz import time_limit

from fp8rl_jax.data import ChatFormat, ChatTemplate, chat_limits
from fp8rl_jax.errors import UserError

# Llama 3's manner: a header for every turn, the begin token written by the template, a date.
_HEADERS = """\
{{- bos_token }}
{%- if not date is defined %}
    {%- set date = strftime_now("%Y") %}
{%- endif %}
{%- for message in messages %}
    {{- '<h>' + message['role'] + '</h>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<h>assistant</h>\\n\\n' }}
{%- endif %}
{{- date }}
"""


def _template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, tokens, "here")


_USER = [{"role": "user", "content": " hi "}]


def test_turns_and_generation_prompt():
    """Blocks leave no blanks; the answer's beginning is written if asked for."""
    template = _template(tiny_checkpoint.TEMPLATE)
    assert template.render(_USER) == "<|turn|>user\nhi<|stop|>\n<|turn|>assistant\n"
    system = template.render([{"role": "system", "content": "be brief"}, *_USER])
    assert system.startswith("<|turn|>system\nbe brief<|stop|>\n<|turn|>user\nhi")


def test_variables_reach_the_template():
    """A variable of the template is passed through, and absent when nobody gives it."""
    template = _template(tiny_checkpoint.TEMPLATE)
    thinking = template.render(_USER, {"enable_thinking": False})
    assert thinking == template.render(_USER) + "<think>\n\n</think>\n\n"
    assert template.render(_USER, {"enable_thinking": True}) == template.render(_USER)


def test_special_tokens_and_dates():
    """Names of special tokens and strftime_now are there, as templates expect."""
    template = _template(_HEADERS, bos_token="<b>", eos_token="<e>")
    year = str(datetime.date.today().year)
    assert template.render(_USER) == f"<b><h>user</h>\n\nhi<e><h>assistant</h>\n\n{year}"
    assert template.render(_USER, {"date": "1999"}).endswith("1999")


def test_whitespace_of_blocks_is_trimmed():
    """Templates are written for trim_blocks and lstrip_blocks."""
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}|\n  {% endif %}\n{% endfor %}"
    )
    assert _template(source).render(_USER) == " hi |\n"


def test_tojson_keeps_letters_and_order():
    """No HTML escapes, no sorting, no \\u escapes: a model saw plain JSON."""
    source = "{{ {'b': '<é>', 'a': [1]} | tojson }}{{ [1] | tojson(indent=1) }}"
    assert _template(source).render(_USER) == '{"b": "<é>", "a": [1]}' + json.dumps([1], indent=1)


def test_loop_controls_and_generation_blocks():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert _template(source).render(_USER * 2) == " hi "


def test_refusals_are_one_sentence():
    """raise_exception, a syntax error, a type error, and what the sandbox forbids."""
    with pytest.raises(UserError, match=r"role tool is not known.*system prompt"):
        _template(tiny_checkpoint.TEMPLATE).render([{"role": "tool", "content": ""}])
    with pytest.raises(UserError, match=r"here: the chat template is no Jinja"):
        _template("{% for %}")
    with pytest.raises(UserError, match=r"TypeError"):
        _template("{{ 1 + 'a' }}").render(_USER)
    with pytest.raises(UserError, match=r"SecurityError"):
        _template("{{ messages.__class__.__mro__ }}").render(_USER)
    with pytest.raises(UserError, match=r"SecurityError"):
        _template("{{ messages.append(1) }}").render(_USER)


def test_arithmetic_and_joins_are_those_of_jinja():
    """Within the limits nothing changes: operators, `~` in any place, macros, blocks of set."""
    source = (
        "{% macro f(n) %}{{ n ~ '-' ~ none }}{% endmacro %}{{ f(2) }} {{ 2 ** 10 }} {{ 7 % 4 }} "
        "{{ '%5.1f%%' % 2.5 }} {{ [1] + [2] }} {{ 'ab' * 2 }} {{ 1.5 * 2 }} {{ 2 ** -1 }} "
        "{% for x in [1, 2] %}{{ x ~ loop.last if x ~ '' == '2' else 'one' }}{% endfor %} "
        "{% set y %}{{ 3 ~ 4 }}{% endset %}{{ y }}{{ undefined_name ~ '!' }}"
    )
    text = _template(source).render(_USER)
    assert text == "2-None 1024 3   2.5% [1, 2] abab 3.0 0.5 one2True 34!"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "turns"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
         "turns"),
        ("{% set n = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}", "16,777,216 characters"),
        ("{% set n = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set q %}{{ n.x }}"
         "{{ n.x }}{% endset %}{% set n.x = q %}{% endfor %}", "16,777,216 characters"),
        ("{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
         "{% endfor %}", "16,777,216 parts"),
        ("{{ 'a' * 10**12 }}", "16,777,216 parts"), ("{{ 10**12 * 'a' }}", "16,777,216 parts"),
        ("{{ 9**(9**9) }}", "number"), ("{{ '%999999999d' % 1 }}", "width"),
        ("{{ '%*d' % (10**9, 1) }}", "width"), ("{{ lipsum(10**9) }}", "lipsum"),
        ("{{ " + "(" * 5000 + " }}", "no Jinja"), ("{{ " + "1" * 5000 + " }}", "no Jinja"),
        ("{% if 1 %}" * 300 + "{% endif %}" * 300, "no Jinja"),
    ],
    ids=range(14),
)  # fmt: skip
def test_limits(source, words, monkeypatch):
    monkeypatch.setattr(chat_limits, "_MOST_TURNS", 10_000)
    with pytest.raises(UserError, match=words), time_limit():
        _template(source).render(_USER)


def test_turns_are_counted_anew_for_each_conversation(monkeypatch):
    monkeypatch.setattr(chat_limits, "_MOST_TURNS", 150)
    template = _template("{% for i in range(100) %}{% endfor %}done")
    assert [template.render(_USER) for _ in range(3)] == ["done"] * 3


def test_format_of_a_question():
    template = _template(tiny_checkpoint.TEMPLATE)
    assert ChatFormat(template).render("1 + 1") == template.render(
        [{"role": "user", "content": "1 + 1"}]
    )
    text = ChatFormat(template, "be brief", {"enable_thinking": False}).render("1 + 1")
    assert text.startswith("<|turn|>system\nbe brief") and text.endswith("</think>\n\n")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "strftime_now"])
def test_a_variable_with_a_taken_name_is_refused(name):
    with pytest.raises(UserError, match=rf"data\.chat_options\.{name}: this name is set"):
        ChatFormat(_template(tiny_checkpoint.TEMPLATE), variables={name: 1})
    ChatFormat(_template("{{ begin_answer }}"), variables={"begin_answer": 1}).render("?")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_of_a_row_takes_the_place_of_the_runs(role):
    chat = ChatFormat(_template("{% for m in messages %}{{ m.role }},{% endfor %}"), "be brief")
    own = [{"role": role, "content": "be long"}, *_USER]
    assert chat.render(own) == f"{role},user,"
    assert chat.render(_USER) == "system,user,"
