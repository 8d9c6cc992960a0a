"""Speed of the gateway: recorded, streamed calls of about 600 new tokens, on a scripted engine.

Prints one JSON object. The same client also talks to a plain aiohttp pass-through and to a bare
proxy (``gateway_peers``) in front of the same engine, in the same run. Each of them runs on one
core; its processor time a call (``cpu_ms``) is what other work on the machine changes least. Run it
with ``python -m tests.benchmarks.gateway``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cells.daemon import Registration
from cells.gateway.canonical import tools_key
from cells.gateway.codec import Codec
from cells.gateway.dialects.chat import ChatDialect
from cells.gateway.matching import Branches, Node, encode_ids, plan_call
from cells.gateway.recording import ExecutionLog
from cells.gateway.rest import give_back_memory
from cells.gateway.seen import Seen
from cells.gateway.sessions import Session
from configs.load import dump_config
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store

MARKS = "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response>"
MARKS += " </tool_response> <think> </think>"
NEW_IN, NEW_OUT = 480, 120
TURNS = 20
"""Turns of a conversation before a new one begins."""
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
HEADERS = {"content-type": "application/json", "x-agent": "main", "x-agent-call": "turn"}
Turn = Callable[[], Awaitable[float]]


def corpus() -> str:
    """Python source, as agents read it."""
    folder = Path(json.__file__).parent.parent
    names = ("argparse.py", "asyncio/base_events.py", "inspect.py", "tarfile.py", "typing.py")
    return "".join((folder / name).read_text() for name in names)


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=MARKS.split(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")


class Texts:
    """What tools answer and what the policy says."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        ids = tokenizer.encode(text)
        self._results = [
            tokenizer.decode(ids[at : at + NEW_IN]) for at in range(0, len(ids) - NEW_IN, NEW_IN)
        ]
        said = tokenizer.decode(ids[: NEW_OUT - 30])
        call = '<tool_call>\n{"name": "run", "arguments": {"path": "a.py"}}\n</tool_call>'
        self.reply = tokenizer.encode(f"<think>\nfine\n</think>\n\n{said}\n{call}<|im_end|>")
        self._rng = random.Random(0)

    def result(self) -> str:
        return self._rng.choice(self._results)


class Conversation:
    """One session of an agent that calls a tool in each turn."""

    def __init__(self, http: aiohttp.ClientSession, texts: Texts, url: str, key: str) -> None:
        self._http = http
        self._texts = texts
        self._url = url
        self._headers = {**HEADERS, "authorization": f"Bearer {key}"}
        self._messages = [orjson.dumps({"role": "system", "content": texts.result()})]
        self._messages.append(orjson.dumps({"role": "user", "content": "Make it work."}))
        self._tail = b'],"stream":true,"model":"m","tools":' + orjson.dumps([TOOL]) + b"}"
        self.turns = 0

    async def turn(self) -> float:
        """Seconds until the whole answer was read."""
        body = b'{"messages":[' + b",".join(self._messages) + self._tail
        start = time.perf_counter()
        async with self._http.post(self._url, data=body, headers=self._headers) as answer:
            data = await answer.read()
        seconds = time.perf_counter() - start
        assert answer.status == 200, data
        self.turns += 1
        self._take(data)
        return seconds

    def _take(self, data: bytes) -> None:
        content, call_id, arguments = "", "call", ""
        for line in data.split(b"\n\n"):
            if line.startswith(b'data: {"id"'):
                for choice in orjson.loads(line[6:])["choices"]:
                    delta = choice["delta"]
                    content += delta.get("content") or ""
                    for call in delta.get("tool_calls", ()):
                        call_id = call.get("id", call_id)
                        arguments += call["function"].get("arguments", "")
        call = {"id": call_id, "type": "function"}
        call["function"] = {"name": "run", "arguments": arguments or "{}"}
        echo = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call_id, "content": self._texts.result()}
        self._messages += [orjson.dumps(echo), orjson.dumps(result)]


async def closed_loop(turns: list[Turn], seconds: float) -> tuple[int, float]:
    """Calls and seconds, when each session asks as soon as it has its answer."""
    start = time.perf_counter()
    done = 0

    async def ask(turn: Turn) -> None:
        nonlocal done
        while time.perf_counter() - start < seconds:
            await turn()
            done += 1

    await asyncio.gather(*(ask(turn) for turn in turns))
    return done, time.perf_counter() - start


