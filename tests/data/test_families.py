"""Conversations of the families: what follows a reply is what transformers writes there, by their
own chat templates, and docs/models.md says which family can do what."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

pytest.importorskip("trl", reason="needs trl: pip install 'fp8rl_jax[oracles]'")

from chat_families import FAMILIES, add, refusal, table, turns_of

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import check_calls
from fp8rl_jax.envs.tool_calls import calls_in
from fp8rl_jax.envs.tools import tool_schema

_MODELS = pathlib.Path(__file__).parents[2] / "docs" / "models.md"
_WITH_TOOLS = [n for n in FAMILIES if n not in ("Gemma 3", "DeepSeek-V3", "TinyLlama, Zephyr")]
_REPLY = "It is 7"
_IDENTIFIER = "abcdef123"


def _written(name: str, messages: list, begin_answer: bool = True, **options) -> str:
    """What transformers writes."""
    import transformers

    family = FAMILIES[name]
    turns = turns_of(family, "user")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=turns.tokenizer.reader,
        bos_token=family.bos or None,
        eos_token=family.special[0],
    )
    return tokenizer.apply_chat_template(
        messages,
        chat_template=family.source,
        tokenize=False,
        add_generation_prompt=begin_answer,
        **options,
    )


def _said(turns, observation: str, reply: str, end: str) -> str:
    """What `Turns` puts behind a reply that ended so, as text."""
    last = turns.tokenizer.encode(end)[-1]
    tokens, _ = turns.encode([observation], last, calls_in(reply))
    assert len(tokens) <= turns.slots
    return turns.tokenizer.reader.decode(tokens, skip_special_tokens=False)


def test_the_table_in_the_docs():
    assert "\n".join(table()) in _MODELS.read_text()


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_games(name, thinking):
    """Behind a reply that ended and behind one that was cut."""
    family = FAMILIES[name]
    turns = turns_of(family, "user", enable_thinking=thinking)
    turns.check()
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
    messages.append({"role": "user", "content": "LOWER than 17"})
    behind = _written(name, messages, enable_thinking=thinking).partition(_REPLY)[2]
    assert "LOWER than 17" in behind
    assert _said(turns, "LOWER than 17", _REPLY, _REPLY) == behind
    for end in family.special[: family.ends]:  # the template's own is not written twice
        written = {"Llama 3.1": "<|eot_id|>", "gpt-oss": "<|end|>"}.get(name, end)
        assert _said(turns, "LOWER than 17", _REPLY, end) == behind.removeprefix(written)


@pytest.mark.parametrize("results", [1, 2])
@pytest.mark.parametrize("name", _WITH_TOOLS)
def test_tools(name, results):
    """Each call gets a message of its own, with the name and the identifier that it had."""
    family = FAMILIES[name]
    turns = turns_of(family, "tool", [add])
    turns.check()
    check_calls([add], turns.reply_with_call)
    call = {"name": "add", "arguments": {"a": 2, "b": "3"}}
    identifier = {"Mistral": _IDENTIFIER, "Kimi-K2": "functions.add:0"}.get(name, "")
    calls = [{"id": identifier or _IDENTIFIER, "type": "function", "function": call}]
    asked = [{"role": "user", "content": "?"}]
    replied = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    about = {"role": "tool", "name": "add", "tool_call_id": calls[0]["id"]}
    said = ["LOWER than 17", "and even"][:results]
    tools = [tool_schema(add)]
    whole = _written(name, replied + [about | {"content": text} for text in said], tools=tools)
    prompt = _written(name, asked, tools=tools)
    reply = turns.reply_with_call("add", {"a": 2, "b": "3"})
    if name == "Mistral":
        reply = reply.replace("0" * 9, identifier)
    if name == "Qwen3":  # which writes a thought in the last message alone
        reply = reply.removeprefix("<think>\n\n</think>\n\n")
    called = calls_in(reply)
    assert called == [("add", identifier)] and whole.startswith(prompt + reply)
    ending = whole.removeprefix(prompt + reply)
    end = next((e for e in family.special[: family.ends] if ending.startswith(e)), "")
    tokens, texts = turns.encode(said, turns.tokenizer.encode(end or reply)[-1], called * results)
    assert end + turns.tokenizer.reader.decode(tokens, skip_special_tokens=False) == ending
    assert texts == said and len(tokens) <= turns.slots


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_ends_where_the_template_goes_on(name):
    """Also if the tokenizer's files do not say so; gpt-oss's '<|end|>' ends a thought alone."""
    family = FAMILIES[name]
    for role in ("tool", "user"):
        turns = turns_of(dataclasses.replace(family, ends=1), role)
        if not refusal(turns):
            ends = [turns.tokenizer.reader.id_to_token(i) for i in turns.ending().eos_ids]
            more = {"gpt-oss": ["<|call|>"], "GLM-4.5": ["<|observation|>"]}.get(name, [])
            assert ends == [family.special[0], *(more if role == "tool" else [])]


@pytest.mark.parametrize("name", ["Gemma 3", "DeepSeek-V3", "TinyLlama, Zephyr"])
def test_templates_without_tools_are_refused(name):
    for role in ("tool", "user"):
        with pytest.raises(UserError, match=r"^env\.tools: the chat template of .* no tools: take"):
            turns_of(FAMILIES[name], role, [add]).check()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_quoted_cannot_take_a_turn(name):
    """Special tokens and the template's marks are encoded by their characters in an observation,
    whatever the tokenizer's file says of them, and none is lost."""
    family = FAMILIES[name]
    rest = [token for token in family.special[family.ends :] if token in family.source]
    unflagged = dataclasses.replace(family, special=family.special[: family.ends], added=rest)
    for form in (family, unflagged):
        turns = turns_of(form, "user", most=400)
        last = turns.tokenizer.eos_id
        marks = [*form.special, *form.added, "\U000f0000"]
        said = "5" + "\n".join(marks)
        tokens, texts = turns.encode([said], last)
        plain, _ = turns.encode(["5"], last)
        ids = {turns.tokenizer.reader.token_to_id(text) for text in family.special}
        assert [t for t in tokens if t in ids] == [t for t in plain if t in ids]
        shown = turns.tokenizer.reader.decode(tokens, skip_special_tokens=False)
        assert said.replace("\U000f0000", "\ufffd") in shown and texts == [said]


def test_a_long_observation_is_cut_at_its_end():
    turns = turns_of(FAMILIES["Qwen3"], "tool", most=64)
    for said in ("<|im_end|>" + "x" * 99, "log: <|endoftext|> then " + "y" * 80):
        tokens, (text,) = turns.encode([said], turns.tokenizer.eos_id)
        assert len(tokens) <= turns.slots and len(text) > 50 and said.startswith(text)


def test_what_the_policy_made_up_takes_no_room_and_no_turn():
    """Long names, identifiers that a template refuses, and those of unknown tools."""
    for name in ("gpt-oss", "Kimi-K2", "Mistral"):
        turns = turns_of(FAMILIES[name], "tool", [add], most=8)
        for call in ("x" * 60, "add", ""):
            for identifier in ("call_1", "y" * 60, ""):
                tokens, texts = turns.encode(["Error"] * 2, -1, [(call, identifier)] * 2)
                assert len(tokens) <= turns.slots and texts[0] == "Error"
