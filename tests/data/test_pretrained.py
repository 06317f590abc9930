"""Tokenizers of Hugging Face directories: special tokens, end ids, text that comes in pieces."""

from __future__ import annotations

import json
import re
import types

import hypothesis
import pytest
import tiny_checkpoint
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, processors

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import (
    ByteTokenizer,
    ChatFormat,
    PretrainedTokenizer,
    encode_prompt,
    load_tokenizer,
    pad_prompts,
    tokenizer_files,
)
from fp8rl_jax.data.tokenizer import ReaderTokenizer


@pytest.fixture
def write(tmp_path):
    return lambda **changes: tiny_checkpoint.write(tmp_path / "model", **changes)


def test_ends_are_those_of_both_files(write):
    """The tokenizer's end token is first; generation_config.json adds others, once each."""
    tokenizer = PretrainedTokenizer(write())
    assert (tokenizer.eos_id, tokenizer.eos_ids) == (2, (2, 0))
    assert tokenizer.pad_id == 3 and tokenizer.bos_id is None
    ids = tokenizer.encode("the cat")
    for end in (0, 2):
        assert tokenizer.decode([*ids, end, *ids]) == "the cat"


@pytest.mark.parametrize(
    ("changes", "eos_ids"),
    [
        ({"generation_config": {"eos_token_id": 1}}, (2, 1)),
        ({"generation_config": {"eos_token_id": None}}, (2,)),
        (
            {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [0, 1]}},
            (2, 0, 1),
        ),
        ({"tokenizer_config": {"eos_token": None}}, (0, 2)),
    ],
)
def test_where_ends_come_from(changes, eos_ids, write):
    assert PretrainedTokenizer(write(**changes)).eos_ids == eos_ids


def test_padding_without_a_name_is_the_end(write):
    """Masks carry the truth, so the end token may fill the slots behind it."""
    tokenizer = PretrainedTokenizer(write(tokenizer_config={"pad_token": None}))
    assert tokenizer.pad_id == tokenizer.eos_id


def test_special_tokens_map_and_template_file(write):
    """The older file names tokens; a template file wins over the one in the settings."""
    path = write(tokenizer_config={"eos_token": None}, generation_config={"eos_token_id": None})
    (path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    (path / "chat_template.jinja").write_text("{{ eos_token }}!")
    tokenizer = PretrainedTokenizer(path)
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.chat_template.render([]) == "<|end|>!"


def test_several_templates_by_name(write):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = write(tokenizer_config={"chat_template": named})
    assert PretrainedTokenizer(path).chat_template.render([]) == "d"
    path = write(tokenizer_config={"chat_template": None})
    assert PretrainedTokenizer(path).chat_template is None


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("mapping", [False, True])
def test_a_template_for_tools(files, mapping, write):
    """It is taken where a prompt has tools, as by transformers 5; files come before settings."""
    named = [
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
        {"name": ["x"]},
        {"name": "default", "template": "d"},
    ]
    if mapping:
        named = {"tool_use": "{{ tools[0].name }}", "default": "d"}
    path = write(tokenizer_config={"chat_template": named})
    tools = {"tools": [{"name": "add"}]}
    if files:
        (path / "chat_template.jinja").write_text("f")
        assert "no tools" in _refused(
            lambda: PretrainedTokenizer(path).chat_template.render([], tools)
        )
        (path / "additional_chat_templates").mkdir()
        for name, text in {"tool_use": "g {{ tools[0].name }}", "rag": "{%"}.items():
            (path / f"additional_chat_templates/{name}.jinja").write_text(text)
        assert path / "additional_chat_templates/tool_use.jinja" in tokenizer_files(str(path))
    template = PretrainedTokenizer(path).chat_template
    assert template.render([]) == ("f" if files else "d")
    assert template.render([], tools) == ("g add" if files else "add")
    assert ChatFormat(template).render(
        {"messages": [{"role": "user", "content": "a"}], **tools}
    ) == ("g add" if files else "add")


def _refused(call) -> str:
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    "value", [-1, 99999, "2", 2.0, True, [[2]], [2, "0"], [None], {"a": 2}, 10**30]
)
@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_ends_that_are_no_ids(value, file, write):
    changes = {"generation_config": {"eos_token_id": None}} | {file: {"eos_token_id": value}}
    said = _refused(lambda: PretrainedTokenizer(write(**changes)))
    assert re.search(
        rf"/{file}\.json has the eos_token_id .*: write a whole number from 0 to 351", said
    )


def test_an_end_may_be_a_row_of_the_model_alone(write):
    """And without a config.json the tokenizer's tokens count."""
    path = write(generation_config={"eos_token_id": [2, 351]})
    assert PretrainedTokenizer(path).eos_ids == (2, 351)
    (path / "config.json").unlink()
    assert "from 0 to 319" in _refused(lambda: PretrainedTokenizer(path))


