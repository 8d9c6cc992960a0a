"""opencode, unmodified, in its sandbox."""

from __future__ import annotations

import pytest

from storage.records import ExecutionOutcome
from tasks.rollout.execution import carry_out
from tests.harnesses.conftest import MakeStage
from tests.harnesses.stage import ENDLESS, Part, Play, asked, call, has, is_empty, malformed

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NAME = "opencode"
WRITE = call("write", filePath="/workspace/a.py", content="print(6 * 7)\n")
RUN = call("bash", command="python3 a.py | tee out.txt", description="Run it")
TITLE = Part(has("title generator"), ["A title"])


async def test_works_in_spite_of_bad_replies(make_stage: MakeStage) -> None:
    """It tells the policy of bad calls as calls of a tool that is named so, which is a fork, and
    takes a text that was cut off for the end."""
    lines = [
        "I write it.\n" + WRITE,
        malformed('{"name": "write", "arguments": "{\\"filePath\\": "}'),
        call("no_such_tool", x=1),
        RUN,
        ENDLESS,
    ]
    play = Play(TITLE, Part(has("SCENE-MAIN"), lines, counted=True))
    async with make_stage(play, harness={"name": NAME, "max_tokens": 300}) as stage:
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py and run it."
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check(done)
    assert (done.result.outcome, done.result.exit_code) == (ExecutionOutcome.COMPLETED, 0)
    assert done.files["out.txt"] == "42\n"
    assert {one.agent for one in done.calls} == {"main", "background"}
    (title,) = done.of("background")
    assert title.kind.value == "background"
    main = done.of("main")
    assert [one.finish_reason for one in main] == [*["tool_calls"] * 4, "length"]
    forks = [(one.fork_reason or "").partition(":")[0] for one in main]
    assert forks == ["", "", "history edited", "history edited", ""]


async def test_a_sub_agent_and_a_compaction(make_stage: MakeStage) -> None:
    """An empty answer ends it."""
    task = call(
        "task",
        description="Look around",
        prompt="SCENE-SUB: look around, and say what there is.",
        subagent_type="general",
    )
    long = call("bash", command="seq 1 6000", description="Count")
    play = Play(
        TITLE,
        Part(asked("summar"), ["SCENE-AFTER: a.py is written."]),
        Part(has("SCENE-AFTER"), [RUN, ""], counted=True),
        Part(has("SCENE-MAIN"), [WRITE, task, long]),
        Part(has("SCENE-SUB"), [call("glob", pattern="*"), "There is a.py."]),
    )
    async with make_stage(play, harness={"name": NAME, "context_budget": 20_000}) as stage:
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py, have it looked at, run it."
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check(done)
    assert (done.result.outcome, done.result.exit_code) == (ExecutionOutcome.COMPLETED, 0)
    assert done.files["out.txt"] == "42\n"
    (sub,) = {one.agent for one in done.calls} - {"main", "background"}
    assert {(one.kind.value, one.parent_agent) for one in done.of(sub)} == {("sub-agent", "main")}
    assert {one.kind.value for one in done.of("background")} == {"background"}
    assert [one.kind.value for one in done.of("main")].count("main-summary") >= 1
    assert is_empty(done.of("main")[-1]), "it takes an empty answer for the end"
