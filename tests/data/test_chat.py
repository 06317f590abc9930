"""Chat templates: the text that a model was trained on, whatever the template does."""

from __future__ import annotations

import contextlib
import datetime
import json
import pathlib
import re
import resource

import pytest
import tiny_checkpoint
from fuzz import time_limit

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import ChatFormat, ChatTemplate, chat_limits

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


# Text of 4 million characters is too long, of 2 million is not.
_LONG = "{% set x = 'a' * 1000 * 2000 %}"
_SHORT = "{% set x = 'a' * 1000 * 60 %}"
_LIST = "{% set x = range(20000) | list %}"
_HOSTILE = [
    # Loops, macros, blocks.
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}"
    + "a{% if 1 %}{% endif %}" * 500
    + "{% endmacro %}{% for i in range(99999) %}{% set y = f() %}{% endfor %}",
    "{% block z %}a{% endblock %}"
    + "".join(
        f"{{% block b{i} %}}{{% if messages | length < {i + 99} %}}{{{{ self.b{i + 1}() }}}}"
        f"{{{{ self.b{i + 1}() }}}}{{% endif %}}{{% endblock %}}"
        for i in range(60)
    )
    + "{% block b60 %}{% endblock %}",
    # Text and lists that double.
    "{% set n = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "{% set n = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set q %}{{ n.x }}"
    "{{ n.x }}{% endset %}{% set n.x = q %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x }}",
    "{% set n = namespace(x=(1,)) %}{% for i in range(40) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
    "{{ {n.x: 1} }}",
    "{% set n = namespace(x={}) %}{% for i in range(40) %}{% set n.x = {'a': n.x, 'b': n.x} %}"
    "{% endfor %}{{ n.x == n.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = namespace(a=n.x, b=n.x) %}"
    "{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=1) %}{% set n.x = n %}{{ n }}{{ [n] | string }}",
    "{% set n = namespace(x=[]) %}{% for i in range(400) %}{% set n.x = [n.x] %}{% endfor %}",
    _LONG + "{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set n.x = n.x + [x[1:] | length] %}{% endfor %}",
    _LONG + "{{ x }}{{ x }}{{ x }}",
    _LONG + "{{ [x, x, x] }}",
    # Operators.
    "{{ 'a' * 10**12 }}",
    "{{ 10**12 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 9**(9**9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%9999d' * 9999 % ((1,) * 9999) }}",
    _SHORT + "{{ '%s' * 99999 % ((x,) * 99999) }}",
    # Filters.
    "{{ lipsum(10**9) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ ('a\nb' * 9999) | indent(10**6) }}",
    "{{ ('a\n' * 10**6) | indent(10**4) }}",
    "{{ ('a\n' * 10**6) | indent('b' * 10**4) }}",
    _SHORT + "{{ x | replace('a', x) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '%99999s%s' | format(1, 2) }}",
    _SHORT + "{{ range(99999) | join(x) }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ [1] | batch(10**9, 1) | list }}",
    "{{ [[[1]]] | tojson(indent=10**9) }}",
    _LIST + "{{ x | tojson(indent=10**4) }}",
    _SHORT + "{{ range(99999) | list | tojson(separators=(x, x)) }}",
    "{% set n = namespace(x=[1] * 999) %}{% for i in range(60) %}{% set n.x = [n.x] %}{% endfor %}"
    "{{ n.x | tojson(indent=99) }}",
    _LONG + "{{ x | wordwrap(1, wrapstring=x) }}",
    _LONG + "{{ x | title }}",
    "{{ ('<!--x-->' * 200000) | striptags }}",
    "{{ ('http://a.b ' * 200000) | urlize }}",
    "{{ ([[1]] * 200000) | sum(start=[]) }}",
    _LIST + "{{ x | pprint }}",
    "{{ 1.5 | round(10**9) }}",
    "{{ messages | map(attribute='0.' * 10**7) | list }}",
    "{{ range(99999) | map('center', 9999) | join }}",
    _LIST + "{% for i in range(9999) %}{% if x | sort == 1 %}{% endif %}{% endfor %}",
    _LONG + "{{ x | list }}",
    _LONG + "{{ x | sort }}",
    _LONG + "{{ x | groupby('a') }}",
    _LONG + "{{ x | trim(x) }}",
    "{% filter center(10**9) %}{% endfilter %}",
    _LIST + "{{ ((x | map('string') | list) * 1) | unique | list }}",
    "{{ ('9' * 3000000) | int(base=16) }}",
    "{{ ('a' * 4000) | urlize(rel='b' * 10**6) }}",
    # Methods.
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '1'.zfill(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    _SHORT + "{{ x.replace('a', x) }}",
    _SHORT + "{{ x.join(x) }}",
    _SHORT + "{{ x.translate({97: x}) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ '{a:{b}}'.format_map({'a': 1, 'b': 10**9}) }}",
    "{{ ('{:9999}' * 9999).format(*([1] * 9999)) }}",
    "{{ (5).to_bytes(10**9) }}",
    _LONG + "{{ x.strip(x ~ 'b') }}",
    "{{ ('é' * 99999).encode('punycode') }}",
    "{{ ('é' * 99999).encode(encoding='idna') }}",
    "{{ ('a' | safe).ljust(10**9) }}",
    "{{ ('a' | e).replace('a', 'b' * 10**7 * 10) }}",
    "{{ 'a' | attr('center')(10**9) }}",
    "{{ strftime_now('%999999999Y' * 9999) }}",
    _LONG + "{% for i in range(999) %}{% set y = x.split('a') %}{% endfor %}",
]


