"""``python -m cells.host``: the daemon of one cell, until its lease ends or a stop is asked for.

It registers when its engine serves and its replica holds the policy.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from cells.daemon import Daemon
from cells.host.api import HostApi
from cells.host.cell import Cell
from cells.host.exports import MEMORY, Exports
from cells.host.nodes import Nodes
from cells.host.replica import ReplicaProcess, replica_settings
from cells.kv_pool.search import find_pool
from cells.ports import free_port
from cells.reason import CAN_NOT_START
from cells.replica.meeting import use_interface_of
from cells.serving.flags import EngineSettings
from cells.serving.process import EngineProcess
from cells.tls import Tls
from configs.cells import CellConfig, WeightsBy
from configs.load import ConfigError
from storage.objects import StorageError
from storage.run import Run, open_run

_REQUESTS_LIMIT = 4096
_SEEDS = 2**31 - 1

log = logging.getLogger("cells.host")


class CellStartError(RuntimeError):
    """The cell has no engine or no replica; the text says why of each."""


async def serve(run: Run, name: str, policy: Path, version: int) -> None:
    """Start the cell, serve it as daemon ``name``, end it.

    Raises:
        CellStartError: the engine or the replica did not start.
    """
    main = asyncio.current_task()
    assert main is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, main.cancel)  # until the daemon takes it over
    config = _cell_config(run, name)
    tls = Tls(run.store, run.layout, run.config.tls)
    try:
        cell = await _start(run, config, name, policy, version, tls)
    except Exception as error:
        raise CellStartError("\n".join(_causes(error))) from error
    loop.remove_signal_handler(signal.SIGTERM)
    watch = asyncio.create_task(cell.watch())

    async def close() -> None:
        watch.cancel()
        await cell.close()

    api = HostApi(cell)
    daemon = Daemon(
        name=name,
        kind="cell",
        lease_s=run.config.cells.lease_s,
        routes=api.routes(),
        close=close,
        host=config.address,
        tls=tls,
    )
    api.serve_for(daemon)
    await daemon.run(run.store, run.layout.host(name))


async def _start(
    run: Run, config: CellConfig, name: str, policy: Path, version: int, tls: Tls
) -> Cell:
    """Engine and replica side by side; neither is left when the other fails."""
    cells = run.config.cells
    kv_pool = await find_pool(run, cells.start_limit_s) if cells.kv_pool else None
    settings = _engine_settings(run, config, policy, version, kv_pool)
    async with AsyncExitStack() as undo:
        nodes = None
        if config.nodes:
            use_interface_of(config.address)
            nodes = Nodes(run, config, f"{config.address}:{free_port(config.address)}")
            undo.push_async_callback(nodes.close)
            await nodes.start(settings, cells.start_limit_s)
        exports = Exports(
            root=run.store.url,
            run_id=run.run_id,
            cell=config.name,
            scratch=run.store.local_file(f"{run.layout.prefix}/scratch/{config.name}"),
            policy=policy,
            version=version,
            # All machines of a cell write and read what is exported.
            memory=None if config.nodes else MEMORY,
        )
        undo.callback(exports.close)
        engine = EngineProcess(
            settings,
            cpus=config.cpus,
            log=run.store.local_file(run.layout.log(f"{name}-engine")),
            tls=tls,
        )
        undo.push_async_callback(engine.close)

        async def start_replica() -> ReplicaProcess:
            replica = await ReplicaProcess.start(
                replica_settings(
                    run.config,
                    root=run.store.url,
                    cell=config,
                    meeting=nodes.meeting if nodes else "",
                ),
                policy=policy,
                version=version,
                cpus=config.cpus,
                log=run.store.local_file(run.layout.log(f"{name}-replica")),
                limit_s=cells.start_limit_s,
                ranks_token=nodes.ranks_token if nodes else "",
            )
            undo.push_async_callback(replica.close)
            return replica

        async with asyncio.TaskGroup() as group:
            group.create_task(engine.wait_ready(cells.start_limit_s))
            replica = group.create_task(start_replica())
        cell = Cell(
            config.name,
            engine=engine,
            replica=replica.result(),
            exports=exports,
            version=version,
            switch_limit_s=cells.switch_limit_s,
            compute_limit_s=run.config.training.micro_step_limit_s,
            backup_limit_s=cells.kv_backup_limit_s,
            release_memory=cells.release_memory,
            bucket_bytes=_bucket_bytes(run, config),
            nodes=nodes,
        )
        await cell.start()
        undo.pop_all()
    log.info("%s: engine %d at %s, replica %d", name, engine.pid, engine.url, cell.replica.pid)
    return cell


def _causes(error: BaseException) -> list[str]:
    """The texts of an error or of all in a group, each once."""
    if not isinstance(error, BaseExceptionGroup):
        return [str(error) or type(error).__name__]
    return list(dict.fromkeys(text for part in error.exceptions for text in _causes(part)))


def _engine_settings(
    run: Run, config: CellConfig, policy: Path, version: int, kv_pool: str | None
) -> EngineSettings:
    cells = run.config.cells
    index = [cell.name for cell in cells.cells].index(config.name)
    executions = cells.executions_per_cell or _REQUESTS_LIMIT
    requests = executions * run.config.gateway.calls_per_execution
    return EngineSettings(
        policy=policy,
        version=version,
        device=cells.device,
        context=run.config.model.context,
        kv_tokens=cells.kv_tokens,
        requests=min(requests, _REQUESTS_LIMIT),
        # Differs between cells and between attempts that begin at different versions.
        seed=(run.config.seed * 1_000_003 + version * 1009 + index) % _SEEDS,
        host=config.address,
        port=free_port(config.address),
        admin_key=secrets.token_urlsafe(24),
        release_memory=cells.release_memory,
        gpus=cells.layout.ranks,
        kv_pool=kv_pool,
        nodes=config.machines,
        meeting=f"{config.address}:{free_port(config.address)}" if config.nodes else "",
    )


def _bucket_bytes(run: Run, config: CellConfig) -> int | None:
    """Shared memory reaches the processes of one machine only."""
    cells = run.config.cells
    if config.nodes or cells.weights is not WeightsBy.TENSORS:
        return None
    return int(cells.weights_bucket_mb * 1e6)


def _cell_config(run: Run, name: str) -> CellConfig:
    for cell in run.config.cells.cells:
        if name == f"cell-{cell.name}":
            return cell
    known = ", ".join(f"cell-{cell.name}" for cell in run.config.cells.cells)
    raise SystemExit(f"--name {name}: not a cell of run {run.run_id}; there are {known}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m cells.host", description=__doc__)
    parser.add_argument("--root", required=True, help="storage root")
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--name", required=True, help="name of the registration: cell-<cell name>")
    parser.add_argument("--policy", required=True, type=Path, help="HF directory to start with")
    parser.add_argument("--version", required=True, type=int, help="weight version that it is")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        asyncio.run(serve(open_run(given.root, given.run), given.name, given.policy, given.version))
    except (CellStartError, StorageError, ConfigError) as error:
        log.error("%s %s%s", given.name, CAN_NOT_START, error)
        sys.exit(1)
    except asyncio.CancelledError:
        log.info("stopped while starting")


if __name__ == "__main__":
    main()
