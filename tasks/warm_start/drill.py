"""The copy drill: repeat a list. Without it a small model never learns to copy names in time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tasks.problems.specrepo.operations import CONSTANTS
from tasks.problems.specrepo.words import WORDS
from tasks.warm_start.demonstrations import Document
from tasks.warm_start.tokenizer import END_OF_TURN, START_OF_TURN

_LENGTHS = range(4, 15)


def drill(tokenizer: Any, rng: random.Random) -> Document:
    """One exercise: a list, the end of a turn, and the same list as the target."""
    length = rng.choice(_LENGTHS)
    kind = rng.randrange(4)
    if kind < 2:
        words = [rng.choice(WORDS) for _ in range(length)]
        ids = _words_apart(tokenizer, words) if kind else _encode(tokenizer, "\n".join(words))
    else:
        lines = [f"{rng.choice(WORDS)}(x): {rng.choice(CONSTANTS)}" for _ in range(length // 2 + 1)]
        ids = _encode(tokenizer, "\n".join(lines))
    start, end = tokenizer.convert_tokens_to_ids([START_OF_TURN, END_OF_TURN])
    given = [start, *ids, end, start]
    answer = [*ids, end]
    targets = np.zeros(len(given) + len(answer), np.bool_)
    targets[len(given) :] = True
    return Document(np.array([*given, *answer], np.int32), targets)


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _words_apart(tokenizer: Any, words: list[str]) -> list[int]:
    """Ids of words without anything between them, each encoded alone."""
    return [number for word in words for number in _encode(tokenizer, word)]
