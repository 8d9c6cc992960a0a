"""Qwen Code, unmodified, in its sandbox. Nothing in its headers tells what a call is for."""

from __future__ import annotations

import pytest

from storage.records import ExecutionOutcome
from tasks.rollout.execution import carry_out
from tasks.rollout.harnesses.qwen_code import QwenCode
from tests.harnesses.conftest import MakeStage
from tests.harnesses.stage import ENDLESS, Part, Play, asked, call, has, is_empty, malformed

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NAME = "qwen-code"
WRITE = call("write_file", file_path="/workspace/a.py", content="print(6 * 7)\n")
RUN = call("run_shell_command", command="python3 a.py | tee out.txt", is_background=False)
LOOK = call("list_directory", path="/workspace")
LONG = call("run_shell_command", command="seq 1 4000", is_background=False)

FORKS = {
    "0.24.4": ["", "history edited", "history edited"],
    "0.15.10": ["history edited", "history edited", ""],
}
"""Of the summary and the two calls after it. The turns that it carries over are context. The newer
one's reminders come back with the second of these; the older one has a summariser of its own."""


@pytest.mark.parametrize("version", QwenCode.versions)
async def test_works_in_spite_of_bad_replies(make_stage: MakeStage, version: str) -> None:
    """It asks again after an empty answer, and takes a text that was cut off for the end."""
    lines = [
        "I write it.\n" + WRITE,
        malformed('{"name": "write_file", "arguments": "{\\"file_path\\": "}'),
        call("no_such_tool", x=1),
        call("write_file", path=1.0),
        RUN,
        "",
        ENDLESS,
    ]
    play = Play(Part(has("SCENE-MAIN"), lines, counted=True))
    async with make_stage(
        play, harness={"name": NAME, "version": version, "max_tokens": 300}
    ) as stage:
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py and run it."
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check(done)
    assert done.result.outcome is ExecutionOutcome.COMPLETED, done.result.detail
    assert done.files["out.txt"] == "42\n"
    assert {one.agent for one in done.calls} == {"main"}
    assert [one.finish_reason for one in done.calls] == [
        *["tool_calls"] * 5,
        "stop",
        "length",
    ]
    assert is_empty(done.calls[5])


@pytest.mark.parametrize("version", QwenCode.versions)
async def test_a_sub_agent_and_a_compaction(make_stage: MakeStage, version: str) -> None:
    agent = call(
        "agent",
        description="Look around",
        prompt="SCENE-SUB: look around, and say what there is.",
        subagent_type="general-purpose",
        run_in_background=False,
    )
    snapshot = "<state_snapshot>SCENE-AFTER: a.py is written.</state_snapshot>"
    play = Play(
        Part(asked("(produce|generate) the <state_snapshot>"), [snapshot]),
        Part(has("SCENE-AFTER"), [RUN, "All done."], counted=True),
        Part(has("SCENE-MAIN"), [WRITE, agent, LONG, LONG], counted=True),
        Part(has("SCENE-SUB"), [LOOK, "There is a.py."], counted=True),
    )
    harness = {"name": NAME, "version": version, "context_budget": 45_000}
    async with make_stage(play, harness=harness) as stage:
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py, have it looked at, run it."
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check(done)
    assert (done.result.outcome, done.result.exit_code) == (ExecutionOutcome.COMPLETED, 0)
    assert done.files["out.txt"] == "42\n"
    (sub,) = {one.agent for one in done.calls} - {"main"}
    assert {(one.kind.value, one.parent_agent) for one in done.of(sub)} == {("sub-agent", "main")}
    main = done.of("main")
    place = [one.kind.value for one in main].index("main-summary")
    assert [one.kind.value for one in main[place + 1 :]] == ["main", "main"]
    forks = [(one.fork_reason or "").partition(":")[0] for one in main[place:]]
    assert forks == FORKS[version]