def test_a_begin_that_is_no_token(write):
    path = write()
    reader = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    reader.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 5000)]
    )
    reader.save(str(path / "tokenizer.json"))
    assert "puts the id 5000 in front of a text, and has no token" in _refused(
        lambda: PretrainedTokenizer(path)
    )


@pytest.mark.parametrize("setting", [None, False, True])
@pytest.mark.parametrize(
    ("single", "begin"),
    [("<|turn|> $A", 1), ("<|end|> $A <|turn|>", 0), ("$A <|turn|>", None), (None, None)],
)
def test_begin_of_sequence(setting, single, begin, write):
    """The post-processor of tokenizer.json decides, not add_bos_token: as transformers 5."""
    path = write(tokenizer_config={"bos_token": "<|turn|>", "add_bos_token": setting})
    if single:
        reader = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        reader.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<|end|>", 0), ("<|turn|>", 1)]
        )
        reader.save(str(path / "tokenizer.json"))
    tokenizer = PretrainedTokenizer(path)
    assert tokenizer.bos_id == begin
    ids = tokenizer.encode("the\n")
    assert encode_prompt("the", tokenizer) == ([] if begin is None else [begin]) + ids
    assert 1 not in ids


def test_two_tokens_in_front_of_a_text_are_refused(write):
    path = write()
    reader = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    reader.post_processor = processors.TemplateProcessing(
        single="<|turn|> <|end|> $A", special_tokens=[("<|end|>", 0), ("<|turn|>", 1)]
    )
    reader.save(str(path / "tokenizer.json"))
    with pytest.raises(UserError, match="puts 2 tokens in front"):
        PretrainedTokenizer(path)


_CALL = {
    "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 16},
        "direction": "Left",
        "pad_to_multiple_of": 8,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    },
}


@pytest.mark.parametrize("option", ["truncation", "padding", "dropout"])
@pytest.mark.parametrize("directory", [True, False])
def test_options_of_a_call_have_no_effect(option, directory, write):
    """What somebody's call left in tokenizer.json is no part of the tokenizer."""
    path = write()
    texts = ["the cat sat on the mat", "What is 5 + 6? The answer is 11."]
    ids = [PretrainedTokenizer(path).encode(text) for text in texts]
    content = json.loads((path / "tokenizer.json").read_text())
    if option == "dropout":
        content["model"]["dropout"] = 0.9
    else:
        content[option] = _CALL[option]
    (path / "tokenizer.json").write_text(json.dumps(content))
    names = {"bos_token": "<|turn|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    file = types.SimpleNamespace(tokenizer=str(path / "tokenizer.json"), **names)
    tokenizer = PretrainedTokenizer(path) if directory else load_tokenizer(file)
    assert [tokenizer.encode(text) for text in texts] == ids
    assert [len(encode_prompt(text, tokenizer)) for text in texts] == [
        len(row) + len(tokenizer.encode("\n")) + (not directory) for row in ids
    ]


def test_options_of_a_call_in_the_settings_have_no_effect(write):
    """What `save_pretrained` writes of the arguments that its tokenizer was made with."""
    plain = PretrainedTokenizer(write())
    tokenizer = PretrainedTokenizer(
        write(
            tokenizer_config={
                "split_special_tokens": True,
                "model_max_length": 4,
                "max_length": 4,
                "stride": 1,
                "padding_side": "left",
                "truncation_side": "left",
                "pad_to_multiple_of": 8,
                "truncation_strategy": "longest_first",
                "add_eos_token": True,
                "clean_up_tokenization_spaces": True,
                "return_token_type_ids": True,
            }
        )
    )
    text = "<|turn|>What is 5 + 6 ? The answer is 11 .<|stop|>"
    assert tokenizer.encode(text) == plain.encode(text)
    ids = plain.encode("the cat . 5 ?")
    assert tokenizer.decode(ids) == plain.decode(ids) == "the cat . 5 ?"


_PLAIN = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": False,
}


