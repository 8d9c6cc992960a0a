"""What executions that went to another cell found there of their context."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from storage.records import Call


def moved_prefixes(calls: Iterable[Call]) -> tuple[int, int]:
    """Tokens of an execution's contexts when they came to another cell, between two calls or in the
    middle of one, and how many of these that cell did not have to compute."""
    tokens = cached = 0
    by_id = {call.call_id: call for call in calls}
    for call in by_id.values():
        first = call.served[0].cell if call.served else call.cell
        if call.parent is not None and by_id[call.parent].cell != first:
            tokens += call.kept
            cached += min(call.cached_tokens, call.kept)
        for before, after in pairwise(call.served):
            if before.cell != after.cell:
                tokens += after.prompt_tokens
                cached += after.cached_tokens
    return tokens, cached
