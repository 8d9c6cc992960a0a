"""Token ids as text, with the tokenizer of a run's policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from storage.objects import StorageError
from storage.run import Run
from tasks.warm_start.policies import first_policy

Decode = Callable[[Sequence[int]], str]


def decoder(run: Run) -> Decode:
    """What turns ids of this run into text; the ids themselves where its tokenizer is gone."""
    try:
        text = run.store.read(f"{first_policy(run)}/tokenizer.json").decode()
    except StorageError:
        return lambda ids: " ".join(map(str, ids))
    tokenizer = Tokenizer.from_str(text)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