@contextlib.contextmanager
def _little_memory():
    """300 MB of data above what is held, where the system says how much that is."""
    status = pathlib.Path("/proc/self/status")
    held = re.search(r"VmData:\s+(\d+) kB", status.read_text() if status.exists() else "")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if held:
        most = int(held[1]) * 1024 + 300 * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("source", _HOSTILE, ids=range(len(_HOSTILE)))
def test_limits(source, monkeypatch):
    """A sentence, soon, and within little memory."""
    monkeypatch.setattr(chat_limits, "_MOST_SECONDS", 0.03)
    with time_limit(), _little_memory(), pytest.raises(UserError) as raised:
        _template(source).render(_USER)
    said = str(raised.value)
    assert re.search(r"\(it |\(its |no Jinja|'lipsum' is undefined|OverflowError", said), said
    assert "MemoryError" not in said


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + " }}",
        "{{ " + "1" * 5000 + " }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
        "{{ [1, 2] | random }}",
        "{{ a }}" * 99_999,
    ],
    ids=range(5),
)
def test_what_is_no_jinja(source):
    with time_limit(), pytest.raises(UserError, match="no Jinja"):
        _template(source)


def test_limits_are_far_from_long_conversations():
    """A quarter of a million characters in 200 messages with calls, through what templates do."""
    text = "A line of text, 100 % {of it}.\n" * 40
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text, "calls": [{"a": {"b": i}}]}
        for i in range(200)
    ]
    source = (
        "{% set ns = namespace(last=-1, n=[]) %}{% for m in messages[::-1] %}"
        "{% set i = loop.index0 %}"
        "{% if m.role == 'user' and '<x>' not in m.content and ns.last < 0 %}"
        "{% set ns.last = i %}{% endif %}{% set ns.n = ns.n + [i] %}{% endfor %}"
        "{{ messages | tojson(indent=4) | length }}"
        "{{ messages | map(attribute='content') | join('-') | length }}{% for m in messages %}"
        "{{ m.role | title ~ ': ' ~ m.content | trim }}"
        "{{ m.content.replace('line', 'word').split('</think>')[-1].lstrip('\\n') | length }}"
        "{{ m.content | indent(4) | length }}{{ '%s %5d' % (m.role, loop.index) }}"
        "{{ '{:>9}'.format(m.role) }}{% for c in m.calls %}{{ c | tojson }}{% endfor %}"
        "{{ (messages | selectattr('role', 'equalto', 'user') | list)[:2] | length }}"
        "{{ m.content | replace('text', m.role) | default('x' * 1000) | length }}{% endfor %}"
    )
    text = _template(source).render(messages)
    assert len(text) > 250_000 and "    user" in text and "User: A line" in text


def test_limits_begin_anew_for_each_conversation(monkeypatch):
    monkeypatch.setattr(chat_limits, "_MOST_WORK", 10_000)
    template = _template("{% for i in range(100) %}{% endfor %}done")
    assert [template.render(_USER) for _ in range(3)] == ["done"] * 3


def test_computing_has_a_limit_of_time(monkeypatch):
    """What is within all other limits ends by the clock."""
    monkeypatch.setattr(chat_limits, "_MOST_SECONDS", 0.05)
    source = "{% for i in range(9999) %}{% for j in range(99) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=r"it takes more than 0\.05 seconds"):
        _template(source).render(_USER)


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
