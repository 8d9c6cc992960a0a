"""Claude Code, unmodified, in its sandbox: its tools, sub-agents, compaction and retries."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from storage.records import CallStatus, ExecutionOutcome
from tasks.rollout.execution import carry_out
from tasks.rollout.harnesses.claude_code import ClaudeCode
from tests.harnesses.conftest import MakeStage
from tests.harnesses.faults import Fault, Network
from tests.harnesses.stage import ENDLESS, Part, Play, asked, call, has, is_empty, malformed

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NAME = "claude-code"
SUMMARISES = asked(r"text only|not call any tools")
WRITE = call("Write", file_path="/workspace/a.py", content="print(6 * 7)\n")
RUN = call("Bash", command="python3 a.py | tee out.txt", description="Run it")
LONG = call("Bash", command="seq 1 4000", description="Count")
BUDGETS = {"2.1.220": 45_000, "2.1.332": 35_000}
"""More than what it starts with and one long output, less than with two."""
BACKGROUND = Part(lambda prompt: True, ["A title"])
"""Whatever else it asks is background."""


def agent(task: str) -> str:
    return call(
        "Agent",
        description="Part of it",
        prompt=task,
        subagent_type="general-purpose",
        run_in_background=False,
    )


@pytest.mark.parametrize("version", ClaudeCode.versions)
async def test_works_in_spite_of_bad_replies(make_stage: MakeStage, version: str) -> None:
    """A small policy's mistakes, then the work. It asks to go on after a text that was cut off and
    after an empty answer."""
    lines = [
        malformed('{"name": "Write", "arguments": "{\\"file_path\\": "}'),
        call("NoSuchTool", x=1),
        call("Write", path=1.0),
        ENDLESS,
        "I write it.\n" + WRITE,
        RUN,
        "",
        "All done.",
    ]
    play = Play(Part(has("SCENE-MAIN"), lines, counted=True), BACKGROUND)
    harness = {"name": NAME, "version": version, "max_tokens": 300}
    async with make_stage(play, harness=harness) as stage:
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py and run it."
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check(done)
    assert done.result.outcome is ExecutionOutcome.COMPLETED, done.result.detail
    assert done.files["a.py"] == "print(6 * 7)\n"
    assert done.files["out.txt"] == "42\n"
    assert {one.agent for one in done.calls} <= {"main", "background"}
    main = done.of("main")
    assert [one.finish_reason for one in main] == [
        *["tool_calls"] * 3,
        "length",
        *["tool_calls"] * 2,
        "stop",
        "stop",
    ]
    assert [is_empty(one) for one in main] == [*[False] * 6, True, False]
    assert {one.fork_reason for one in main} == {None}


@pytest.mark.parametrize("version", ClaudeCode.versions)
async def test_agents_and_a_compaction(make_stage: MakeStage, version: str) -> None:
    summary = "<analysis>All is well.</analysis>\n<summary>\nSCENE-AFTER: run it.\n</summary>"
    play = Play(
        Part(SUMMARISES, [summary]),
        Part(has("SCENE-AFTER"), [RUN, "All done."], counted=True),
        Part(has("SCENE-MAIN"), [WRITE, agent("SCENE-SUB: look around."), LONG, LONG]),
        Part(has("SCENE-SUB"), [agent("SCENE-NESTED: say hello."), "The sub-agent is done."]),
        Part(has("SCENE-NESTED"), [call("Bash", command="echo hello"), "The nested one is done."]),
        BACKGROUND,
    )
    harness = {"name": NAME, "version": version, "context_budget": BUDGETS[version]}
    async with make_stage(play, harness=harness) as stage:
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py, have it looked at, run it."
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check(done)
    assert done.result.outcome is ExecutionOutcome.COMPLETED, done.result.detail
    assert done.files["out.txt"] == "42\n"
    kinds = done.kinds
    sub, nested = kinds[1][0], kinds[2][0]
    assert kinds == [
        ("main", "main"),
        (sub, "sub-agent"),
        (nested, "sub-agent"),
        (sub, "sub-agent"),
        ("main", "main"),
        ("main", "main-summary"),
        ("main", "main"),
    ]
    assert {one.parent_agent for one in done.of(sub)} == {"main"}
    assert {one.parent_agent for one in done.of(nested)} == {sub}
    main = done.of("main")
    place = [one.kind.value for one in main].index("main-summary")
    assert main[place].parent is not None, "the summary goes on from the history it sums up"
    after = main[place + 1]
    assert after.parent is None, "its continuation is a new history"
    assert (after.fork_reason or "").startswith("history edited"), "with a turn carried over"
    assert main[place + 2].parent == after.call_id


async def test_a_dropped_stream_and_a_503(make_stage: MakeStage) -> None:
    play = Play(Part(has("SCENE-MAIN"), ["I write it now.\n" + WRITE, RUN, "Done."]), BACKGROUND)
    async with make_stage(play, harness={"name": NAME}) as stage:
        engine = stage.engines[0]
        engine.hold_after = 3

        def go_on() -> None:
            engine.hold_after = None
            engine.release.set()

        plan = {1: Fault.CUT, 3: Fault.UNAVAILABLE}
        network = Network(stage.around.doors, plan, go_on)
        around = replace(stage.around, doors=network)  # type: ignore[arg-type]
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py and run it."
        done = stage.performed(await carry_out(stage.spec(0, "p"), around))
        stage.check(done)
    assert network.happened == [Fault.CUT, Fault.UNAVAILABLE]
    assert done.result.outcome is ExecutionOutcome.COMPLETED, done.result.detail
    assert done.files["out.txt"] == "42\n"
    complete = [one for one in done.of("main") if one.status is CallStatus.COMPLETE]
    assert [one.finish_reason for one in complete] == ["tool_calls", "tool_calls", "stop"]


async def test_a_time_limit_keeps_what_is_there(make_stage: MakeStage) -> None:
    wait = call("Bash", command="sleep 3000", description="Wait")
    play = Play(Part(has("SCENE-MAIN"), [WRITE, wait]), BACKGROUND)
    async with make_stage(play, harness={"name": NAME, "tool_timeout_s": 3000}) as stage:
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py."
        finish = asyncio.Event()
        running = asyncio.create_task(carry_out(stage.spec(0, "p"), stage.around, finish))
        await stage.played(2)
        finish.set()
        done = stage.performed(await running)
        stage.check(done)
    assert done.result.outcome is ExecutionOutcome.TIMED_OUT
    assert "a.py" in done.files
