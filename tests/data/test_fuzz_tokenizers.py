"""No bytes in a tokenizer's files are a traceback or a hang: see helpers/fuzz.py."""

from __future__ import annotations

import functools
import json
import pathlib

import pytest
import tiny_checkpoint
from fuzz import FEW, MANY, Hang, fuzz
from marks import slow

from fp8rl_jax.data import ChatTemplate, PretrainedTokenizer
from fp8rl_jax.data.chat_trial import check_template
from fp8rl_jax.policy.source import directory_config, usual_temperature


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("model"))


def _use(directory: pathlib.Path) -> None:
    tokenizer = PretrainedTokenizer(directory)
    tokenizer.decode(tokenizer.encode("the cat 12 <|turn|> é🦜")[:64])
    if tokenizer.chat_template is not None:
        tokenizer.chat_template.render([{"role": "user", "content": "hi"}])


def _reader(model, file: str, use=_use):
    """(reads bytes as one file of a directory whose others are good, that file's good bytes)"""
    good = (model / file).read_bytes() if (model / file).exists() else b'{"eos_token": "<|end|>"}'

    def read(content: bytes) -> None:
        (model / file).write_bytes(content)
        try:
            use(model)
        finally:
            (model / file).write_bytes(good)

    return read, good


@pytest.mark.parametrize("count", [slow(MANY)])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer(file, count, model):
    read, good = _reader(model, file)
    more = []
    if file == "tokenizer.json":
        content = json.loads(good)
        content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
        content["padding"] = {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": 4,
            "pad_id": 3,
            "pad_type_id": 0,
            "pad_token": "<|pad|>",
        }
        content["truncation"] = {
            "direction": "Right",
            "max_length": 16,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|turn|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<|turn|>": {"id": "<|turn|>", "ids": [1], "tokens": ["<|turn|>"]}},
        }
        more = [json.dumps(content).encode()]
    fuzz(file, read, [good, *more], count)


def _settings(directory: pathlib.Path) -> None:
    config = directory_config(str(directory))
    usual_temperature(config)
    PretrainedTokenizer(directory)


@pytest.mark.parametrize("count", [slow(MANY)])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_settings(file, count, model):
    read, good = _reader(model, file, _settings)
    more = b'{"do_sample": true, "top_k": 20, "top_p": 0.9, "temperature": 0.6, "eos_token_id": 2}'
    fuzz(file, read, [good, more] if file.startswith("generation") else [good], count)


@pytest.mark.parametrize("count", [FEW, slow(MANY)])
def test_chat_template(count):
    good = (
        "{% macro f(n) %}{{ n * 3 ~ 'x' }}{% endmacro %}{% set ns = namespace(i=2) %}"
        "{% for i in range(20) %}{% set ns.i = ns.i * ns.i + 7 %}{{ f('ab') }}{% endfor %}"
        "{{ '%5d' % 3 ** 4 }}{{ [1, 2] + [3] }}{% generation %}{{ messages | tojson }}"
        "{% endgeneration %}{{ strftime_now('%Y') }}"
    )

    @functools.cache
    def read(content: bytes) -> None:
        source = content.decode("utf-8", "replace")
        try:
            template = ChatTemplate(source, {"eos_token": "e"}, "here")
            template.render([{"role": "user", "content": "hi"}])
        except Hang:
            check_template(source, {"eos_token": "e"}, "here")  # refuses it before a run begins
            raise

    fuzz("chat template", read, [tiny_checkpoint.TEMPLATE.encode(), good.encode()], count)
