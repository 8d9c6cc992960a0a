"""What a client sends again, and what it keeps of an answer that it did not get whole."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from cells.gateway import resends
from storage.records import CallStatus
from tests.cells.gateway.conftest import LIMIT_S, deltas, prompts

HELLO = [{"role": "user", "content": "hello"}]
MORE = {"role": "user", "content": "more"}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may take as long as they like to come back."""
    monkeypatch.setattr(resends, "GRACE_S", 300.0)


async def go_away(execution, engine, **more) -> None:
    """Ask, and drop the connection in the middle of the answer."""
    engine.reached.clear()
    call = asyncio.create_task(execution.chat(HELLO, **more))
    await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("again", [False, True])
async def test_a_resend_attaches_to_what_runs(
    bench, engine, script, say, patient, stream, again
) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("an answer of some length"))
    engine.hold_after = 16
    await go_away(execution, engine, stream=stream)
    call = asyncio.create_task(execution.chat(HELLO, stream=again))
    engine.release.set()
    response = await call
    text = deltas(response.text)["content"] if again else response.json()["choices"][0]["message"]
    assert (text if again else text["content"]) == "an answer of some length"
    assert len(engine.requests) == 1
    (recorded,) = bench.calls()
    assert recorded.status is CallStatus.COMPLETE


async def test_an_answer_that_nobody_got_is_given_once(bench, engine, script, say, patient) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("first"), say("second"))
    engine.hold_after = 2
    await go_away(execution, engine)
    engine.release.set()
    await bench.until(lambda state: state["calls"] == 1)
    assert (await execution.reply(HELLO))["content"] == "first"
    # It has it now: the same question again is a question.
    script._known.clear()
    assert (await execution.reply(HELLO))["content"] == "second"
    assert len(bench.calls()) == 2


async def test_an_agent_that_moved_on_does_not_come_back(
    bench, engine, script, say, patient
) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("first"), say("else"), say("second"))
    engine.hold_after = 2
    await go_away(execution, engine)
    engine.release.set()
    await bench.until(lambda state: state["calls"] == 1)
    await execution.reply([MORE])
    script._known.clear()
    assert (await execution.reply(HELLO))["content"] == "second"


async def test_moving_on_abandons_what_runs_for_nobody(bench, engine, script, say, patient) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("first"), say("else"))
    engine.hold_after = 2
    await go_away(execution, engine)
    engine.hold_after = None
    assert (await execution.reply([MORE]))["content"] == "else"
    first, second = bench.calls()
    assert first.status is CallStatus.ABANDONED and second.status is CallStatus.COMPLETE


async def test_samples_of_one_question_stay_apart(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    answers = [say("one"), say("two"), say("three")]
    script.say(*answers)
    script.rest = lambda prompt: script.queue.popleft()  # samples: each its own
    engine.hold_after = 1
    calls = [asyncio.create_task(execution.reply(HELLO)) for _ in range(2)]
    async with asyncio.timeout(LIMIT_S):
        while len(engine.requests) < 2:  # noqa: ASYNC110  (it is another's)
            await asyncio.sleep(0.01)
    engine.release.set()
    assert sorted([(await call)["content"] for call in calls]) == ["one", "two"]
    assert (await execution.reply(HELLO))["content"] == "three"
    assert len(bench.calls()) == 3


async def test_a_client_that_says_so_gets_its_answer_again(bench, engine, script, say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("one"))
    first = (await execution.chat(HELLO)).json()
    headers = {"authorization": f"Bearer {execution.key}", "x-agent": "main"}
    headers |= {"x-agent-call": "turn", "x-stainless-retry-count": "1"}
    again = await bench.http.post(
        f"{execution.base_url}/chat/completions",
        json={"model": "any", "messages": HELLO},
        headers=headers,
    )
    assert again.json()["choices"] == first["choices"]
    assert len(bench.calls()) == 1 == len(engine.requests)


async def read_part(execution, engine) -> str:
    """Stream an answer, and keep what comes before the engine stands still."""
    body = {"model": "any", "messages": HELLO, "stream": True}
    headers = {"authorization": f"Bearer {execution.key}", "x-agent": "main"}
    url = f"{execution.base_url}/chat/completions"
    got = ""
    async with execution.http.stream("POST", url, json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                got += delta.get("content") or ""
                if len(got) >= 12:
                    break
    return got


@pytest.mark.parametrize("restart", [False, True])
async def test_a_kept_part_is_spliced_on_the_ids_that_were_delivered(
    make_bench, engine, script, say, tokenizer, patient, restart
) -> None:
    async with make_bench() as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        ids = say("a long answer that breaks off")
        script.say(ids, say("on"), say("and on"))
        engine.hold_after = 20
        part = await read_part(execution, engine)
        assert "a long answer that breaks off".startswith(part) and part
        engine.hold_after = None
        if not restart:
            await goes_on(bench, execution, part)
    if restart:
        async with make_bench() as bench:
            await bench.cell("a", engine)
            await goes_on(bench, await bench.open(), part)
    calls = bench.calls()
    assert [call.status for call in calls] == [
        CallStatus.ABANDONED,
        CallStatus.COMPLETE,
        CallStatus.COMPLETE,
    ]
    first, second, third = calls
    whole = prompts(calls)
    delivered = second.kept - len(whole[first.call_id])
    assert second.parent == first.call_id and 0 < delivered <= len(first.output_ids)
    assert tokenizer.decode(ids[:delivered]) == part
    assert second.fork_reason == f"part kept: {delivered} ids of {first.call_id}"
    assert whole[second.call_id][: second.kept] == whole[first.call_id] + ids[:delivered]
    assert engine.requests[-2]["input_ids"] == whole[second.call_id]
    assert third.parent == second.call_id and third.fork_reason is None
    assert engine.requests[-1]["input_ids"] == whole[third.call_id]


async def goes_on(bench, execution, part: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": part}, MORE]
    messages.append(await execution.reply(messages))
    await execution.reply([*messages, MORE])


async def test_a_new_gateway_gives_what_the_old_one_recorded(
    make_bench, engine, script, say
) -> None:
    script.say(say("<think>so</think>one"), say("two"), say("three"))
    async with make_bench() as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        reply = await execution.reply(HELLO)
        follow = [*HELLO, reply, MORE]
        last = (await execution.chat(follow)).json()
    async with make_bench() as bench:
        await bench.cell("a", engine)
        execution = await bench.open()
        assert (await execution.chat(follow)).json()["choices"] == last["choices"]
        assert len(bench.calls()) == 2
        # What was gone on from was delivered: the same question is a new one.
        script._known.clear()
        assert (await execution.reply(HELLO))["content"] == "three"