async def open_loop(turns: list[Turn], rate: float, seconds: float) -> tuple[list[float], float]:
    """Seconds of calls that begin at a steady rate, whatever became of those before, in order; and
    by how much the latest began later than it should: what this client itself could not keep."""
    free = list(turns)
    running: list[asyncio.Task[None]] = []
    took: list[float] = []
    late = 0.0

    async def ask(turn: Turn) -> None:
        took.append(await turn())
        free.insert(0, turn)

    start = time.perf_counter()
    for number in range(max(8, int(rate * seconds))):
        due = start + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        late = max(late, time.perf_counter() - due)
        if free:
            running.append(asyncio.create_task(ask(free.pop())))
    await asyncio.gather(*running)
    return sorted(took), late


class Target:
    """What the client talks to: a process, and how sessions at it are begun."""

    def __init__(self, pid: int, begin: Callable[[], Awaitable[Conversation]]) -> None:
        self.process = psutil.Process(pid)
        self._begin = begin

    async def sessions(self, count: int) -> list[Turn]:
        return [await self._session() for _ in range(count)]

    async def _session(self) -> Turn:
        conversation = await self._begin()

        async def turn() -> float:
            nonlocal conversation
            if conversation.turns == TURNS:
                conversation = await self._begin()
            return await conversation.turn()

        return turn

    def cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def measure(target: Target, sessions: int, seconds: float) -> dict[str, float]:
    """Sustained load, then the time of a call at half of it."""
    turns = await target.sessions(sessions)
    await asyncio.gather(*(turn() for turn in turns))
    cpu = target.cpu()
    calls, took = await closed_loop(turns, seconds)
    cpu_ms = (target.cpu() - cpu) / calls * 1e3
    times, late = await open_loop(turns, calls / took / 2, seconds)
    return {
        "calls_per_s": calls / took,
        "open_calls_per_s": calls / took / 2,
        "cpu_ms": cpu_ms,
        "calls_per_cpu_s": 1e3 / cpu_ms if cpu_ms else 0.0,
        "p50_ms": statistics.median(times) * 1e3,
        "p99_ms": times[min(len(times) - 1, int(0.99 * len(times)))] * 1e3,
        "client_late_ms": late * 1e3,
    }


