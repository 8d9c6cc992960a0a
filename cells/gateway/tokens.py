"""A tokenizer without what the gateway never asks for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

SHORT = 32
"""Characters of a text whose ids are remembered: renderers ask for the same few all the time."""


class LightTokenizer:
    """The same ids and texts as a fast tokenizer of transformers, at a fifth of its cost.

    transformers makes a batch of one for each text, and renderers ask it for offsets, twice, which
    tell them what is content: that is for training samples, which the gateway has from records. So
    this one can't be called; everything else is the original's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self.unk_token_id = tokenizer.unk_token_id
        self._short = lru_cache(maxsize=1024)(self._ids)
        self.convert_tokens_to_ids = lru_cache(maxsize=1024)(tokenizer.convert_tokens_to_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Ids of a text; special tokens in it are recognised."""
        ids = self._short if len(text) <= SHORT else self._ids
        return list(ids(text, add_special_tokens))

    def decode(self, ids: Any, *, skip_special_tokens: bool = False, **options: Any) -> str:
        """The text of ids."""
        if self._cleans or options:
            return str(
                self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, **options)
            )
        numbers = [ids] if isinstance(ids, int) else ids
        return str(self._backend.decode(numbers, skip_special_tokens=skip_special_tokens))

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # above all ``__call__``
            raise AttributeError(name)
        return getattr(self._tokenizer, name)
