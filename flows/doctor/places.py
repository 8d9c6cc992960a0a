"""Where a run is kept and where it listens: the storage root, its disk, the ports."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from cells.client import DaemonClient, DaemonGoneError
from configs.model import ModelSource
from configs.run import RunConfig
from flows.doctor.finding import Finding, fail, ok, warn
from storage.errors import StorageError
from storage.hold import alone
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import RecordError
from storage.root import check_root

FLOOR_BYTES = 256 << 20
"""Logs, calls and workspaces of a small run, and the Prefect server's data."""
CHECKPOINT_FACTOR = 4
"""A checkpoint holds the weights twice, for trainer and engine, and two moments of each."""
COMFORT_FACTOR = 4
SKEW_S = 5.0
_HEALTH_LIMIT_S = 5


def storage(root: str) -> Iterator[Finding]:
    """Whether the root is of this version's format, and objects can be written as runs need it.

    Leaves nothing behind, not even the folder where there was none.
    """
    store = Store(root)
    if store.url.startswith("memory:"):
        yield fail("storage", f"{root} is the memory of one process", "take a folder, or s3://")
        return
    try:
        check_root(store)
        yield _probe(store)
    except StorageError as error:
        yield fail("storage", str(error))


def disk(config: RunConfig, root: str) -> Finding:
    """Whether a run of these settings fits."""
    place = _there(Store(root).local_file(""))
    usage = shutil.disk_usage(place)
    needed = needed_bytes(config)
    found = (
        f"{usage.free / 1e9:.2f} of {usage.total / 1e9:.2f} GB free at {place}, a run takes about "
        f"{needed / 1e9:.2f} GB"
    )
    advice = "gyre gc --dry-run shows what can go; or take another storage root: --root"
    if usage.free < needed:
        return fail("disk", found, advice)
    if usage.free < COMFORT_FACTOR * needed:
        return warn("disk", found, advice)
    return ok("disk", found)


def needed_bytes(config: RunConfig) -> int:
    """Bytes that a run keeps at once: its checkpoints, one more while it is written, the policy."""
    weights = _weight_bytes(config)
    checkpoints = config.training.keep_checkpoints + 1
    return FLOOR_BYTES + weights * (1 + CHECKPOINT_FACTOR * checkpoints)


def far_core(config: RunConfig, root: str) -> Iterator[Finding]:
    """A failure where the core writes its checkpoints as files of another machine."""
    far = [cell.name for cell in config.cells.cells if cell.core and cell.elsewhere]
    if far and not Store(root).is_local:
        yield fail(
            "storage",
            f"{root} is not a folder, and the core, cell {far[0]}, is on another machine",
            "take a folder that both machines share, or have the core on the machine of the flow: "
            "it writes checkpoints as files, which are sent to the storage from there",
        )


def prefect_port(config: RunConfig) -> Finding:
    """Whether a Prefect server answers, or one can be started."""
    named = os.environ.get("PREFECT_API_URL")
    url = named or f"http://127.0.0.1:{config.prefect.port}/api"
    if _healthy(url):
        return ok("prefect", f"a server answers at {url}")
    if named:
        return fail(
            "prefect",
            f"PREFECT_API_URL is {named}, and no Prefect server answers there",
            "start it, or unset the variable and let gyre start one",
        )
    return _listens(
        "prefect", "127.0.0.1", config.prefect.port, f"prefect.port={_other(config.prefect.port)}"
    )


def gateway_port(config: RunConfig, root: str, run_id: str = "") -> Finding:
    """Whether the gateway can listen; that of the run itself, which is adopted, may do so."""
    host, port = config.gateway.host, config.gateway.port
    finding = _listens("gateway", host, port, f"gateway.port={_other(port)}")
    if finding.advice and port and run_id and _own_gateway(root, run_id, port):
        return ok("gateway", f"the run's own gateway has port {port}")
    return finding


def _listens(check: str, host: str, port: int, instead: str) -> Finding:
    try:
        with socket.create_server((host, port)):
            return ok(check, f"port {port} of {host} is free" if port else f"{host} has free ports")
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return fail(
            check,
            f"port {port} of {host} is taken by {_owner(port)}",
            f"end it, or take another port: --set {instead}",
        )
    if number == errno.EACCES:
        return fail(
            check,
            f"port {port} of {host} needs a right that this user has not",
            f"take one above 1023: --set {instead}",
        )
    return fail(
        check,
        f"{host} port {port}: {os.strerror(number or errno.EINVAL)}",
        "take an address of this machine",
    )


def _own_gateway(root: str, run_id: str, port: int) -> bool:
    try:
        client = DaemonClient.find(Store(root), RunLayout(run_id), "gateway")
    except (DaemonGoneError, RecordError, StorageError):
        return False
    try:
        return client.url.endswith(f":{port}") and client.alive()
    finally:
        client.close()


def _probe(store: Store) -> Finding:
    name = f".doctor-{secrets.token_hex(4)}"
    folder = store.local_file("")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    key = f"{name}/object"
    try:
        began = time.time()
        store.write(key, b"whole")
        ended = time.time()
        written_at = store.entries(name)[0].changed_at
        again = store.write_once(key, b"twice")  # by hard links, which few file systems lack
        new = store.write_once(f"{key}-once", b"once")
        with alone(store, f"{name}/lock"):
            intact = store.read(key) == b"whole"
        if again or not new or not intact:
            return fail(
                "storage",
                f"{store.url} does not keep what is written to it",
                "take a file system with atomic renames, hard links and locks",
            )
    finally:
        with suppress(StorageError):
            store.delete(name)
        for path in made:
            with suppress(OSError):
                path.rmdir()
    skew = written_at - min(max(written_at, began), ended)
    if abs(skew) > SKEW_S:
        return warn(
            "storage",
            f"{store.url} can be written; its clock is {skew:+.0f} s from this machine's",
            "set both by NTP: ages of runs are told from it",
        )
    return ok("storage", f"{store.url} can be written")


def _weight_bytes(config: RunConfig) -> int:
    """Of the policy in fp32, as the trainer holds it."""
    if config.model.source is ModelSource.HF_DIRECTORY:
        files = Path(str(config.model.path)).expanduser().glob("*.safetensors")
        return 2 * sum(path.stat().st_size for path in files)  # may be in bf16
    shape = config.model.shape
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.ffn
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return 4 * (shape.layers * layer + embeddings)


def _healthy(api_url: str) -> bool:
    try:
        answer = httpx.get(f"{api_url}/health", timeout=_HEALTH_LIMIT_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return answer.status_code == 200


def _owner(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            listens = found.status == psutil.CONN_LISTEN and found.pid
            if listens and found.laddr and found.laddr.port == port:
                return f"{psutil.Process(found.pid).name()} (pid {found.pid})"
    return "another program"


def _other(port: int) -> int:
    return port + 1 if 1024 <= port < 65_535 else 4201


def _there(path: Path) -> Path:
    """The path, or what of it exists."""
    path = path.expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
