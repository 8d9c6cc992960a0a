"""Token ids as text, with the tokenizer of a run's policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from configs.model import ModelSource
from storage.objects import StorageError
from storage.run import Run
from tasks.warm_start.build import policy_key

Decode = Callable[[Sequence[int]], str]


def decoder(run: Run) -> Decode:
    """What turns ids of this run into text; the ids themselves where its tokenizer is gone."""
    try:
        if run.config.model.source is ModelSource.WARM_START:
            text = run.store.read(f"{policy_key(run.config)}/tokenizer.json").decode()
        else:
            text = (Path(str(run.config.model.path)) / "tokenizer.json").read_text("utf-8")
    except (StorageError, OSError):
        return lambda ids: " ".join(map(str, ids))
    tokenizer = Tokenizer.from_str(text)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
