"""Several processes that serve one run: the first one starts the others and speaks for all.

Each execution belongs to the process that its id hashes to; what the first process answers for it
(its base URL above all) comes from there, and its harness then talks to that process alone. All
others die with the first; one that dies alone is started again, at its old address. What they had
is in storage, so clients that try again go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import aiohttp
import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cells.daemon import Registration
from cells.process import end_group, spawn
from cells.tls import trust_of
from storage.layout import RunLayout
from storage.objects import StorageError, Store
from storage.records import RecordError

log = logging.getLogger(__name__)

START_LIMIT_S = 120.0
ASK_LIMIT_S = 30.0
LOOK_EVERY_S = 0.2


class ShardGoneError(RuntimeError):
    """A process of the gateway does not answer; it is started again."""


def process_names(name: str, count: int) -> list[str]:
    """Names of the registrations of a gateway's processes, the first one's first."""
    return [name, *(f"{name}-{number}" for number in range(1, count))]


def share(capacity: int, count: int) -> int:
    """The places at a cell that one process gives away. Rounded up: a cell with fewer places than
    there are processes must serve all of them, and its engine queues what is too much."""
    return -(-capacity // count)


class Shards:
    """The other processes, as the first one sees them.

    Args:
        argv: how this process was started, without its name.
    """

    def __init__(
        self, store: Store, layout: RunLayout, name: str, count: int, argv: Sequence[str]
    ) -> None:
        self.count = count
        self._store = store
        self._layout = layout
        self._names = process_names(name, count)[1:]
        self._argv = tuple(argv)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._cells: dict[str, dict[str, Any]] = {}
        self._http: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, lease_s: float) -> None:
        """Start them, and keep them alive until ``close``.

        Raises:
            ShardGoneError: one does not come up.
        """
        timeout = aiohttp.ClientTimeout(total=ASK_LIMIT_S)
        self._http = aiohttp.ClientSession(timeout=timeout)
        for name in self._names:
            self._spawn(name)
        await asyncio.gather(*(self._up(name) for name in self._names))
        self._watching = asyncio.create_task(self._watch(lease_s / 6))

    async def close(self) -> None:
        """End them."""
        if self._watching is not None:
            self._watching.cancel()
        ends = (asyncio.to_thread(end_group, one.pid, 5) for one in self._children.values())
        await asyncio.gather(*ends)
        if self._http is not None:
            await self._http.close()

    def owner(self, execution_id: str) -> str | None:
        """The process of an execution; None for the first one."""
        number = crc32(execution_id.encode()) % self.count
        return self._names[number - 1] if number else None

    async def ask(
        self, name: str, method: str, path: str, body: Any = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer of an administrative request to one process.

        Raises:
            ShardGoneError: it does not answer.
        """
        assert self._http is not None
        try:
            found = await asyncio.to_thread(self._registration, name)
            async with self._http.request(
                method,
                f"{found.url}{path}",
                data=orjson.dumps(body) if body is not None else None,
                headers={"authorization": f"Bearer {found.token}"},
                ssl=trust_of(found.ca),
            ) as answer:
                return answer.status, orjson.loads(await answer.read())
        except (aiohttp.ClientError, OSError, StorageError, RecordError, ValueError) as error:
            raise ShardGoneError(f"{name}: does not answer: {error!r}; try again") from error

    async def ask_all(
        self, method: str, path: str, body: Any = None
    ) -> list[tuple[int, dict[str, Any]]]:
        """The answers of all others; those that are away are left out, and told when they are
        back."""
        asked = [self.ask(name, method, path, body) for name in self._names]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def put_cell(self, name: str, body: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        """Tell all others of a cell, each with its share of the places."""
        self._cells[name] = {**body, "capacity": share(body["capacity"], self.count)}
        return await self.ask_all("PUT", f"/admin/cells/{name}", self._cells[name])

    async def delete_cell(self, name: str, epoch: int) -> None:
        """Tell all others that a cell is gone."""
        self._cells.pop(name, None)
        await self.ask_all("DELETE", f"/admin/cells/{name}?epoch={epoch}")

    def _spawn(self, name: str) -> None:
        # What an earlier first process left there is not this one's.
        self._store.delete(self._layout.host(name))
        path = self._store.local_file(self._layout.log(name))
        argv = [sys.executable, *self._argv, "--name", name, "--shard"]
        self._children[name] = spawn(argv, env=os.environ, log=path)

    async def _up(self, name: str) -> None:
        """Wait until a process serves, and tell it of the cells."""
        child = self._children[name]
        with suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT_S):
                while child.poll() is None:
                    with suppress(StorageError, RecordError):
                        found = await asyncio.to_thread(self._registration, name)
                        if found.pid == child.pid:
                            for cell, body in self._cells.items():
                                await self.ask(name, "PUT", f"/admin/cells/{cell}", body)
                            return
                    await asyncio.sleep(LOOK_EVERY_S)
        state = "ended" if child.poll() is not None else "is not ready"
        raise ShardGoneError(f"{name} {state}; see {self._layout.log(name)}")

    async def _watch(self, every_s: float) -> None:
        """Renew leases, and start again what has died."""
        while True:
            await asyncio.sleep(min(every_s, 1.0))
            for name, child in self._children.items():
                try:
                    if child.poll() is not None:
                        log.warning("%s ended with %s; started again", name, child.returncode)
                        self._spawn(name)
                        await self._up(name)
                    await self.ask(name, "POST", "/lease")
                except (ShardGoneError, StorageError, OSError) as error:
                    log.warning("%s", error)

    def _registration(self, name: str) -> Registration:
        return self._store.read_record(self._layout.host(name), Registration)


async def gather_metrics(
    own: bytes, store: Store, layout: RunLayout, names: Sequence[str]
) -> bytes:
    """The metrics of this process and of the others by these names, added up. One that does not
    answer is left out."""
    texts = [own.decode()]
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for name in names:
            with suppress(aiohttp.ClientError, OSError, StorageError, RecordError):
                found = await asyncio.to_thread(store.read_record, layout.host(name), Registration)
                url, trust = f"{found.url}/metrics?own=1", trust_of(found.ca)
                async with http.get(url, ssl=trust) as answer:
                    texts.append(await answer.text())
    return add_metrics(texts)


def add_metrics(texts: Sequence[str]) -> bytes:
    """Metrics of several processes in one: samples of one name and label are added, except the lag
    of event loops, of which the longest counts."""
    families: dict[str, Metric] = {}
    samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known = samples.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                if sample.name.endswith("_lag_seconds"):
                    known[key] = max(known.get(key, 0.0), sample.value)
                elif not sample.name.endswith("_created"):
                    known[key] = known.get(key, 0.0) + sample.value
    for name, family in families.items():
        for (sample_name, labels), value in samples[name].items():
            family.add_sample(sample_name, dict(labels), value)
    registry = CollectorRegistry()
    registry.register(_Collected(list(families.values())))
    return bytes(generate_latest(registry))


class _Collected:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