def render_times(codec: Codec, texts: Texts, turns: int) -> dict[str, float]:
    """Processor milliseconds around turn 10 and the last, of reading a body, and of match, splice
    and render alone."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 200, 50)  # as the gateway does
    branches, seen, dialect = Branches(), Seen(), ChatDialect()
    read, rendered = [], []
    messages: list[dict[str, Any]] = [{"role": "system", "content": texts.result()}]
    messages.append({"role": "user", "content": "Make it work."})
    for number in range(turns):
        body = orjson.dumps({"messages": messages, "tools": [TOOL]})
        start = time.thread_time()
        request = dialect.read(body, seen)
        read.append(time.thread_time() - start)
        start = time.thread_time()
        node = branches.match(request.messages, "main")
        plan = plan_call(branches, node, request, "main", tools_key(request.tools), codec)
        plan.parts()
        rendered.append(time.thread_time() - start)
        assert plan.fork is None
        function = {"name": "run", "arguments": '{"path": "a.py"}'}
        call = {"id": f"c{number}", "type": "function", "function": function}
        reply = {"role": "assistant", "content": "so", "tool_calls": [call]}
        node = Node(
            *(f"n{number}", "main", plan.parent, plan.kept, array("i", plan.new_ids)),
            *(array("i", texts.reply), plan.messages, reply, plan.tools, plan.depth),
            length=plan.tokens + len(texts.reply),
        )
        node.remember([*request.messages, reply])
        branches.add(node)
        messages += [reply, {"role": "tool", "tool_call_id": f"c{number}", "content": ""}]
        messages[-1]["content"] = texts.result()
    early, late = statistics.median(rendered[5:15]), statistics.median(rendered[-10:])
    return {
        "turns": turns,
        "tokens_last_turn": plan.tokens,
        "read_ms_turn_10": statistics.median(read[5:15]) * 1e3,
        "read_ms_last_turn": statistics.median(read[-10:]) * 1e3,
        "render_ms_turn_10": early * 1e3,
        "render_ms_last_turn": late * 1e3,
        "render_turn_300_over_10": late / early,
    }


class Parts:
    """The processes of a measurement."""

    def __init__(self, folder: Path, texts: Texts, policy: Path) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = (folder / "log").open("wb")
        reply = ",".join(map(str, texts.reply))
        self.engine, _ = self._start("-m", "tests.engines.scripted", "--reply", reply)
        peer = ("-m", "tests.benchmarks.gateway_peers")
        self.proxy = self._start(*peer, "passthrough", self.engine, cpus={0})
        files = (str(policy), str(folder / "bare.jsonl"))
        self.bare = self._start(*peer, "bare", self.engine, *files, cpus={0})
        self.store, self.layout = Store(folder / "root"), RunLayout("r1")
        config = RunConfig.model_validate(
            {
                "model": {"context": 262_144, "renderer": "qwen3"},
                "cells": {"cells": [{"name": "a", "core": True}], "kv_tokens": 262_144},
            }
        )
        self.store.write(self.layout.config, dump_config(config).encode())
        argv = ["-m", "cells.gateway.server", "--root", self.store.url, "--run", "r1"]
        process = self._spawn(*argv, "--policy", str(policy), cpus={0})
        while not self.store.exists(self.layout.host("gateway")):
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        self.gateway = self.store.read_record(self.layout.host("gateway"), Registration)

    def _spawn(self, *argv: str, cpus: set[int]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *argv], stdout=subprocess.PIPE, stderr=self._log
        )
        os.sched_setaffinity(process.pid, cpus & os.sched_getaffinity(0) or cpus)
        self._processes.append(process)
        return process

    def _start(self, *argv: str, cpus: set[int] | None = None) -> tuple[str, int]:
        process = self._spawn(*argv, cpus=cpus or os.sched_getaffinity(0) - {0} or {0})
        assert process.stdout is not None
        return process.stdout.readline().decode().strip(), process.pid

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.close()


class Client:
    """Begins sessions at both targets."""

    def __init__(self, http: aiohttp.ClientSession, parts: Parts, texts: Texts) -> None:
        self._http, self._parts, self._texts = http, parts, texts
        self._admin = {"authorization": f"Bearer {parts.gateway.token}"}
        self._opened = 0

    async def admin(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self._parts.gateway.url}/admin/{path}"
        async with self._http.put(url, json=body, headers=self._admin) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async def keep_alive(self) -> None:
        url = f"{self._parts.gateway.url}/lease"
        while True:
            async with self._http.post(url, headers=self._admin):
                await asyncio.sleep(2)

    async def at_gateway(self) -> Conversation:
        self._opened += 1
        path = f"executions/e{self._opened}"
        opened = await self.admin(path, {"temperature": 1.0, "policy_version": 0})
        url = f"{opened['base_url']}/chat/completions"
        return Conversation(self._http, self._texts, url, opened["api_key"])

    async def at(self, peer: str) -> Conversation:
        self._opened += 1
        url = f"{peer}/v1/chat/completions"
        return Conversation(self._http, self._texts, url, f"s{self._opened}")

    async def direct(self, seconds: float, rate: float) -> list[float]:
        """The same load on ``/generate`` itself, with the ids of a short conversation."""
        ids = encode_ids(self._texts.reply * 40)
        body = b'{"stream":true,"input_ids":[' + ids + b"]}"

        async def turn() -> float:
            start = time.perf_counter()
            url = f"{self._parts.engine}/generate"
            async with self._http.post(url, data=body, headers=HEADERS) as answer:
                await answer.read()
            return time.perf_counter() - start

        return (await open_loop([turn] * 64, rate, seconds))[0]


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    text = corpus()
    tokenizer = make_tokenizer(text)
    policy = folder / "policy"
    tokenizer.save_pretrained(policy)
    texts = Texts(tokenizer, text)
    rendered = render_times(Codec(tokenizer, "qwen3"), texts, arguments.turns)
    parts = Parts(folder, texts, policy)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            client = Client(http, parts, texts)
            alive = asyncio.create_task(client.keep_alive())
            cell = {"epoch": 1, "url": parts.engine, "capacity": 1_000_000, "version": 0}
            await client.admin("cells/a", {**cell, "state": "serving"})
            result = await figures(arguments, client, parts)
            alive.cancel()
    finally:
        parts.close()
    return result | rendered


async def figures(arguments: argparse.Namespace, client: Client, parts: Parts) -> dict[str, Any]:
    gateway = Target(parts.gateway.pid, client.at_gateway)
    peers = {"passthrough": parts.proxy, "bare": parts.bare}
    seconds = arguments.seconds
    ours: dict[str, dict[str, float]] = {}
    theirs: dict[str, dict[str, dict[str, float]]] = {peer: {} for peer in peers}
    added50, added99 = {}, {}
    grown = await long_sessions(client, gateway, arguments)
    grown |= await idle_sessions(parts, arguments.idle)
    for sessions in arguments.sessions:
        name = str(sessions)
        for peer, (url, pid) in peers.items():
            target = Target(pid, partial(client.at, url))
            theirs[peer][name] = await measure(target, sessions, seconds)
        ours[name] = await measure(gateway, sessions, seconds)
        direct = await client.direct(seconds, ours[name]["calls_per_s"] / 2)
        added50[name] = ours[name]["p50_ms"] - statistics.median(direct) * 1e3
        added99[name] = ours[name]["p99_ms"] - direct[int(0.99 * len(direct))] * 1e3
    return {
        "new_tokens_a_call": NEW_IN + NEW_OUT,
        "calls_per_s": {name: one["calls_per_s"] for name, one in ours.items()},
        "calls_per_core_s": {name: one["calls_per_cpu_s"] for name, one in ours.items()},
        "added_ms_p50": added50,
        "added_ms_p99": added99,
        **{
            f"over_{peer}": {
                name: {key: ours[name][key] / one[name][key] for key in ("cpu_ms", "p50_ms")}
                for name in ours
            }
            for peer, one in theirs.items()
        },
        "cpu_ms": {
            who: {name: one["cpu_ms"] for name, one in figures.items()}
            for who, figures in {"gateway": ours, **theirs}.items()
        },
        "gateway": ours,
        **theirs,
        **grown,
    }


async def long_sessions(
    client: Client, gateway: Target, arguments: argparse.Namespace
) -> dict[str, float]:
    """Time of a call as a session grows, and what the gateway holds of one that has grown: beyond
    a first one, which brings what the process needs for any."""

    async def grow() -> tuple[list[float], list[float]]:
        long = await client.at_gateway()
        took, cpu = [], []
        for _ in range(arguments.turns):
            start = gateway.cpu()
            took.append(await long.turn())
            cpu.append(gateway.cpu() - start)
        return took, cpu

    took, cpu = await grow()
    before = gateway.process.memory_info().rss
    for _ in range(arguments.long):
        await grow()
    warm = gateway.process.memory_info().rss
    early, late = statistics.median(took[5:15]), statistics.median(took[-10:])
    return {
        "call_ms_turn_10": early * 1e3,
        "call_ms_last_turn": late * 1e3,
        "call_turn_300_over_10": late / early,
        "cpu_ms_turns_5_to_25": sum(cpu[5:25]) / 20 * 1e3,
        "cpu_ms_last_turns": sum(cpu[-20:]) / 20 * 1e3,
        "kib_per_warm_session": (warm - before) / arguments.long / 1024,
    }


async def idle_sessions(parts: Parts, count: int) -> dict[str, float]:
    """What so many equal sessions hold while they rest, by the memory of this process: each is
    read from the journal of the first long session, as a gateway that starts again reads it, and
    put to rest as the gateway does."""

    async def rested() -> Session:
        log = ExecutionLog(parts.store, parts.layout, "e1")
        record = log.session()
        assert record is not None
        session = Session(record, log, log.read())
        await session.rest(0.0)
        return session

    def held() -> int:
        gc.collect()
        give_back_memory()
        return psutil.Process().memory_info().rss

    kept = [await rested() for _ in range(8)]
    before = held()
    kept += [await rested() for _ in range(count)]
    return {"kib_per_idle_session": (held() - before) / count / 1024, "idle_sessions": count}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 64, 512, 2000])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--long", type=int, default=2, help="more sessions of so many turns")
    parser.add_argument("--idle", type=int, default=200, help="sessions that rest")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(uvloop.run(run(arguments, Path(folder)))))


if __name__ == "__main__":
    main()
