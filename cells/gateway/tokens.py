"""A tokenizer without what the gateway never asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from tokenizers.decoders import ByteLevel

from cells.gateway.words import find_words

SHORT = 32
"""Characters of a text whose ids are remembered: renderers ask for the same few all the time."""


class TokenBytes(dict[int, bytes]):
    """The bytes of tokens, for vocabularies whose texts are no more than the bytes of their tokens
    in a row: putting those together costs a tenth of asking the tokenizer for the text."""

    def __init__(self, backend: Any) -> None:
        self._token = backend.id_to_token
        self._letters = _letters()

    def text(self, ids: Iterable[int]) -> str:
        """The text of ids; those that are none have no text."""
        return b"".join(map(self.__getitem__, ids)).decode("utf-8", "replace")

    def __missing__(self, one: int) -> bytes:
        token, letters = self._token(one) or "", self._letters
        try:
            found = bytes([letters[letter] for letter in token])
        except KeyError:  # added as it is written
            found = token.encode()
        self[one] = found
        return found


class LightTokenizer:
    """The same ids and texts as a fast tokenizer of transformers, at a fifth of its cost.

    transformers makes a batch of one for each text, and renderers ask it for offsets, twice, which
    tell them what is content: that is for training samples, which the gateway has from records. So
    this one can't be called; everything else is the original's.

    Renderers also carry each id through lists of masks. ``standing_in`` spares them: a longer text
    is given to them as one negative id, and ``expand`` puts its ids there, of the same text in one
    piece.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._bytes = TokenBytes(self._backend) if _joins_bytes(self._backend) else None
        self._words = find_words(self._backend)
        self._texts: list[str] | None = None
        self.unk_token_id = tokenizer.unk_token_id
        self._short = lru_cache(maxsize=1024)(self._ids)
        self.convert_tokens_to_ids = lru_cache(maxsize=1024)(tokenizer.convert_tokens_to_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Ids of a text; special tokens in it are recognised."""
        if self._texts is not None and len(text) > SHORT:
            self._texts.append(text)
            return [-len(self._texts)]
        ids = self._short if len(text) <= SHORT else self._ids
        return list(ids(text, add_special_tokens))

    def decode(self, ids: Any, *, skip_special_tokens: bool = False, **options: Any) -> str:
        """The text of ids."""
        if self._cleans or options:
            return str(
                self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, **options)
            )
        numbers = [ids] if isinstance(ids, int) else ids
        if self._texts is not None:
            numbers = self.expand(numbers)
        if self._bytes is not None and not skip_special_tokens:
            return self._bytes.text(numbers)
        return str(self._backend.decode(numbers, skip_special_tokens=skip_special_tokens))

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Give one negative id for each longer text that is encoded in here."""
        self._texts = []
        try:
            yield
        finally:
            self._texts = None

    def expand(self, ids: list[int]) -> list[int]:
        """Ids with those of the texts in the places that are kept for them; to be asked for before
        ``standing_in`` ends."""
        texts = self._texts or []
        places = sorted(place for one in range(1, len(texts) + 1) for place in _all(ids, -one))
        whole: list[int] = []
        start = 0
        for place in places:
            whole += ids[start:place]
            whole += self._ids(texts[-ids[place] - 1], False)
            start = place + 1
        return whole + ids[start:] if places else list(ids)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._words is not None and not add_special_tokens:
            known = self._words.ids(text)
            if known is not None:
                return known
        # Unlike ``encode``, this does not find out where in the text each id is.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # above all ``__call__``
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def _all(ids: list[int], one: int) -> Iterator[int]:
    """Where an id is."""
    place = -1
    for _ in range(ids.count(one)):
        place = ids.index(one, place + 1)
        yield place


def _joins_bytes(backend: Any) -> bool:
    """Whether the text of ids is nothing but the bytes of their tokens."""
    return isinstance(backend.decoder, ByteLevel)


def _letters() -> dict[str, int]:
    """Which byte each letter stands for in such a vocabulary: those that can be printed for
    themselves, the others for letters that follow all bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted
