"""Reads the tokenizer of a Hugging Face directory, from all of its files.

tokenizer.json
    the tokenizer, read by the `tokenizers` library; its post-processor decides which token begins a
    prompt (`add_bos_token` is ignored).
tokenizer_config.json, special_tokens_map.json
    names of the special tokens, the chat template.
`added_tokens_decoder` of tokenizer_config.json, else added_tokens.json
    tokens with their ids; those that tokenizer.json lacks are added.
chat_template.jinja, additional_chat_templates/tool_use.jinja
    the chat templates, if they have files of their own.
generation_config.json, else config.json
    ids that end a response, often several: an instruction-tuned model ends a turn and a document
    with different ones. The tokenizer's own end token is always among them.

Where files disagree, the choice is that of transformers 5; a token whose id contradicts
tokenizer.json is an error.

Not read: SentencePiece's tokenizer.model, and code that comes with a model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from fp8rl_jax.base.errors import UserError, refused
from fp8rl_jax.base.json_file import read_bytes, read_json
from fp8rl_jax.data.chat import ChatTemplate
from fp8rl_jax.data.chat_trial import check_template
from fp8rl_jax.data.tokenizer import ReaderTokenizer, read_reader

# Every file that a tokenizer depends on.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "config.json",
)
_TEMPLATES = ("default", "tool_use")  # the second is for prompts with tools
_LARGEST = 1e9
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if there is no file.

    Raises:
      UserError: the file does not hold an object.
    """
    if not os.path.lexists(path):
        return {}
    with _readable(path):
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        json.dumps(content, ensure_ascii=False).encode()  # raises for lone surrogates
    return content


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Turns the errors of reading a file into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): put the file back") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): put the file back") from None


def read_number(path: pathlib.Path, settings: dict[str, Any], name: str) -> float | None:
    """Returns the number under a name in `settings`; None if there is none.

    Args:
      path: file of the settings, for messages.
      settings: object from `read_object`.

    Raises:
      UserError: the number is NaN, or at least 1e9 in size.
    """
    value = settings.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not abs(value) < _LARGEST:
        raise UserError(f"{path}: {name} is {value}; write a number below {_LARGEST:g}")
    return value


class PretrainedTokenizer(ReaderTokenizer):
    """A Hugging Face tokenizer with its special tokens and its chat template. See `Tokenizer`.

    `pad_id` is `eos_id` if the files name no padding token: masks, not ids, mark padding.
    """

    def __init__(self, directory: str | pathlib.Path):
        """Raises UserError if files are missing, damaged, or contradict each other."""
        path = pathlib.Path(directory)
        if not os.path.isfile(path / "tokenizer.json"):
            old = " (tokenizer.model alone is not read)" if any(path.glob("*.model")) else ""
            raise UserError(
                f"data.tokenizer: {path} has no tokenizer.json{old}; name a directory that has "
                "one, or write 'byte'"
            )
        settings = read_object(path / "tokenizer_config.json")
        mapped = read_object(path / "special_tokens_map.json")
        # Without a list of added tokens, transformers 5 reads the older file first.
        listed = settings.get("added_tokens_decoder") is not None
        first, second = (settings, mapped) if listed else (mapped, settings)
        names = _special_tokens(second) | _special_tokens(first)
        further = [*_further_tokens(settings), *_further_tokens(mapped)]
        reader = read_reader(path / "tokenizer.json")
        _add_tokens(reader, path, settings, {*names.values(), *(token for _, token in further)})
        super().__init__(reader, str(path / "tokenizer.json"))
        self._where = path
        for kind, token in further:
            self._id(kind, token)
        ids = {kind: self._id(kind, token) for kind, token in names.items()}
        self.eos_ids = self._ends(ids.get("eos_token"))
        self.eos_id = self.eos_ids[0]
        self.pad_id = ids.get("pad_token", self.eos_id)
        self.bos_id = self._begin()
        known = (self.bos_id, ids.get("bos_token"), ids.get("pad_token"))
        self._textless = frozenset(i for i in known if i is not None)
        where = f"data.tokenizer: {path}"
        sources = _template_sources(path, settings)
        for template in sources.values():
            check_template(template, names, where)
        for_tools = None
        if (source := sources.get("tool_use")) is not None:
            for_tools = ChatTemplate(source, names, f"{where} (tool_use)")
        if (source := sources.get("default")) is not None:
            self.chat_template = ChatTemplate(source, names, where, for_tools)

    def _id(self, kind: str, token: str) -> int:
        """Returns the id of a token that the files name as `kind`."""
        number = self._reader.token_to_id(token)
        if number is None:
            raise UserError(
                f"data.tokenizer: {self._where} names {token!r} as {kind}, and its tokenizer.json "
                "has no such token: fix tokenizer_config.json"
            )
        return number

    def _ends(self, eos: int | None) -> tuple[int, ...]:
        """Returns the ids that end a response: `eos`, that of the tokenizer's files, and others."""
        config = read_object(self._where / "config.json")
        parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
        sizes = [n for part in parts if type(n := part.get("vocab_size")) is int]
        # A model may have more rows than the tokenizer has tokens.
        most = min(max([self.vocab_size, *sizes]), 2**31)
        ids = [] if eos is None else [eos]
        for file in ("generation_config.json", "config.json"):
            path = self._where / file
            if further := _end_ids(path, read_object(path).get("eos_token_id"), most):
                ids += further
                break
        if not ids:
            raise UserError(
                f"data.tokenizer: {self._where} names no end of sequence: set eos_token in its "
                "tokenizer_config.json, or eos_token_id in its generation_config.json"
            )
        return tuple(dict.fromkeys(ids))

    def _begin(self) -> int | None:
        """Returns the id that the post-processor puts before a text; None if it puts none."""
        with refused(self._failing):
            encoding = self._reader.encode("a")
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        front = [token for token, _ in itertools.takewhile(lambda pair: pair[1], marked)]
        if len(front) > 1:
            raise UserError(
                f"data.tokenizer: {self._where / 'tokenizer.json'} puts {len(front)} tokens in "
                "front of a text, and one is supported: change its post_processor"
            )
        if front and self._reader.id_to_token(front[0]) is None:
            raise UserError(
                f"data.tokenizer: {self._where / 'tokenizer.json'} puts the id {front[0]} in front "
                "of a text, and has no token with that id: change its post_processor"
            )
        return front[0] if front else None


