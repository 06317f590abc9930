"""Chat templates: the text that a model was trained on, whatever the template does."""

from __future__ import annotations

import datetime
import json

import pytest
import tiny_checkpoint
from fuzz import time_limit

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import ChatFormat, ChatTemplate
from fp8rl_jax.data.chat_trial import check_template

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


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        "{{ 9**(9**9) }}",
    ],
    ids=["loops", "text that doubles", "power"],
)
def test_a_template_that_never_ends_is_refused(source):
    """In a process with little time and memory, before this one renders anything."""
    with time_limit(), pytest.raises(UserError, match=r"here: .* more than 3 seconds or 1 GiB"):
        check_template(source, {}, "here")


def test_what_the_trial_does_not_reach_takes_no_time():
    """While it compiles, Jinja would compute constants: here 4 GiB of blanks, in a minute."""
    source = "{{ nothing() }}{{ '%4294967296d' % 3 }}"
    with time_limit():
        check_template(source, {}, "here")
        with pytest.raises(UserError, match="nothing"):
            _template(source).render(_USER)


def test_a_template_of_each_kind_passes_the_trial():
    for source in (tiny_checkpoint.TEMPLATE, _HEADERS, "{{ raise_exception('no') }}", "{% for %}"):
        check_template(source, {"bos_token": "<b>", "eos_token": "<e>"}, "here")


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + " }}",
        "{{ " + "1" * 5000 + " }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
        "{{ [1, 2] | random }}",
    ],
    ids=range(4),
)
def test_what_is_no_jinja(source):
    with time_limit(), pytest.raises(UserError, match="no Jinja"):
        _template(source)


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


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_as_json_text(arguments):
    """As OpenAI's API gives them; templates write JSON themselves, but for DeepSeek's, which adds a
    text."""
    called = {"name": "f", "arguments": arguments}
    form = "{% for c in messages[-1].tool_calls %}{{ WRITTEN }}{% endfor %}{# tools #}"
    for call in (called, {"id": "x", "function": called}):
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        for written, expected in (
            ("(c.function or c).arguments | tojson", '{"a": 1}'),
            ("'f ' + (c.function or c).arguments", 'f {"a": 1}'),
        ):
            template = ChatTemplate(form.replace("WRITTEN", written), {}, "here")
            assert template.render(messages) == expected
    odd = [{"role": "assistant", "content": "", "tool_calls": ["x", {"arguments": "[1"}]}]
    template = ChatTemplate("{{ messages[0].tool_calls | tojson }}{# tools #}", {}, "here")
    assert template.render(odd) == '["x", {"arguments": "[1"}]'
