"""mini-swe-agent, unmodified, in its sandbox."""

from __future__ import annotations

import pytest

from storage.records import ExecutionOutcome
from tasks.rollout.execution import carry_out
from tests.harnesses.conftest import MakeStage
from tests.harnesses.stage import ENDLESS, Part, Play, call, has, is_empty, malformed

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NAME = "mini-swe-agent"
WRITE = call("bash", command="echo 'print(6 * 7)' > a.py")
RUN = call("bash", command="python3 a.py | tee out.txt")
SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


async def test_works_in_spite_of_bad_replies(make_stage: MakeStage) -> None:
    """It leaves turns without a good tool call out of its history, which is a fork that says so."""
    lines = [
        "I write it.\n" + WRITE,
        malformed('{"name": "bash", "arguments": "{\\"command\\": "}'),
        RUN,
        "",
        ENDLESS,
        WRITE,
        call("no_such_tool", x=1),
        "done " + SUBMIT,
    ]
    play = Play(Part(has("SCENE-MAIN"), lines, counted=True))
    async with make_stage(play, harness={"name": NAME, "max_tokens": 100}) as stage:
        stage.tasks.instructions["p"] = "SCENE-MAIN: write a.py and run it."
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check(done)
    assert (done.result.outcome, done.result.exit_code) == (ExecutionOutcome.COMPLETED, 0)
    assert done.files["out.txt"] == "42\n"
    assert done.kinds == [("main", "main")]
    assert len(done.calls) == len(lines)
    assert is_empty(done.calls[3])
    assert done.calls[4].finish_reason == "length"
    forks = {(one.fork_reason or "").partition(":")[0] for one in done.calls}
    assert forks == {"", "earlier call"}