def _end_ids(path: pathlib.Path, value: Any, most: int) -> list[int]:
    """Returns the ids in a file's `eos_token_id`, which holds none, one, or a list.

    Raises:
      UserError: one of them is not an id below `most`.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for number in ids:
        if type(number) is not int or not 0 <= number < most:
            raise UserError(
                f"data.tokenizer: {path} has the eos_token_id {value!r:.60}: write a whole "
                f"number from 0 to {most - 1}, or a list of such"
            )
    return ids


def _further_tokens(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (name of the list, token) for special tokens in lists, which have no names."""
    for kind in ("extra_special_tokens", "additional_special_tokens"):
        listed = settings.get(kind)
        values = list(listed.values()) if isinstance(listed, dict) else listed
        for value in values if isinstance(values, list) else ():
            if (token := _content(value)) is not None:
                yield kind, token


def _add_tokens(
    reader: Any, path: pathlib.Path, settings: dict[str, Any], special: set[str]
) -> None:
    """Adds the tokens that other files than tokenizer.json list to `reader`; `special` holds those
    that the files name as special.

    Raises:
      UserError: a list is damaged, or tokenizer.json gives a token another id.
    """
    from tokenizers import AddedToken

    listed = list(_listed_tokens(path, settings, special))
    with refused(f"data.tokenizer: {path} lists tokens that cannot be added"):
        known = {token.content for token in reader.get_added_tokens_decoder().values()}
        for number, content, flags in sorted(listed, key=lambda entry: entry[0]):
            if content not in known:
                reader.add_tokens([AddedToken(content, **flags)])
            known_id = reader.token_to_id(content)
            if known_id != number:
                raise UserError(
                    f"data.tokenizer: {path} lists token {content!r} with the id {number}, and its "
                    f"tokenizer.json makes it {known_id}: make the two agree (transformers' "
                    "save_pretrained writes one file for all)"
                )


def _listed_tokens(
    path: pathlib.Path, settings: dict[str, Any], special: set[str]
) -> Iterator[tuple[int, str, dict[str, bool]]]:
    """Yields (id, text, flags of AddedToken) of the tokens that only other files list."""
    decoder = settings.get("added_tokens_decoder")
    if decoder is None:
        file = path / "added_tokens.json"
        for content, number in read_object(file).items():
            yield _id_in(file, number), content, {"special": content in special}
        return
    file = path / "tokenizer_config.json"
    if not isinstance(decoder, dict):
        raise UserError(f"{file}: added_tokens_decoder is no object: put the file back")
    for number, token in decoder.items():
        text = _content(token) if isinstance(token, dict) else None
        if text is None:
            raise UserError(
                f"{file}: added_tokens_decoder has no content for {number!r}: put the file back"
            )
        flags = {name: bool(token[name]) for name in _FLAGS if name in token}
        whole = number.isdecimal() and len(number) < 12
        yield _id_in(file, int(number) if whole else number), text, flags


def _id_in(file: pathlib.Path, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
        raise UserError(f"{file} gives a token the id {number!r}: write a whole number")
    return number


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Returns {'eos_token': '</s>', ...}; a file has a token as text or object with 'content'."""
    texts = {name: _content(x) for name, x in settings.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_sources(path: pathlib.Path, settings: dict[str, Any]) -> dict[str, str]:
    """Returns the chat templates of `_TEMPLATES` by name, from their files or else `settings`."""
    file = path / "chat_template.jinja"
    folder = path / "additional_chat_templates"
    files = {"default": file} if os.path.lexists(file) else {}
    if os.path.isdir(folder):
        files |= {template.stem: template for template in folder.glob("*.jinja")}
    if files:
        texts = {}
        for name in (name for name in _TEMPLATES if name in files):
            with _readable(files[name]):
                texts[name] = read_bytes(files[name]).decode("utf-8")
        return texts
    template = settings.get("chat_template")
    named = template if isinstance(template, dict) else {"default": template}
    if isinstance(template, list):  # several, each with a name
        named = {
            t["name"]: t.get("template")
            for t in template
            if isinstance(t, dict) and isinstance(t.get("name"), str)
        }
    known = {name: named.get(name) for name in _TEMPLATES}
    return {name: text for name, text in known.items() if isinstance(text, str)}
