"""The tokenizer of a Hugging Face directory: what its files say, put together.

tokenizer.json
    the tokenizer itself, read by the `tokenizers` library.
tokenizer_config.json, special_tokens_map.json
    names of the special tokens, whether a prompt begins with one, the chat template.
chat_template.jinja
    the chat template, if it has a file of its own.
generation_config.json (else config.json)
    ids that end a response, often several: an instruction-tuned model ends a turn with one and a
    document with another. The tokenizer's own end token is always among them.

Not read: SentencePiece's tokenizer.model, and code that comes with a model.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from fp8rl_jax.data.chat import ChatTemplate
from fp8rl_jax.data.tokenizer import ReaderTokenizer, read_reader
from fp8rl_jax.errors import UserError, refused
from fp8rl_jax.json_file import read_bytes, read_json

# Every file that a tokenizer depends on.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "config.json",
)  # fmt: skip
_LARGEST = 1e9


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file, {} without the file.

    Raises:
      UserError: it holds anything else.
    """
    if not os.path.lexists(path):
        return {}
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        json.dumps(content, ensure_ascii=False).encode()  # halves of surrogate pairs
        return content
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): put the file back") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): put the file back") from None


def read_number(path: pathlib.Path, settings: dict[str, Any], name: str) -> float | None:
    """The number `settings` has under a name, None where it has none.

    Args:
      path: file of the settings, for messages.
      settings: of `read_object`.

    Raises:
      UserError: it is NaN, infinite, or beyond float32.
    """
    value = settings.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not abs(value) < _LARGEST:
        raise UserError(f"{path}: {name} is {value}; write a number below {_LARGEST:g}")
    return value


def _token_ids(value: Any) -> list[int]:
    """Ids of a field that holds none, one, or a list; without those that no token can have."""
    values = value if isinstance(value, list) else [value]
    ids = (v for v in values if isinstance(v, int) and not isinstance(v, bool))
    return [v for v in ids if abs(v) < 2**31]


class PretrainedTokenizer(ReaderTokenizer):
    """A tokenizer with its special tokens and its chat template. See `Tokenizer`.

    `pad_id` is `eos_id` where no padding is named, as masks carry the truth.
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
        super().__init__(read_reader(path / "tokenizer.json"), str(path / "tokenizer.json"))
        settings = read_object(path / "tokenizer_config.json")
        self._where = path
        names = _special_tokens(read_object(path / "special_tokens_map.json") | settings)
        self.eos_ids = self._ends(names)
        self.eos_id = self.eos_ids[0]
        pad = self._id(names, "pad_token")
        self.pad_id = self.eos_id if pad is None else pad
        self.bos_id = self._begin(names, settings.get("add_bos_token"))
        source = _template_source(path, settings)
        where = f"data.tokenizer: {path}"
        self.chat_template = None if source is None else ChatTemplate(source, names, where)

    def _id(self, names: dict[str, str], kind: str) -> int | None:
        """Id of a special token, None if it has no name."""
        if kind not in names:
            return None
        found = self._reader.token_to_id(names[kind])
        if found is None:
            raise UserError(
                f"data.tokenizer: {self._where} names {names[kind]!r} as {kind}, and its "
                "tokenizer.json has no such token: fix tokenizer_config.json"
            )
        return found

    def _ends(self, names: dict[str, str]) -> tuple[int, ...]:
        files = (read_object(self._where / f) for f in ("generation_config.json", "config.json"))
        settings = next((s for s in files if _token_ids(s.get("eos_token_id"))), {})
        own = self._id(names, "eos_token")
        ids = [*([] if own is None else [own]), *_token_ids(settings.get("eos_token_id"))]
        if not ids:
            raise UserError(
                f"data.tokenizer: {self._where} names no end of sequence: set eos_token in its "
                "tokenizer_config.json, or eos_token_id in its generation_config.json"
            )
        return tuple(dict.fromkeys(ids))

    def _begin(self, names: dict[str, str], wanted: bool | None) -> int | None:
        """The setting decides; without one, the tokenizer's own post-processor."""
        bos = self._id(names, "bos_token")
        if wanted is None:
            with refused(self._failing):
                wanted = bos is not None and self._reader.encode("").ids[:1] == [bos]
        return bos if wanted else None


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """{'eos_token': '</s>', ...}; a value may be text or an object with it."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template_source(path: pathlib.Path, settings: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if os.path.lexists(file):
        try:
            return read_bytes(file).decode("utf-8")
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}): put it back") from None
        except ValueError as error:
            raise UserError(f"{file} is damaged ({error}): put it back") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
