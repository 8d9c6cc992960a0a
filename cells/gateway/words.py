"""Ids of plain texts from the ids of their words.

A byte-level tokenizer cuts a text into words by a pattern and encodes each word by itself. Nearly
all of its time goes into the cutting, and into words that it has encoded a thousand times. So the
cutting is done here by the same pattern, and words are remembered. That is exact where Python's
patterns and the tokenizer's own mean the same, which they do for ASCII: any other text is none of
ours, nor are tokenizers that are built in another way.
"""

from __future__ import annotations

import json
import re
import string
from itertools import chain
from typing import Any

WORDS = 1 << 16
"""Words that are remembered."""
LONG = 64
"""Characters of a word that is not worth remembering."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a byte-level tokenizer cuts by when it names no pattern."""
_ASCII_OF = {
    **dict.fromkeys(("L", "Letter"), "A-Za-z"),
    **dict.fromkeys(("N", "Nd"), "0-9"),
    "Lu": "A-Z",
    "Ll": "a-z",
}
_NOTHING = {"Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "Nl", "No", "Han"}
"""Classes of characters that ASCII has none of."""


class Words:
    """Ids of words, and of texts that are made of them.

    Args:
        backend: a tokenizer of the ``tokenizers`` package.
        pattern: what it cuts by.
        added: its added tokens, as they are written, with their ids.
    """

    def __init__(self, backend: Any, pattern: re.Pattern[str], added: dict[str, int]) -> None:
        self._backend = backend
        self._cut = pattern.findall
        self._known: dict[str, list[int]] = {}
        self._added = {text: (one,) for text, one in added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first))
        self._marks = re.compile(f"({either})") if added else None

    def ids(self, text: str) -> list[int] | None:
        """Ids of a text, in which added tokens are recognised; None if it is not ASCII."""
        if not text.isascii():
            return None
        if self._marks is None or self._marks.search(text) is None:
            return self._of_words(self._cut(text))
        ids: list[int] = []
        for place, part in enumerate(self._marks.split(text)):
            if place % 2 == 1:
                ids += self._added[part]
            else:
                ids += self._of_words(self._cut(part))
        return ids

    def _of_words(self, words: list[str]) -> list[int]:
        known = self._known
        try:
            return list(chain.from_iterable(map(known.__getitem__, words)))
        except KeyError:
            new = [word for word in dict.fromkeys(words) if word not in known]
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
        learnt = {word: one.ids for word, one in zip(new, encodings, strict=True)}
        found = (learnt[word] if word in learnt else known[word] for word in words)
        ids = list(chain.from_iterable(found))
        if len(known) + len(learnt) > WORDS:
            known.clear()
        known.update((word, one) for word, one in learnt.items() if len(word) <= LONG)
        return ids


def find_words(backend: Any) -> Words | None:
    """Words of a tokenizer, or None if it is not of the kind that they are exact for."""
    built = json.loads(backend.to_str())
    source = _pattern(built)
    added = built["added_tokens"]
    plain = not any(
        one["lstrip"] or one["rstrip"] or one["single_word"] or one["normalized"] for one in added
    )
    if source is None or not plain:
        return None
    try:
        pattern = re.compile(_in_ascii(source), re.ASCII)
    except (KeyError, re.error):
        return None
    marks = {one["content"]: one["id"] for one in added}
    if not _agree(Words(backend, pattern, marks), backend):
        return None
    return Words(backend, pattern, marks)  # without the words that it was tried on


def _pattern(built: dict[str, Any]) -> str | None:
    """The pattern that a tokenizer cuts ASCII by, where that is all that it does before the words
    are encoded."""
    normalizer = built["normalizer"]
    if normalizer is not None and normalizer["type"] not in ("NFC", "NFD", "NFKC", "NFKD"):
        return None
    match built["pre_tokenizer"]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def _in_ascii(pattern: str) -> str:
    r"""A pattern for ASCII texts, with classes of characters written out.

    Raises:
        KeyError: it has a class that is not known here.
    """
    made, inside = "", False
    for part in re.findall(r"\\p\{\w+\}|\\.|.", pattern, re.DOTALL):
        if part.startswith(r"\p"):
            name = part[3:-1]
            letters = "" if name in _NOTHING else _ASCII_OF[name]
            part = letters if inside else f"[{letters}]" if letters else r"(?!)"
        elif part in "[]":
            inside = part == "["
        made += part
    return made


def _agree(words: Words, backend: Any) -> bool:
    """Whether both say the same of every pair of characters, and of texts with many edges."""
    letters = [chr(code) for code in range(128)]
    pairs = " ".join(one + other for one in letters for other in letters)
    edges = f"{string.printable}  x\n\n  y \r\n\t z 12345 don't DON'T  \n" * 2
    for text in (pairs, edges, pairs[::-1], edges[::-1]):
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        if words.ids(text) != encoding.ids:
            return False
    return True
