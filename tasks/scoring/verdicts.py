"""Verdicts in storage: numbered, never overwritten."""

from __future__ import annotations

import time

from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Excluded, Scored, VerdictRecord


def newest_verdict(store: Store, layout: RunLayout, execution: str) -> VerdictRecord | None:
    """The verdict that counts, or None where there is none yet.

    Raises:
        RecordError: it can't be read by this version.
    """
    versions = _versions(store, layout, execution)
    if not versions:
        return None
    return store.read_record(layout.verdict(execution, versions[-1]), VerdictRecord)


def read_verdict(
    store: Store, layout: RunLayout, execution: str, version: int
) -> VerdictRecord | None:
    """The verdict of that number, or None for -1.

    Raises:
        MissingObjectError: there is none.
        RecordError: it can't be read by this version.
    """
    if version < 0:
        return None
    return store.read_record(layout.verdict(execution, version), VerdictRecord)


def add_verdict(
    store: Store,
    layout: RunLayout,
    execution: str,
    query: str,
    verdict: Scored | Excluded,
    seconds: float,
) -> VerdictRecord:
    """Write the next version. It is late when the query's group has been sealed before.

    Raises:
        StorageError: the store is full or refuses.
    """
    versions = _versions(store, layout, execution)
    number = versions[-1] + 1 if versions else 0
    while True:
        record = VerdictRecord(
            execution_id=execution,
            query_id=query,
            version=number,
            late=store.exists(layout.group(query)),
            scored_at=time.time(),
            seconds=seconds,
            verdict=verdict,
        )
        if store.write_record_once(layout.verdict(execution, number), record):
            return record
        number += 1  # somebody else scored it meanwhile


def _versions(store: Store, layout: RunLayout, execution: str) -> list[int]:
    names = store.children(layout.verdicts(execution))
    return sorted(int(name.removesuffix(".json")) for name in names if name.endswith(".json"))
