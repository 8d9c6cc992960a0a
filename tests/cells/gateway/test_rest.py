"""Executions that rest go on as if they had not."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from cells.gateway import rest
from cells.gateway.matching import Branches, Node
from cells.gateway.rest import Drawer
from tests.cells.gateway.conftest import LIMIT_S, prompts

TURNS = 1500
RUN = {"name": "run", "arguments": {"path": "a.py"}}


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[bool]:
    """Whether each packing came to its end; executions are packed as soon as nothing runs."""
    outcomes: asyncio.Queue[bool] = asyncio.Queue()
    pack = Drawer.pack

    async def told(drawer: Drawer) -> bool:
        outcome = await pack(drawer)
        outcomes.put_nowait(outcome)
        return outcome

    monkeypatch.setattr(rest, "REST_AFTER_S", 0.0)
    monkeypatch.setattr(rest, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(Drawer, "pack", told)
    return outcomes


async def rested(packed: asyncio.Queue[bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await packed.get():
            pass


async def test_calls_go_on_after_a_rest(packed, bench, engine, script, say) -> None:
    script.say(say("", RUN), say("sub"), say("two"), say("sub two"), say("other"), say("again"))
    await bench.cell("a", engine)
    execution = await bench.open()
    messages = [{"role": "user", "content": "hello"}]
    first = await execution.reply(messages, stream=False)
    await rested(packed)
    sub = [{"role": "user", "content": "part"}]
    sub.append(await execution.reply(sub, agent="task-1"))
    await rested(packed)
    tool = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "fine"}
    messages = [*messages, first, tool]
    messages.append(await execution.reply(messages))
    await rested(packed)
    more = {"role": "user", "content": "more"}
    await execution.reply([*sub, more], agent="task-1")
    await rested(packed)
    await execution.reply([*messages[:2], {**tool, "content": "else"}])  # from an earlier call
    await rested(packed)
    await execution.reply([{"role": "user", "content": "HELLO"}, *messages[1:], more])  # edited
    calls = bench.calls()
    assert [call.fork_reason for call in calls] == [
        *(None, None, None, None),
        f"earlier call: goes on from {calls[0].call_id}",
        f"history edited: message 0 differs from {calls[4].call_id}",
    ]
    parents = [call.parent for call in calls]
    assert parents == [None, None, *(calls[at].call_id for at in (0, 1, 0)), None]
    whole = prompts(calls)
    assert [one["input_ids"] for one in engine.requests] == [whole[one.call_id] for one in calls]


def long_branches(turns: int = TURNS) -> tuple[Branches, Node]:
    branches, node = Branches(), None
    for number in range(turns):
        said = {"role": "user", "content": f"turn {number} " + "x" * 500}
        reply = {"role": "assistant", "content": f"answer {number}"}
        node = Node(
            call_id=f"c{number}",
            agent="main",
            parent=node,
            kept=node.length if node else 0,
            new_ids=array("i", range(100)),
            output_ids=array("i", [number]),
            messages=(said,),
            reply=reply,
            tools="",
            depth=2 * number + 2,
            length=101 * (number + 1),
        )
        branches.add(node)
    assert node is not None
    return branches, node


async def test_long_histories_are_packed_small() -> None:
    branches, node = long_branches()
    parts, history, ids = node.parts(), node.history(), node.ids()
    drawer = Drawer(branches)
    assert await drawer.pack()
    assert drawer.packed_bytes < 200 * TURNS
    again = drawer.open()
    last = again.last["main"]
    assert (last.parts(), last.history(), last.ids()) == (parts, history, ids)
    assert again.match([*history, {"role": "user", "content": "more"}], "main") is last
    assert drawer.packed_bytes is None


async def test_what_is_asked_for_meanwhile_is_not_packed() -> None:
    drawer = Drawer(Branches())
    packing = asyncio.create_task(drawer.pack())
    await asyncio.sleep(0)  # it compresses in a thread
    branches = drawer.open()
    assert not await packing
    assert drawer.open() is branches


async def test_what_is_asked_for_while_it_is_pickled_is_not_packed() -> None:
    branches, node = long_branches(100)
    history = node.history()
    drawer = Drawer(branches)
    packing = asyncio.create_task(drawer.pack())
    await asyncio.sleep(0)  # others have a turn before all calls are pickled
    assert drawer.open() is branches
    assert not await packing
    assert drawer.packed_bytes is None and node.history() == history
    assert await drawer.pack()
    assert drawer.open().last["main"].history() == history