@pytest.mark.parametrize(
    ("config", "files", "text", "ids"),
    [
        ({"320": {"content": "<think>", **_PLAIN}}, {}, "x <think>3", [91, 224, 320, 22]),
        (
            {"320": {"content": "<think>", **_PLAIN, "lstrip": True}},
            {},
            "x <think>3",
            [91, 320, 22],
        ),
        (
            {"321": {"content": "<b>", **_PLAIN}, "320": {"content": "<a>", **_PLAIN}},
            {},
            "<a><b>",
            [320, 321],
        ),
        ({"260": {"content": "at", **_PLAIN}}, {}, "the cat", [266, 268, 260]),
        (None, {"added_tokens.json": {"<think>": 320}}, "x <think>3", [91, 224, 320, 22]),
        (None, {"added_tokens.json": {"<|turn|>": 1}}, "<|turn|>3", [1, 22]),
    ],
    ids=range(6),
)
def test_tokens_that_another_file_lists(config, files, text, ids, write):
    """Right ids are those of transformers 5.24 for the same files."""
    path = write(tokenizer_config={"added_tokens_decoder": config})
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    tokenizer = PretrainedTokenizer(path)
    assert tokenizer.encode(text) == ids
    assert tokenizer.vocab_size > max(ids)
    assert set(tokenizer_files(str(path))) >= {path / name for name in files}


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        ({"added_tokens_decoder": {"330": {"content": "<x>"}}}, {}, "'<x>' with the id 330.* 320"),
        ({"added_tokens_decoder": {"7": {"content": "<|turn|>"}}}, {}, "with the id 7.* it 1"),
        ({"added_tokens_decoder": {"one": {"content": "<x>"}}}, {}, "id 'one'"),
        ({"added_tokens_decoder": {"1": "<|turn|>"}}, {}, "no content for '1'"),
        ({"added_tokens_decoder": []}, {}, "no object"),
        ({"additional_special_tokens": ["<|turn|>", "<x>"]}, {}, "'<x>' as additional_special"),
        ({"extra_special_tokens": {"image_token": "<x>"}}, {}, "'<x>' as extra_special_tokens"),
        ({}, {"added_tokens.json": {"<x>": 319}}, "'<x>' with the id 319"),
        ({}, {"added_tokens.json": {"<x>": None}}, "id None"),
        ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<x>"]}}, "'<x>'"),
    ],
    ids=range(10),
)
def test_lists_of_tokens_that_contradict_each_other(config, files, words, write):
    path = write(tokenizer_config=config)
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=words):
        PretrainedTokenizer(path)


@pytest.mark.parametrize(("decoder", "eos"), [(None, 1), ({}, 0)])
def test_of_two_names_the_one_of_transformers_counts(decoder, eos, write):
    """special_tokens_map.json is read first only where there is no added_tokens_decoder."""
    path = write(tokenizer_config={"eos_token": "<|end|>", "added_tokens_decoder": decoder})
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|turn|>"}')
    assert PretrainedTokenizer(path).eos_id == eos


def test_special_tokens_have_text(write):
    """A reward sees <think>; begin and padding have no text, and an end is the end."""
    path = write(
        tokenizer_config={
            "bos_token": "<|turn|>",
            "added_tokens_decoder": {
                str(320 + i): {"content": token, "special": True}
                for i, token in enumerate(("<think>", "</think>", "<answer>", "</answer>"))
            },
        }
    )
    tokenizer = PretrainedTokenizer(path)
    text = "<think>3+4</think><answer>7</answer>"
    ids = tokenizer.encode(text)
    assert ids[0] == 320
    assert tokenizer.decode([1, *ids, 3, 2, *ids]) == text
    pieces = tokenizer.detokenizer()
    assert "".join([*(pieces.push([i]) for i in (1, *ids, 3)), pieces.finish()]) == text


def test_special_tokens_in_a_text_become_ids(write):
    """A rendered template is text; its markers must be the tokens that the model knows."""
    tokenizer = PretrainedTokenizer(write())
    assert tokenizer.encode("<|turn|>the<|stop|>")[0] == 1
    assert tokenizer.encode("<|turn|>the<|stop|>")[-1] == 2


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, r"has no tokenizer\.json"),
        ("tokenizer.json", "{}", r"is no tokenizer\.json"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is damaged"),
        ("tokenizer_config.json", "[]", r"it holds no object"),
        ("tokenizer_config.json", '{"eos_token": "<x>"}', r"'<x>' as eos_token"),
        ("tokenizer_config.json", '{"chat_template": "{%"}', r"no Jinja"),
        ("generation_config.json", "{}", r"names no end of sequence"),
    ],
)
def test_directories_that_cannot_be_read(file, content, words, write):
    path = write(tokenizer_config={"eos_token": None})
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_text(content)
    with pytest.raises(UserError, match=words) as error:
        PretrainedTokenizer(path)
    assert "\n" not in str(error.value)


