"""Names of files and functions: short made-up words that a tiny vocabulary holds as one token."""

from __future__ import annotations

import random

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_COUNT = 128


def _made_up() -> tuple[str, ...]:
    rng = random.Random(7)
    words: list[str] = []
    while len(words) < _COUNT:
        word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(2))
        if word not in words:
            words.append(word)
    return tuple(words)


WORDS = _made_up()
