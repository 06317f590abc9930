"""Writes the tokenizer of a GGUF file in Hugging Face's form.

The file has a list of tokens and, of two kinds of vocabularies:

* gpt2: byte-level BPE by a list of merges, after a cut into words that has a name.
* llama: SentencePiece's BPE. Neighbours are merged whose union has the highest score
  (https://github.com/google/sentencepiece), so the merges follow from tokens and scores.

Not done: unigram and WordPiece vocabularies, other cuts, symbols with spaces beside a prefix.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from fp8rl_jax.base.errors import UserError, refused
from fp8rl_jax.models.hf.gguf_file import GGUF, INSTEAD, TOKENS

# llama.cpp's name of a cut -> what is cut before the words of GPT-2: nothing, digits, or what a
# pattern matches, instead of these words (the tokenizer.json of Qwen2 and of Llama 3).
_DIGITS = "digits"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = "llama-bpe"
_CUTS = {
    "smollm": _DIGITS,
    "gpt-2": "",
    "qwen2": _QWEN2,
    _LLAMA3: _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
}
_SPACE = "▁"  # what SentencePiece writes for a space
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_PLURALS = {str: "texts", int: "whole numbers", float: "numbers"}
_LONGEST = 1024  # characters of a token; those of published vocabularies have up to 256


def write_tokenizer(file: GGUF, directory: pathlib.Path) -> None:
    """Writes tokenizer.json, and tokenizer_config.json with special tokens and chat template.

    Raises:
      UserError: the vocabulary is of an unsupported kind, or damaged.
    """
    from tokenizers import AddedToken, processors

    kind = file.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"{file.where}: tokenizer.ggml.model is {kind!r}; only gpt2 and llama are supported: "
            f"{INSTEAD}"
        )
    tokens = _list(file, "tokens", str)
    types = _list(file, "token_type", int) or [1] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(
            f"{file.where}: tokenizer.ggml.token_type does not fit its tokens: {INSTEAD}"
        )
    if any(len(token) > _LONGEST for token in tokens):
        raise UserError(f"{file.where} has a token of more than {_LONGEST} characters: {INSTEAD}")
    tokenizer = (_sentencepiece if kind == "llama" else _byte_level)(file, tokens)
    named = {
        theirs.removesuffix("_id"): _token(file, tokens, role) for role, theirs in TOKENS.items()
    }
    turn = _of_number(file, tokens, "eot", file.end_of_turn())
    roles = {turn, *named.values()}  # some files type these as normal
    special = [
        token
        for token, number in zip(tokens, types, strict=True)
        if number == _CONTROL or token in roles
    ]
    own = [token for token, number in zip(tokens, types, strict=True) if number == _USER_DEFINED]
    prefixed = kind == "llama" and _prefixed(file)
    if prefixed and any(character.isspace() or character == _SPACE for character in "".join(own)):
        raise UserError(
            f"{file.where} has symbols with spaces and puts a space before texts "
            f"(tokenizer.ggml.add_space_prefix), which is not supported: {INSTEAD}"
        )
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in special])
    # SentencePiece finds its symbols after spaces were replaced. A prefix would begin them, too.
    replaced = kind == "llama" and not prefixed
    tokenizer.add_tokens([AddedToken(x, special=False, normalized=replaced) for x in own])
    begin, adds = named["bos_token"], file.get("tokenizer.ggml.add_bos_token")
    if adds is None:  # as llama.cpp
        adds = kind == "llama" or file.get("tokenizer.ggml.pre") == _LLAMA3
    if begin is not None and adds:
        with refused(f"{file.where} has a first token that cannot be used"):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[begin, "$A"], special_tokens=[(begin, tokens.index(begin))]
            )
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    about |= {name: token for name, token in named.items() if token is not None}
    template = file.get("tokenizer.chat_template")
    if isinstance(template, str):
        about["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def _byte_level(file: GGUF, tokens: list[str]) -> Any:
    """Returns the tokenizer of a vocabulary of kind gpt2, without its added tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    cut = file.get("tokenizer.ggml.pre")
    if not isinstance(cut, str) or cut not in _CUTS:
        raise UserError(
            f"{file.where}: tokenizer.ggml.pre is {cut!r}; only {', '.join(_CUTS)} are supported: "
            f"{INSTEAD}"
        )
    merges = [pair.split(" ", 1) for pair in _list(file, "merges", str)]
    if any(len(pair) != 2 for pair in merges):
        raise UserError(f"{file.where}: one of tokenizer.ggml.merges is no pair: {INSTEAD}")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    with refused(f"{file.where} has a vocabulary that cannot be used"):
        model = models.BPE(
            vocabulary,
            [(left, right) for left, right in merges],
            unk_token=_token(file, tokens, "unknown"),
            ignore_merges=cut == _LLAMA3,
        )
        tokenizer = Tokenizer(model)
    steps: list[Any] = []
    if _CUTS[cut] == _DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    elif _CUTS[cut]:
        steps.append(pre_tokenizers.Split(Regex(_CUTS[cut]), "isolated"))
        if cut != _LLAMA3:
            tokenizer.normalizer = normalizers.NFC()
    words = _CUTS[cut] in ("", _DIGITS)  # as GPT-2 cuts them
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUF, tokens: list[str]) -> Any:
    """Returns the tokenizer of a vocabulary of kind llama, without its added tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _list(file, "scores", float)
    if len(scores) != len(tokens):
        raise UserError(f"{file.where}: tokenizer.ggml.scores does not fit its tokens: {INSTEAD}")
    if file.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise UserError(
            f"{file.where}: tokenizer.ggml.remove_extra_whitespaces is not supported: {INSTEAD}"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    with refused(f"{file.where} has a vocabulary that cannot be used"):
        model = models.BPE(
            vocabulary,
            _merges(vocabulary, scores),
            unk_token=_token(file, tokens, "unknown"),
            fuse_unk=True,
            byte_fallback="<0x00>" in vocabulary,
        )
        tokenizer = Tokenizer(model)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    replaced = normalizers.Replace(" ", _SPACE)
    if _prefixed(file):  # as in the tokenizer.json of Llama 2, behind special tokens, too
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replaced
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _prefixed(file: GGUF) -> bool:
    """Returns whether SentencePiece puts a space before a text; Gemma's never does, even where a
    file does not say so."""
    stated = file.get("tokenizer.ggml.add_space_prefix")
    return file.get("general.architecture") != "gemma3" if stated is None else bool(stated)


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens whose union is a token, by its score, highest first."""
    found = []
    for token, number in vocabulary.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _list(file: GGUF, name: str, kind: type) -> list[Any]:
    """Returns the list tokenizer.ggml.NAME, or [] if it is absent."""
    values = file.get(f"tokenizer.ggml.{name}")
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise UserError(
            f"{file.where}: tokenizer.ggml.{name} is no list of {_PLURALS[kind]}: {INSTEAD}"
        )
    return values


def _token(file: GGUF, tokens: list[str], role: str) -> str | None:
    """Returns the token with id tokenizer.ggml.ROLE_token_id, or None if that is absent."""
    return _of_number(file, tokens, role, file.get(f"tokenizer.ggml.{role}_token_id"))


def _of_number(file: GGUF, tokens: list[str], role: str, number: object) -> str | None:
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise UserError(
            f"{file.where}: tokenizer.ggml.{role}_token_id is {number!r}, and there are "
            f"{len(tokens)} tokens: {INSTEAD}"
        )
    return tokens[number]
