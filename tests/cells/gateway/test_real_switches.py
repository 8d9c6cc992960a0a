"""Cells that leave and come back under harnesses, on two real SGLang servers with shared pages."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import tasks.rollout.harnesses.loop as loop
from cells.gateway.codec import load_codec
from storage.records import Call, CallStatus
from tests.cells.gateway.conftest import Bench, MakeBench, prompts
from tests.conftest import TINY_CONTEXT, EngineAddress, make_tiny_policy
from tests.engines.pooled import pooled_servers
from tests.moved import moved_prefixes

pytestmark = pytest.mark.real

CELLS = ("a", "b")
REPLY_TOKENS = 64
TURNS = 8
LIMIT_S = 600.0
LONG_CONTEXT = 8192
BATCH_TOKENS = 16_384
"""Of a forward that recorded tokens are scored again by."""


class Load(NamedTuple):
    """What the cells have to bear.

    Args:
        executions: at least so many, and
        switches: at least so many times that a cell leaves; it goes on until both are reached.
        at_once: harnesses that are at work.
        lines: of an execution's instruction, which no other one has.
        pause_s: how long a cell stays away, and how long both serve then.
        found: more than this share of what moves has to be found; few prefixes, moved in the
            first seconds of a busy machine, may come too late.
    """

    executions: int
    switches: int
    at_once: int
    lines: int
    pause_s: float
    found: float = 0.8


class Executions:
    """Harnesses at work, while one of two cells leaves again and again."""

    def __init__(
        self, bench: Bench, engines: Sequence[EngineAddress], folder: Path, load: Load
    ) -> None:
        self.bench = bench
        self.engines = dict(zip(CELLS, engines, strict=True))
        self.folder = folder
        self.load = load
        self.names: list[str] = []
        self.switches = 0

    async def run(self) -> None:
        for name in CELLS:
            await self._put(name, "serving")
        async with asyncio.TaskGroup() as group:
            switching = group.create_task(self._switch())
            async with asyncio.TaskGroup() as working:
                for _ in range(self.load.at_once):
                    working.create_task(self._one_after_another())
            switching.cancel()

    async def _put(self, name: str, state: str) -> None:
        engine = self.engines[name]
        body = {"epoch": 1, "url": engine.url, "token": engine.token, "capacity": 1000}
        await self.bench.admin(
            "PUT", f"/admin/cells/{name}", {**body, "version": 0, "state": state}
        )

    async def _switch(self) -> None:
        drawn = random.Random(2)
        while True:
            name = drawn.choice(CELLS)
            await self.bench.until(
                lambda state, name=name: state["cells"][name]["in_flight"] > 0, LIMIT_S
            )
            await self._put(name, "leaving")
            await asyncio.sleep(self.load.pause_s)
            await self._put(name, "serving")
            self.switches += 1
            await asyncio.sleep(self.load.pause_s)

    async def _one_after_another(self) -> None:
        while len(self.names) < self.load.executions or self.switches < self.load.switches:
            self.names.append(name := f"e{len(self.names)}")
            await self._work(name)

    async def _work(self, name: str) -> None:
        """One execution, which has to end by itself, after all its turns and with no error."""
        opened = await self.bench.open(name)
        (workspace := self.folder / name).mkdir()
        instruction = self.folder / f"{name}.txt"
        instruction.write_text(
            "".join(f"{name}_{line}(x): x plus {line}\n" for line in range(self.load.lines))
        )
        flags = {
            "instruction-file": instruction,
            "turns": TURNS,
            "max-tokens": REPLY_TOKENS,
            "context-budget": TINY_CONTEXT // 2 + 25 * self.load.lines,
            "give-up-s": 1,  # an answer that is an error ends it
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", loop.__file__),
            *(text for flag, value in flags.items() for text in (f"--{flag}", str(value))),
            cwd=workspace,
            env={"OPENAI_BASE_URL": opened.base_url, "OPENAI_API_KEY": opened.key},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()
        said = output.decode(errors="replace")
        assert (process.returncode, said) in ((0, "loop: turns\n"), (0, "loop: done\n")), name
        # As a run does: one that is left open keeps its place, and no new one comes to its cell.
        await self.bench.admin("DELETE", f"/admin/executions/{name}")


async def run_and_check(
    make_bench: MakeBench,
    policy: Path,
    engines: Sequence[EngineAddress],
    folder: Path,
    load: Load,
) -> None:
    codec = load_codec(policy, "cells.gateway.terse:TerseRenderer")
    pooled = {"kv_pool": True, "kv_backup_limit_s": 30}
    model = {"context": Qwen3Config.from_pretrained(policy).max_position_embeddings}
    async with make_bench(renderer=codec, cells=pooled, model=model, call_limit_s=500) as bench:
        bench.http.timeout = httpx.Timeout(LIMIT_S)
        running = Executions(bench, engines, folder, load)
        await running.run()
        recorded = [bench.calls(name) for name in running.names]
    taken = sum(len(call.served) - 1 for calls in recorded for call in calls if call.served)
    assert taken >= running.switches / 2, "generations were taken from their cells"
    worst = max(assert_policys(recorded, policy))
    tokens, cached = map(sum, zip(*(moved_prefixes(calls) for calls in recorded), strict=True))
    output = sum(len(call.output_ids) for calls in recorded for call in calls)
    print(
        f"\n{len(recorded)} executions, {sum(map(len, recorded))} calls, {output} tokens, "
        f"{running.switches} switches, {taken} generations taken away; largest difference of a "
        f"log-prob {worst:.1e}; found after a move {cached} of {tokens} tokens "
        f"({cached / tokens:.1%})"
    )
    assert cached > load.found * tokens


def assert_policys(recorded: list[list[Call]], policy: Path) -> Iterator[float]:
    """Each recorded token has the log-prob that a forward of the whole context gives it; the
    largest difference of each call."""
    model = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32)
    rows: list[tuple[list[int], Call]] = []
    for calls in recorded:
        whole = prompts(calls)
        for call in calls:
            assert call.status is CallStatus.COMPLETE
            assert 0 < len(call.output_ids) <= REPLY_TOKENS
            assert [(s.version, s.start, s.end) for s in call.spans] == [
                (0, 0, len(call.output_ids))
            ]
            rows.append((whole[call.call_id], call))
    rows.sort(key=lambda row: len(row[0]))
    while rows:
        size = max(1, BATCH_TOKENS // (len(rows[-1][0]) + REPLY_TOKENS))
        batch, rows = rows[-size:], rows[:-size]
        contexts = [torch.tensor([*prompt, *call.output_ids]) for prompt, call in batch]
        # What is behind a context does not change what attention sees of it.
        padded = torch.nn.utils.rnn.pad_sequence(contexts, batch_first=True)
        with torch.no_grad():
            logits = model(padded).logits
        for at, (prompt, call) in enumerate(batch):
            output = torch.tensor(call.output_ids)
            found = logits[at, len(prompt) - 1 : len(prompt) - 1 + len(output)].log_softmax(-1)
            expected = found.gather(1, output[:, None])[:, 0]
            gap = float((torch.tensor(call.output_logprobs) - expected).abs().max())
            assert gap < 1e-3, call
            yield gap


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(12, 8, 12, 8, 0.1, found=0.5), marks=pytest.mark.timeout(900)),
        pytest.param(
            Load(200, 40, 32, 8, 1.5), marks=[pytest.mark.long, pytest.mark.timeout(1800)]
        ),
    ],
)
async def test_every_token_under_forced_switches_is_the_policys(
    make_bench: MakeBench,
    pooled_pair: tuple[EngineAddress, ...],
    tiny_policy: Path,
    tmp_path: Path,
    load: Load,
) -> None:
    await run_and_check(make_bench, tiny_policy, pooled_pair, tmp_path, load)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_long_contexts_follow(make_bench: MakeBench, tmp_path: Path) -> None:
    policy = make_tiny_policy(tmp_path / "policy", seed=0, context=LONG_CONTEXT)
    async with pooled_servers(policy, LONG_CONTEXT, tmp_path) as servers:
        engines = [EngineAddress(server.url, server.token) for server in servers]
        load = Load(executions=40, switches=20, at_once=12, lines=120, pause_s=1.5)
        await run_and_check(make_bench, policy, engines, tmp_path, load)
