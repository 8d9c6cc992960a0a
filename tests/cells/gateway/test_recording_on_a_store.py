"""Calls that are recorded on an object store, where each write waits for an answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cells.gateway.recording import ExecutionLog, Recorder
from storage.layout import RunLayout
from storage.objects import StorageError, Store
from storage.records import Call, CallKind, CallStatus

LIMIT_S = 60.0


class Slow(Store):
    """One execution's write waits to be let through, two others' for each other; one's fails."""

    def __init__(self) -> None:
        super().__init__("memory://recording")
        self.through = threading.Event()
        self.both = threading.Barrier(2)

    def write_once(self, key: str, data: bytes) -> bool:
        if "/first/" in key:
            assert self.through.wait(LIMIT_S)
        elif "/left/" in key or "/right/" in key:
            self.both.wait(LIMIT_S)
        elif "/refused/" in key:
            raise StorageError("refused")
        return super().write_once(key, data)


def call(execution: str, index: int) -> Call:
    return Call(
        call_id=f"{execution}-{index}",
        execution_id=execution,
        index=index,
        parent=None,
        kept=0,
        new_ids=(1, 2),
        output_ids=(3,),
        output_logprobs=(-0.5,),
        spans=(),
        kind=CallKind.MAIN,
        kind_reason="",
        agent="main",
        status=CallStatus.COMPLETE,
        finish_reason="stop",
        fork_reason=None,
        started_at=0.0,
        waited_s=0.0,
        seconds=0.0,
        cell="a",
        cached_tokens=0,
    )


async def test_executions_of_a_batch_are_written_side_by_side_and_each_in_order() -> None:
    store, recorder = Slow(), Recorder()
    names = ("first", "left", "right", "refused", "plain")
    logs = {name: ExecutionLog(store, RunLayout("r"), name) for name in names}

    def kept(name: str, index: int = 0) -> asyncio.Task[None]:
        return asyncio.create_task(recorder.append(logs[name], call(name, index), None))

    first = kept("first")
    # All these wait while the first is written, and become one batch.
    others = [kept("left"), kept("right"), *(kept("plain", index) for index in range(5))]
    refused = kept("refused")
    await asyncio.sleep(0)
    store.through.set()
    await asyncio.wait_for(asyncio.gather(first, *others), LIMIT_S)
    with pytest.raises(StorageError, match="refused"):
        await refused
    await recorder.close()
    assert [one.index for one, _ in logs["plain"].read()] == list(range(5))
    assert [len(logs[name].read()) for name in ("first", "left", "right")] == [1, 1, 1]
