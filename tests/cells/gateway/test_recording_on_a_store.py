"""Calls that are recorded on a store that is slow to take them."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from cells.gateway import recording
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


async def test_a_file_system_that_is_slow_gets_a_thread(tmp_path, monkeypatch) -> None:
    """The event loop's own thread writes once the journals are open, until a write is slow."""
    log, recorder = ExecutionLog(Store(tmp_path), RunLayout("r"), "e"), Recorder()
    wrote: list[bool] = []
    slow_s = 0.0
    append, loops = ExecutionLog.append, threading.get_ident()

    def seen(self: ExecutionLog, *lines: bytes | None) -> None:
        wrote.append(threading.get_ident() == loops)
        append(self, *lines)
        clock[0] += slow_s

    clock = [100.0]
    monkeypatch.setattr(ExecutionLog, "append", seen)
    monkeypatch.setattr(recording, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for index in range(3):
        await recorder.append(log, call("e", index), None)
    slow_s = 1.0
    for index in range(3, 6):
        await recorder.append(log, call("e", index), None)
    slow_s, clock[0] = 0.0, clock[0] + 60
    await recorder.append(log, call("e", 6), None)
    await recorder.close()
    assert wrote == [False, True, True, True, False, False, True]
    assert [one.index for one, _ in log.read()] == list(range(7))
