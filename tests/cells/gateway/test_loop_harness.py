"""The loop harness as its own process, on a gateway: compaction, a sub-agent, a reroute, a kill."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import tasks.rollout.harnesses.loop as loop
from storage.records import CallStatus
from tests.cells.gateway.conftest import LIMIT_S, Opened, prompts


def call(name: str, **arguments: str) -> dict:
    return {"name": name, "arguments": arguments}


async def start_loop(execution: Opened, folder: Path, *more: str) -> asyncio.subprocess.Process:
    """The harness at work in ``folder/workspace``."""
    (folder / "workspace").mkdir()
    instruction = folder / "instruction"
    instruction.write_text("file: a.py\nbeta(x): x plus 3")
    argv = ["-I", loop.__file__, "--instruction-file", str(instruction), "--turns", "8"]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *(*argv, "--max-tokens", "150", *more),
        cwd=folder / "workspace",
        env={"OPENAI_BASE_URL": execution.base_url, "OPENAI_API_KEY": execution.key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def test_loop_histories_splice(bench, engine, other, script, say, tmp_path: Path) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(
        say("", call("write", path="a.py", content="def beta(x):\n    return x + 3\n")),
        say("", call("task", prompt="file: a.py\ngama(x): x plus 4")),
        say("", call("append", path="a.py", content="y = 1\n")),
        say("no tool at all"),
        say("", call("done")),
        say("file: a.py\nall written"),
        say("", call("run", path="a.py")),
        say("", call("done")),
    )
    engine.hold_after = 20
    process = await start_loop(execution, tmp_path, "--context-budget", "270", "--sub-agents", "2")
    try:
        await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
        await bench.cell("b", other)
        await bench.cell("a", engine, state="leaving")
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    calls = bench.calls()
    assert [(one.agent, one.kind.value, one.fork_reason) for one in calls] == [
        ("main", "main", None),
        ("main", "main", None),
        ("task-1", "sub-agent", None),
        ("task-1", "sub-agent", None),
        ("task-1", "sub-agent", None),
        ("main", "main-summary", None),
        ("main", "main", "fresh history"),
        ("main", "main", None),
    ]
    assert all(one.status is CallStatus.COMPLETE and one.cell == "b" for one in calls)
    whole = prompts(calls)
    seen = [request["input_ids"] for request in other.requests]
    assert seen[1:] == [whole[one.call_id] for one in calls[1:]]
    assert (tmp_path / "workspace/a.py").read_text().endswith("y = 1\n")


async def test_loop_goes_on_when_the_gateway_is_killed(
    gateway_process, engine, script, say, tmp_path: Path
) -> None:
    """Killed in mid-generation, and started again as a run does: the harness only tries again."""
    replies = [
        say("", call("write", path="a.py", content="def beta(x):\n    return x + 3\n")),
        say("", call("append", path="a.py", content="y = 1\n")),
        say("", call("run", path="a.py")),
        say("", call("done")),
    ]
    script.say(replies[0], replies[1], *replies[1:])  # the second one twice: it is cut off
    known = script.rest

    def rest(prompt: list[int]) -> list[int]:
        engine.hold_after = 20 if len(engine.requests) == 2 else None
        return known(prompt)

    script.rest = rest
    bench = await gateway_process.start()
    await bench.cell("a", engine)
    execution = await bench.open()
    process = await start_loop(execution, tmp_path, "--context-budget", "2000")
    try:
        await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
        await gateway_process.kill()
        before = bench.calls()
        await bench.http.aclose()
        bench = await gateway_process.start()
        await bench.cell("a", engine)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, output.decode()
        calls = bench.calls()
    finally:
        await bench.http.aclose()
        if process.returncode is None:
            process.kill()
    assert calls[: len(before)] == before
    assert [list(one.output_ids) for one in calls] == replies
    assert [one.index for one in calls] == list(range(4))
    assert {(one.status, one.fork_reason) for one in calls} == {(CallStatus.COMPLETE, None)}
    assert [one.parent for one in calls] == [None, *(one.call_id for one in calls[:-1])]
    whole = prompts(calls)
    seen = [request["input_ids"] for request in engine.requests]
    assert seen[1] == seen[2]  # once for the killed gateway, once for its successor
    assert seen[:1] + seen[2:] == [whole[one.call_id] for one in calls]
    assert (tmp_path / "workspace/a.py").read_text().endswith("return x + 3\ny = 1\n")
