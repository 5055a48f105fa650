"""Text to tokens and back, with the tokenizer that lies beside the weights, and the tokens that end an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megagen.errors import DeviceError, MegagenError, WeightError
from megagen.runtime.driver import INSTALL

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
)  # one of them: there is a tokenizer
END = "<|eot|>"  # of Muse Spark's turn
MESSAGE_END = "<|eom|>"  # of a message within a turn: what follows it belongs to the answer
UNKNOWN = "\ufffd"  # what a decoder makes of bytes that are no text (yet)
PENDING = 3  # bytes of a character that is not complete
WINDOW = 64  # tokens to decode together, at most


class Text:
    """A checkpoint's tokenizer. Special tokens stay in texts: a model's answer is structured by them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, checkpoint: Path) -> Text | None:
        """None if there is none. Runs no code of the checkpoint's and asks no server.

        Raises DeviceError without transformers, WeightError for damaged files.
        """
        if not any((checkpoint / name).is_file() for name in FILES):
            return None
        try:
            from transformers import AutoTokenizer
        except ImportError as e:
            raise DeviceError(f"the tokenizer needs transformers: {e}", hint=INSTALL) from e
        try:
            return cls(
                AutoTokenizer.from_pretrained(
                    str(checkpoint), local_files_only=True, trust_remote_code=False, use_fast=True
                )
            )
        except Exception as e:  # whatever a parser of theirs raises
            raise WeightError(f"the tokenizer of {checkpoint} cannot be read: {' '.join(str(e).split())}") from e

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """``chat``: as the user's turn, by the checkpoint's template, with what an answer begins with."""
        if chat:
            if not getattr(self._tokenizer, "chat_template", None):
                raise MegagenError("the tokenizer has no chat template", hint="leave out --chat")
            turn = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return [int(i) for i in self._tokenizer(text, add_special_tokens=not chat)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        found: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return found

    def id(self, token: str) -> int | None:
        """Of a token's own text."""
        found: int | None = self._tokenizer.get_vocab().get(token)
        return found

    def stream(self, prompt: Sequence[int] = ()) -> Stream:
        return Stream(self, prompt)


class Stream:
    """Tokens one by one to text, each character once it is complete.

    How a token reads may depend on the one before it, so the two are decoded together, and what is new is given.
    """

    def __init__(self, text: Text, prompt: Sequence[int] = ()) -> None:
        self._text = text
        self._ids = list(prompt[-8:])
        if self._decoded().endswith(UNKNOWN):
            self._ids = []
        self._given = len(self._decoded())  # characters of these ids that were given
        self._whole = len(self._ids)  # ids that end with a complete character

    def _decoded(self) -> str:
        return self._text.decode(self._ids) if self._ids else ""

    def add(self, token: int) -> str:
        """What becomes complete with ``token``."""
        self._ids.append(token)
        text = self._decoded()
        ready = max(len(text.rstrip(UNKNOWN)), len(text) - PENDING, self._given)
        new, self._given = text[self._given : ready], ready
        if ready == len(text):
            del self._ids[: self._whole]
            self._given, self._whole = len(self._decoded()), len(self._ids)
        elif len(self._ids) > WINDOW:
            return new + self.end()
        return new

    def end(self) -> str:
        """What is left, complete or not."""
        new = self._decoded()[self._given :]
        self._ids, self._given, self._whole = [], 0, 0
        return new


def stop_ids(checkpoint: Path, text: Text | None) -> frozenset[int]:
    """The tokens that end an answer: ``eos_token_id`` of generation_config.json and of config.json together, with
    END and never MESSAGE_END where the tokenizer has such tokens. Raises WeightError for malformed files."""
    found = _eos(checkpoint / "generation_config.json") | _eos(checkpoint / "config.json")
    if text is not None:
        found |= {i for i in [text.id(END)] if i is not None}
        found -= {i for i in [text.id(MESSAGE_END)] if i is not None}
    return frozenset(found)


def _eos(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    try:
        data = json.loads(path.read_text("utf-8"))
        given = [data.get("eos_token_id"), (data.get("text_config") or {}).get("eos_token_id")]
        return {int(i) for one in given if one is not None for i in (one if isinstance(one, list) else [one])}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise WeightError(f"{path}: {error}") from None
