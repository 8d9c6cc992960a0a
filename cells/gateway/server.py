"""The gateway's process: ``python -m cells.gateway.server --root R --run ID --policy DIR``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

import uvloop
import yaml
from starlette.routing import Route

from cells.daemon import Daemon
from cells.gateway import openapi
from cells.gateway.admin import AdminRoutes
from cells.gateway.calls import Services
from cells.gateway.codec import Codec, load_codec
from cells.gateway.exchange import DirectProtocol
from cells.gateway.intake import Intake
from cells.gateway.metrics import Metrics
from cells.gateway.public import Public
from cells.gateway.recording import Recorder
from cells.gateway.rest import rest_idle
from cells.gateway.routing import Places
from cells.gateway.sessions import Sessions
from cells.gateway.settling import Settler
from cells.gateway.shards import Shards, gather_metrics, process_names
from cells.gateway.wire import Wire
from cells.ports import free_port
from cells.tls import Tls, trusting
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import MissingObjectError, Store
from storage.records import Record, RecordError

GATEWAY = "gateway"


class Gateway:
    """A gateway of one run, ready to serve.

    Args:
        port: where it listens; 0 takes a free one.
        shards: the other processes, where this is the first of several.
    """

    def __init__(
        self,
        store: Store,
        layout: RunLayout,
        config: RunConfig,
        codec: Codec,
        *,
        name: str = "gateway",
        port: int = 0,
        shards: Shards | None = None,
    ) -> None:
        self._store = store
        self._layout = layout
        self._lease_s = config.cells.lease_s
        self._shards = shards
        self._peers = [
            one for one in process_names(GATEWAY, config.gateway.processes) if one != name
        ]
        self._key = layout.host(name)
        places = Places()
        self._metrics = Metrics(places)
        tls = Tls(store, layout, config.tls)
        secured = any(config.tls.secures(cell.address) for cell in config.cells.cells)
        self._wire = Wire(trusting(tls.ca()) if secured else None)
        self._recorder = Recorder()
        self._sessions = Sessions(store, layout, places, config.gateway.key_life_s)
        services = Services(
            codec=codec,
            wire=self._wire,
            recorder=self._recorder,
            places=places,
            metrics=self._metrics,
            context=config.model.context,
            call_limit_s=config.gateway.call_limit_s,
        )
        intake = Intake(
            services,
            calls_limit=config.gateway.calls_per_execution,
            total_limit=config.gateway.calls,
        )
        settler = None
        if config.cells.kv_pool:
            settler = Settler(self._wire, config.cells.kv_backup_limit_s)
        admin = AdminRoutes(
            self._sessions, places, self._metrics, self._authorised, settler, shards, self._gather
        )
        self.daemon = Daemon(
            name=name,
            kind="gateway",
            lease_s=config.cells.lease_s,
            routes=[Route("/openapi.json", openapi.serve, methods=["GET"]), *admin.routes()],
            close=self._close,
            host=config.gateway.host,
            port=port,
            tls=tls,
        )
        public = Public(
            intake,
            self._metrics,
            self._sessions,
            body_limit=int(config.gateway.body_limit_mb * 1e6),
            header_limit=int(config.gateway.header_limit_kb * 1e3),
        )
        self.daemon.http = partial(DirectProtocol, public)
        self._watching: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Serve until the lease ends, a stop is asked for, or a signal comes."""
        self._watching = [
            asyncio.create_task(self._metrics.watch_lag()),
            asyncio.create_task(rest_idle(self._sessions.open)),
        ]
        if self._shards is not None:
            await self._shards.start(self._lease_s)
        await self.daemon.run(self._store, self._key)

    def _authorised(self, request: object) -> bool:
        return self.daemon.authorised(request)  # type: ignore[arg-type]

    async def _gather(self, own: bytes) -> bytes:
        if not self._peers:
            return own
        return await gather_metrics(own, self._store, self._layout, self._peers)

    async def _close(self) -> None:
        if self._shards is not None:
            await self._shards.close()
        for task in self._watching:
            task.cancel()
        await self._sessions.close()
        await self._recorder.close()
        self._wire.close()


def read_config(store: Store, layout: RunLayout) -> RunConfig:
    """The run's stored configuration.

    Raises:
        MissingObjectError: the run was not prepared.
    """
    return RunConfig.model_validate(yaml.safe_load(store.read(layout.config)))


class Address(Record):
    """Where a gateway of the run listened."""

    port: int


def choose_port(store: Store, layout: RunLayout, config: RunConfig, name: str) -> int:
    """The configured port; else that of the last gateway of the run if it is free, so that the
    addresses that harnesses hold stay good; else any free one, which is remembered."""
    if config.gateway.port:
        names = process_names(GATEWAY, config.gateway.processes)
        return config.gateway.port + (names.index(name) if name in names else 0)
    key, last = layout.address(name), 0
    with suppress(MissingObjectError, RecordError):
        last = store.read_record(key, Address).port
    port = last if _is_free(config.gateway.host, last) else free_port(config.gateway.host)
    if port != last:
        store.write_record(key, Address(port=port))
    return port


def _is_free(host: str, port: int) -> bool:
    """Whether ``port`` is one and can be listened on now."""
    if not port:
        return False
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def _settle() -> None:
    """Make long use cheap. Histories are many small objects that live long, and looking through all
    of them for garbage takes seconds: so that is done rarely, and not with what was loaded. What is
    new is looked through in small parts, each of which takes a few milliseconds."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time; threads only cost
    # Each execution holds two files and up to two connections.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 200, 50)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, help="storage root")
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--policy", required=True, type=Path, help="HF directory of the policy")
    parser.add_argument("--name", default=GATEWAY, help="name of the registration")
    parser.add_argument("--shard", action="store_true", help="not the first process of several")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    store, layout = Store(arguments.root), RunLayout(arguments.run)
    config = read_config(store, layout)
    codec = load_codec(arguments.policy, config.model.renderer)
    port = choose_port(store, layout, config, arguments.name)
    shards = None
    if config.gateway.processes > 1 and not arguments.shard:
        argv = ["-m", "cells.gateway.server", "--root", arguments.root, "--run", arguments.run]
        argv += ["--policy", str(arguments.policy)]
        shards = Shards(store, layout, arguments.name, config.gateway.processes, argv)
    gateway = Gateway(store, layout, config, codec, name=arguments.name, port=port, shards=shards)
    _settle()
    uvloop.run(gateway.run())


if __name__ == "__main__":
    main()
