"""Ids of plain texts from the ids of their words.

A byte-level tokenizer cuts a text into words by a pattern and encodes each word by itself. Nearly
all of its time goes into the cutting, and into words that it has encoded a thousand times. So the
cutting is done here by the same pattern, and words are remembered. That is exact where Python's
patterns and the tokenizer's own mean the same, which they do for ASCII; any other character counts
as an ASCII one that is of the same classes for the tokenizer. Texts with characters that are like
none are left to the tokenizer, and so are tokenizers that are built in another way.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from itertools import chain
from typing import Any

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

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
_OTHERS = re.compile(r"[^\x00-\x7f]+")
_LIKE = "qQ7~\x0b"
"""Characters that others can be like: letters, a digit, a sign, a space."""
_NOTHING = {"Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "Nl", "No", "Han"}
"""Classes of characters that ASCII has none of."""


class Likeness(dict[str, str]):
    """ASCII characters by others that a pattern can't tell from them; those that are like none are
    themselves.

    Args:
        pattern: as the tokenizer has it.
    """

    def __init__(self, pattern: str) -> None:
        names = dict.fromkeys(re.findall(r"\\p\{\w+\}|\\[sdwSDW]", pattern))
        self._classes = [Split(Regex(name), "removed") for name in names]
        literal = re.sub(r"\\p\{\w+\}|\\.", "", pattern)
        self._like = {self._kinds(one): one for one in _LIKE if one not in literal}

    def of(self, text: str) -> str:
        """The text, with others in place of what is not ASCII."""
        return _OTHERS.sub(lambda found: "".join(map(self.__getitem__, found[0])), text)

    def __missing__(self, one: str) -> str:
        # A pattern that ignores case takes some for letters of ASCII. What this Python does not
        # know, the tokenizer may know.
        cases = one.casefold() + one.upper() + one.lower()
        odd = any(map(str.isascii, cases)) or unicodedata.category(one) == "Cn"
        self[one] = like = one if odd else self._like.get(self._kinds(one), one)
        return like

    def _kinds(self, one: str) -> tuple[bool, ...]:
        """Of which classes a character is, as the tokenizer's own patterns say."""
        return tuple(not kind.pre_tokenize_str(one) for kind in self._classes)


class Words:
    """Ids of words, and of texts that are made of them.

    Args:
        backend: a tokenizer of the ``tokenizers`` package.
        pattern: what it cuts by, for ASCII.
        likeness: what other characters count as.
        composed: whether it composes characters first.
        added: its added tokens, as they are written, with their ids.
    """

    def __init__(
        self,
        backend: Any,
        pattern: re.Pattern[str],
        likeness: Likeness,
        composed: bool,
        added: dict[str, int],
    ) -> None:
        self._backend = backend
        self._pieces = pattern.findall
        self._likeness = likeness
        self._composed = composed
        self._known: dict[str, list[int]] = {}
        self._added = {text: (one,) for text, one in added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first))
        self._marks = re.compile(f"({either})") if added else None

    def ids(self, text: str) -> list[int] | None:
        """Ids of a text, in which added tokens are recognised; None if it must be left to the
        tokenizer."""
        ids: list[int] = []
        for place, part in enumerate(self._marks.split(text) if self._marks else (text,)):
            if place % 2 == 1:
                ids += self._added[part]
                continue
            words = self._cut(part)
            if words is None:
                return None
            ids += self._of_words(words)
        return ids

    def _cut(self, text: str) -> list[str] | None:
        if text.isascii():
            return self._pieces(text)
        like = self._likeness.of(text)
        if not like.isascii() or (self._composed and not unicodedata.is_normalized("NFC", text)):
            return None
        words, end = [], 0
        for piece in self._pieces(like):
            start, end = end, end + len(piece)
            words.append(text[start:end])
        return words

    def _of_words(self, words: list[str]) -> list[int]:
        known = self._known
        new = list(set(words).difference(known))
        if new:
            encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
            known.update(zip(new, (one.ids for one in encodings), strict=True))
        ids = list(chain.from_iterable(map(known.__getitem__, words)))
        for word in new:
            if len(word) > LONG:
                del known[word]
        if len(known) > WORDS:
            known.clear()
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
    parts = (
        *(backend, pattern, Likeness(source), built["normalizer"] is not None),
        {one["content"]: one["id"] for one in added},
    )
    if not _agree(Words(*parts), backend):
        return None
    return Words(*parts)  # without the words that it was tried on


def _pattern(built: dict[str, Any]) -> str | None:
    """The pattern that a tokenizer cuts by, where that is all that it does to composed characters
    before the words are encoded."""
    normalizer = built["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
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
                    "behavior": "Isolated" | "Removed" as between,
                    "invert": bool(invert),
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if invert == (between == "Removed"):  # the words are the matches, in either way
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