def test_load_tokenizer_takes_directories_and_the_checkpoint(write):
    path = write()
    config = types.SimpleNamespace(tokenizer=str(path))
    assert isinstance(load_tokenizer(config), PretrainedTokenizer)
    config.tokenizer = "checkpoint"
    assert isinstance(load_tokenizer(config, str(path)), PretrainedTokenizer)
    with pytest.raises(UserError, match=r"model\.checkpoint is empty"):
        load_tokenizer(config)
    assert path / "tokenizer_config.json" in tokenizer_files("checkpoint", str(path))
    assert tokenizer_files("byte", str(path)) == []


def test_a_prompt_without_tokens_is_refused(tmp_path):
    """A word-level tokenizer has no token for a blank question: nothing samples from length 0."""
    reader = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "one": 1}, "</s>"))
    reader.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    reader.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = PretrainedTokenizer(tmp_path)
    assert pad_prompts(["one"], tokenizer, 4)[0].tolist() == [[1, 0, 0, 0]]
    with pytest.raises(UserError, match=r"'  ' has no token"):
        pad_prompts(["one", "  "], tokenizer, 4)


# Text in pieces.


def _byte_fallback() -> tokenizers.Tokenizer:
    """A tokenizer in SentencePiece's manner: words begin with a mark, unknown letters are bytes."""
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, "▁": 257, "a": 258}
    vocab |= {"b": 259, "▁a": 260, "é": 261}
    model = tokenizers.models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    reader = tokenizers.Tokenizer(model)
    reader.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    reader.add_special_tokens(["<s>", "</s>"])
    return reader


def _words() -> tokenizers.Tokenizer:
    reader = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<u>": 0, "one": 1, "two": 2}, "<u>")
    )
    reader.add_special_tokens(["<s>", "</s>"])
    return reader


_READERS = {
    "byte level": (tiny_checkpoint.byte_level(), 2),
    "byte fallback": (_byte_fallback(), 263),
    "words": (_words(), 4),
}


def _detokenizer(reader, *ends: int):
    tokenizer = ReaderTokenizer(reader)
    tokenizer.eos_ids = ends
    return tokenizer.detokenizer()


def _pieces(detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Texts of pushing `ids` in pieces of these sizes, and what finish adds."""
    out = []
    for size in sizes:
        out.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    return [*out, detokenizer.push(ids), detokenizer.finish()]


@pytest.mark.parametrize("name", _READERS)
@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(st.data())
def test_pieces_make_the_whole(name, data):
    """Any ids, special, unknown and half characters included, in pieces of any size."""
    reader, end = _READERS[name]
    ids = data.draw(st.lists(st.integers(0, reader.get_vocab_size() + 1), max_size=24))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=6))
    ends = [i for i, token in enumerate(ids) if token == end]
    whole = reader.decode(ids[: ends[0]] if ends else ids, skip_special_tokens=False)
    pieces = _pieces(_detokenizer(reader, end), ids, sizes)
    assert "".join(pieces) == whole


def test_a_run_of_bytes_goes_on_behind_a_token_without_text():
    """Padding is left out before bytes are decoded: the run around it is a single run. Another
    special token has text, and ends a run."""
    reader, _ = _READERS["byte fallback"]
    good, bad = 100, 182
    for ids in ([good, 262, bad], [good, 262, 999, bad, 258], [good, 262, 258]):
        for without in ({262}, set()):
            tokenizer = ReaderTokenizer(reader)
            tokenizer.eos_ids, tokenizer._textless = (), frozenset(without)
            shown = [token for token in ids if token not in without]
            text = "".join(_pieces(tokenizer.detokenizer(), ids, [1, 1]))
            assert text == reader.decode(shown, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["byte level", "bytes"])
@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.text(max_size=12))
@hypothesis.example("漢字🦜é")
def test_no_piece_holds_half_a_character(name, text):
    """Token by token, a good text never shows U+FFFD, and each piece is shown at once."""
    hypothesis.assume("\ufffd" not in text)
    if name == "bytes":
        tokenizer = ByteTokenizer()
        ids, pieces = tokenizer.encode(text), tokenizer.detokenizer()
    else:
        reader, end = _READERS[name]
        ids, pieces = reader.encode(text).ids, _detokenizer(reader, end)
    hypothesis.assume(not any(special in text for special in tiny_checkpoint.SPECIAL))
    shown = [pieces.push([token]) for token in ids]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == text
    assert pieces.finish() == ""


def test_nothing_is_shown_behind_the_end():
    tokenizer = ByteTokenizer()
    pieces = tokenizer.detokenizer()
    assert pieces.push([104, 105, tokenizer.eos_id, 33]) == "hi"
    assert pieces.push([33]) == "" and pieces.finish() == ""


def test_half_a_character_at_the_end_is_shown_by_finish():
    pieces = ByteTokenizer().detokenizer()
    assert pieces.push([97, 0xE6, 0xBC]) == "a"
    assert pieces.finish() == "\ufffd"
