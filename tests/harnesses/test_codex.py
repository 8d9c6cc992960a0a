"""Codex, unmodified, in its sandbox."""

from __future__ import annotations

import re

import pytest

from storage.records import ExecutionOutcome
from tasks.rollout.execution import carry_out
from tests.harnesses.conftest import MakeStage
from tests.harnesses.stage import ENDLESS, Part, Play, Prompt, asked, call, has, is_empty, malformed

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NAME = "codex"
WRITE = call("exec_command", cmd="echo 'print(6 * 7)' > a.py")
RUN = call("exec_command", cmd="python3 a.py | tee out.txt")
LONG = call("exec_command", cmd="seq 1 3000")


async def test_works_in_spite_of_bad_replies(make_stage: MakeStage) -> None:
    """An answer that is cut off at the end of the context ends it, with an error that is scored."""
    lines = [
        "I write it.\n" + WRITE,
        malformed('{"name": "exec_command", "arguments": "{\\"cmd\\": "}'),
        call("no_such_tool", x=1),
        RUN,
        ENDLESS,
    ]
    play = Play(Part(has("SCENE-MAIN"), lines, counted=True))
    budget = {"context_budget": 15_000, "max_tokens": 384}
    async with make_stage(play, harness={"name": NAME, **budget}, context=16_384) as stage:
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py and run it."
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check(done)
    assert (done.result.outcome, done.result.exit_code) == (ExecutionOutcome.COMPLETED, 1)
    assert done.files["out.txt"] == "42\n"
    assert {one.agent for one in done.calls} == {"main"}
    assert [one.finish_reason for one in done.calls] == [*["tool_calls"] * 4, "length"]
    assert {one.fork_reason for one in done.calls} == {None}


def wait_for_it(prompt: Prompt) -> str:
    """It waits for the agent that it has spawned."""
    found = re.findall(r'agent_id\\?"?: ?\\?"([0-9a-f-]{36})', prompt.text)
    return call("multi_agent_v1.wait_agent", targets=[found[-1]], timeout_ms=3_600_000)


async def test_a_sub_agent_and_a_compaction(make_stage: MakeStage) -> None:
    """An empty answer ends it."""
    spawn = call("multi_agent_v1.spawn_agent", message="SCENE-SUB: look around.")
    play = Play(
        Part(asked("CONTEXT CHECKPOINT COMPACTION"), ["SCENE-AFTER: a.py is written."]),
        Part(has("SCENE-AFTER"), [RUN, ""], counted=True),
        Part(has("SCENE-MAIN"), [WRITE, spawn, wait_for_it, LONG]),
        Part(has("SCENE-SUB"), [call("exec_command", cmd="ls"), "The sub-agent is done."]),
    )
    async with make_stage(play, harness={"name": NAME, "context_budget": 16_000}) as stage:
        stage.tasks.instructions["p"] = (
            "SCENE-MAIN: write a.py, spawn a sub-agent that looks at it, run it."
        )
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check(done)
    assert (done.result.outcome, done.result.exit_code) == (ExecutionOutcome.COMPLETED, 0)
    assert done.files["out.txt"] == "42\n"
    (sub,) = {one.agent for one in done.calls} - {"main"}
    assert {(one.kind.value, one.parent_agent) for one in done.of(sub)} == {("sub-agent", "main")}
    main = done.of("main")
    place = [one.kind.value for one in main].index("main-summary")
    assert (main[place].fork_reason or "").startswith("tools changed"), "it is shown no tools"
    assert (main[place + 1].parent, main[place + 1].fork_reason) == (None, "fresh history")
    assert main[place + 2].parent == main[place + 1].call_id
    assert is_empty(main[-1]), "it takes an empty answer for the end"
