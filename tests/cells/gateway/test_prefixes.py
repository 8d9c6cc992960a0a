"""The invariant of prefixes, in figures: the loop harness, the official clients, requests of known
harnesses, and a conversation with each edit that clients are known to make, in one run.

``pytest tests/cells/gateway/test_prefixes.py -s`` prints how many calls go on from others, how many
of those begin with the very ids that were sampled, and why the rest forks.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from cells.gateway.forks import read_executions, report_forks
from storage.records import Call
from tests.cells.gateway import test_dialect as chat
from tests.cells.gateway import test_edits as edits
from tests.cells.gateway import test_loop_harness as loop
from tests.cells.gateway import test_messages as messages
from tests.cells.gateway import test_responses as responses
from tests.cells.gateway import test_splice as splice
from tests.cells.gateway.conftest import Bench, Opened, prompts
from tests.engines.scripted import Script, ScriptedEngine

Say = Callable[..., list[int]]


class Named:
    """A gateway at which one conversation has an execution of its own."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench = bench
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bench, name)

    async def open(self, **more: Any) -> Opened:
        return await self._bench.open(self._name, **more)

    def calls(self, _: str = "") -> list[Call]:
        return self._bench.calls(self._name)


Part = Callable[[Any, ScriptedEngine, Script, Say], Awaitable[None]]


async def edited(change: edits.Edit, bench: Any, engine: Any, script: Script, say: Say) -> None:
    await bench.cell("a", engine)
    execution = await bench.open()
    await execution.reply(change(await edits.conversation(execution, script, say)))


CLIENTS: dict[str, Part] = {
    "openai-chat": chat.test_official_client_whole,
    "openai-chat-streamed": partial(chat.test_official_client_streamed, usage=True),
    "openai-responses": partial(responses.test_official_client, stream=False),
    "openai-responses-streamed": partial(responses.test_official_client, stream=True),
    "anthropic": partial(messages.test_official_client, stream=False),
    "anthropic-streamed": partial(messages.test_official_client, stream=True),
    "claude-code": messages.test_claude_codes_requests_go_on_from_one_another,
    "codex": responses.test_codex_requests_go_on_from_one_another,
    "cut-off": splice.test_cut_off_turn_is_closed_behind_what_was_sampled,
    "compaction": splice.test_compaction_starts_a_fresh_history,
    "going-back": splice.test_going_back_forks_from_the_earlier_call,
    "sub-agents": splice.test_sub_agents_run_at_once_and_stay_apart,
}
CHANGES = {f"spliced-{at}": edit for at, edit in enumerate(edits.SPLICED.values())}
CHANGES |= {f"forked-{at}": edit for at, (edit, _) in enumerate(edits.FORKED.values())}


@dataclass
class Prefixes:
    """What the engines were sent, held against what they had said."""

    extended: int = 0
    """Calls that go on from another."""
    whole: int = 0
    """Of these, those whose prompts begin with exactly the ids of that call's prompt and answer."""
    carried: int = 0
    """Sampled ids in these prompts."""
    retokenised: int = 0
    """Of these, other ids than were sampled."""
    would_differ: int = 0
    """Answers that a tokenizer would write with other ids than were sampled."""

    def take(self, calls: list[Call], sent: set[tuple[int, ...]], again: Say) -> None:
        """Count the calls of an execution.

        Args:
            sent: all prompts that engines were sent.
            again: ids that a tokenizer makes of what ids say.
        """
        known, by_id = prompts(calls), {call.call_id: call for call in calls}
        for call in calls:
            prompt = known[call.call_id]
            assert tuple(prompt) in sent, f"{call.call_id}: another prompt was sent"
            if call.parent is None:
                continue
            above = by_id[call.parent]
            before = known[above.call_id] + list(above.output_ids)
            self.extended += 1
            self.whole += prompt[: len(before)] == before
            said = list(above.output_ids)
            echoed = prompt[len(known[above.call_id]) : len(before)]
            self.carried += len(said)
            self.retokenised += sum(a != b for a, b in zip(said, echoed, strict=True))
            self.would_differ += again(said) != said


async def test_every_continued_call_begins_with_what_was_sampled(
    bench: Bench, say: Say, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    sent: set[tuple[int, ...]] = set()

    async def play(name: str, part: Part, *, engines: int = 1) -> None:
        script = Script()
        made = [ScriptedEngine(script) for _ in range(engines)]
        for engine in made:
            await engine.start()
        try:
            await part(Named(bench, name), *made, script, say)
            await bench.admin("DELETE", f"/admin/executions/{name}")  # its place is the next one's
        finally:
            for engine in made:
                await engine.stop()
                sent.update(tuple(one["input_ids"]) for one in engine.requests)

    await play("loop", partial(loop.test_loop_histories_splice, tmp_path=tmp_path), engines=2)
    await bench.admin("DELETE", "/admin/cells/b?epoch=1")
    for name, part in CLIENTS.items():
        await play(name, part)
    for name, change in CHANGES.items():
        await play(name, partial(edited, change))

    def again(ids: list[int]) -> list[int]:
        return list(tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False))

    figures = Prefixes()
    names = ["loop", *CLIENTS, *CHANGES]
    for name in names:
        figures.take(bench.calls(name), sent, again)
    report = report_forks(read_executions(bench.store, bench.layout))
    share = figures.whole / figures.extended
    print(json.dumps(asdict(report) | asdict(figures) | {"invariant_share": share}))
    assert (share, figures.retokenised, report.unexplained) == (1.0, 0, ())
    assert figures.would_differ > figures.extended / 2  # or nothing was seen
    assert report.calls == report.first + report.continued + sum(report.forks.values())
    reasons = [reason for _, reason in edits.FORKED.values()]
    assert all(report.forks[reason] >= reasons.count(reason) for reason in reasons)
    assert not any(
        call.fork_reason
        for at in range(len(edits.SPLICED))
        for call in bench.calls(f"spliced-{at}")
    )
