"""A cell host with a real SGLang server and a real Megatron replica.

The tests of this file take turns on one host, in order: its start is the expensive part.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from cells.client import DaemonClient, DaemonError, FencedError
from cells.process import cpu_seconds, end_group, spawn
from cells.tls import trust_of
from storage.records import CallKind, GroupHeader
from storage.run import Run
from storage.samples import Sample, SealedGroup, seal
from tests.conftest import make_run

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

START_LIMIT_S = 500
LIMIT_S = 60
SHARED = Path("/dev/shm")
BUCKET_MB = 0.1
"""A tenth of the weights, so that several go."""
CPU = sorted(os.sched_getaffinity(0))[-1]


class Host:
    """A started ``python -m cells.host`` of cell a."""

    def __init__(self, run: Run, policy: Path) -> None:
        self.run = run
        self.log = run.store.local_path(run.layout.log("cell-a"))
        argv = [sys.executable, "-m", "cells.host", "--root", run.store.url, "--run", run.run_id]
        argv += ["--name", "cell-a", "--policy", str(policy), "--version", "0"]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.process = spawn(argv, env={**env, "OMP_NUM_THREADS": "1"}, log=self.log)

    def client(self) -> DaemonClient:
        wait(lambda: self.run.store.exists(self.run.layout.host("cell-a")) or self.ended())
        assert not self.ended(), self.log.read_text()
        return DaemonClient.find(self.run.store, self.run.layout, "cell-a")

    def ended(self) -> bool:
        return self.process.poll() is not None

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        end_group(self.process.pid, grace_s=10)
        self.process.wait(LIMIT_S)


def wait(ready: Callable[[], object], limit_s: float = START_LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are not dead; a zombie is, its parent has only not looked yet."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(scope="module")
def host(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    cells = f"cells.cells=[{{name: a, core: true, cpus: [{CPU}]}}, {{name: b}}]"
    run = make_run(
        tmp_path_factory.mktemp("host"),
        cells,
        "cells.lease_s=600",
        "cells.start_limit_s=480",
        "cells.weights=tensors",
        f"cells.weights_bucket_mb={BUCKET_MB}",
    )
    host = Host(run, tiny_policy)
    yield host
    host.close()


@pytest.fixture(scope="module")
def client(host: Host) -> Iterator[DaemonClient]:
    client = host.client()
    yield client
    client.close()


def post(client: DaemonClient, path: str, **body: Any) -> dict[str, Any]:
    return client.call("POST", path, body, limit_s=LIMIT_S)


def exports(run: Run) -> list[Path]:
    return list(Path("/dev/shm").glob(f"gyre-{run.run_id}-a-*"))


def seal_group(run: Run) -> dict[str, Any]:
    """One sample that is to become likelier; returns how a replica is told of it."""
    ids = np.arange(20, 60, dtype=np.int32)
    targets = np.arange(40) >= 20
    sample = Sample(
        execution_id="s00000-q0000-e000",
        kind=CallKind.MAIN,
        ids=ids,
        targets=targets,
        logprobs=np.where(targets, -5.8, 0).astype(np.float32),
        versions=np.where(targets, 0, -1).astype(np.int32),
        advantage=1.0,
        weight=1.0,
    )
    header = GroupHeader(
        query_id="s00000-q0000", step=0, problem_id="p", sealed_at=0, members=(), spread=True
    )
    key = run.layout.group("s00000-q0000")
    seal(run.store, key, SealedGroup(header, (sample,)))
    return {"group_key": key, "index": 0}


def generate(client: DaemonClient) -> dict[str, Any]:
    engine = client.call("GET", "/status")["engine"]
    body = {
        "input_ids": list(range(20, 40)),
        "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "extra_key": str(engine["version"]),
    }
    trust = trust_of(client.registration.ca)
    key = {"authorization": f"Bearer {engine['token']}"}
    url = f"{engine['url']}/generate"
    response = httpx.post(url, json=body, headers=key, timeout=LIMIT_S, verify=trust)
    answer = response.json()
    assert {s["version"] for s in answer["meta_info"]["weight_versions"]} == {
        str(engine["version"])
    }
    return answer


def test_starts_in_rollout_on_its_core(host: Host, client: DaemonClient) -> None:
    status = client.call("GET", "/status")
    assert (status["role"], status["detail"]) == ("rollout", "")
    assert status["engine"]["version"] == status["replica"]["version"] == 0
    children = [p for p in host.family() if p.pid != host.process.pid]
    assert {status["engine"]["pid"], status["replica"]["pid"]} <= {p.pid for p in children}
    assert {tuple(p.cpu_affinity()) for p in children} == {(CPU,)}
    assert len(generate(client)["output_ids"]) == 6


def test_no_training_in_role_rollout(host: Host, client: DaemonClient) -> None:
    args = {"step": 0, "update": 0, "micro_step": "m0", "samples": [seal_group(host.run)]}
    with pytest.raises(DaemonError, match=r"422 .*micro_step needs role training"):
        post(client, "/replica/micro_step", epoch=1, args=args)


def test_both_processes_rest_when_they_have_nothing_to_do(client: DaemonClient) -> None:
    status = post(client, "/role", epoch=1, role="training")
    assert status["role"] == "training"
    pids = [status["engine"]["pid"], status["replica"]["pid"]]
    before, began = [cpu_seconds(pid) for pid in pids], time.monotonic()
    time.sleep(4)  # a window to measure over; nothing is waited for
    seconds = time.monotonic() - began
    for pid, start in zip(pids, before, strict=True):
        assert (cpu_seconds(pid) - start) / seconds < 0.05


def assert_serves_what_the_replica_holds(client: DaemonClient, folder: Path) -> None:
    """Each log-prob is that of a forward with the replica's weights."""
    import torch
    from transformers import Qwen3ForCausalLM

    post(client, "/replica/export", epoch=1, args={"path": str(folder)})
    answer = generate(client)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([list(range(20, 40)) + answer["output_ids"]])
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1)
    assert [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] == pytest.approx(
        [float(expected[at - 1, ids[0, at]]) for at in range(20, 26)], abs=2e-5
    )


def update(host: Host, client: DaemonClient, number: int) -> None:
    """The core makes one more version, which the engine is to serve."""
    where = {"step": number, "update": 0}
    args = {**where, "micro_step": "m0", "samples": [seal_group(host.run)]}
    assert post(client, "/replica/micro_step", epoch=1, args=args)["target_tokens"] == 20
    step = {**where, "executions": 1, "learning_rate": 0.01}
    assert post(client, "/replica/step", epoch=1, args=step)["version"] == number + 1
    status = post(client, "/role", epoch=1, role="rollout", version=number + 1)
    assert (status["role"], status["engine"]["version"]) == ("rollout", number + 1)


def test_an_update_reaches_the_engine_in_shared_memory(
    host: Host, client: DaemonClient, tmp_path: Path
) -> None:
    before = set(SHARED.iterdir())
    update(host, client, 0)
    (folder,) = exports(host.run)
    assert not list(folder.glob("v*")), "nothing went by files"
    assert not {path for path in set(SHARED.iterdir()) - before if path.name.startswith("torch_")}
    assert_serves_what_the_replica_holds(client, tmp_path / "held")


def test_an_update_that_the_engine_refuses_so_goes_by_files(
    host: Host, client: DaemonClient, tmp_path: Path
) -> None:
    engine = client.call("GET", "/status")["engine"]
    headers = {"authorization": f"Bearer {engine['token']}"}
    with httpx.Client(base_url=engine["url"], headers=headers, timeout=LIMIT_S) as control:
        control.post("/begin_weight_update", json={}).raise_for_status()
        post(client, "/role", epoch=1, role="training")
        update(host, client, 1)
        control.post("/end_weight_update", json={}).raise_for_status()
    assert "goes by files" in host.log.read_text()
    (folder,) = exports(host.run)
    assert [path.name for path in folder.glob("v*")] == ["v2"]
    assert_serves_what_the_replica_holds(client, tmp_path / "held")


def test_a_version_that_is_not_there_is_refused(client: DaemonClient) -> None:
    with pytest.raises(DaemonError, match=r"422 .*serve version 9, the replica holds 2"):
        post(client, "/engine/version", epoch=1, version=9)
    status = client.call("GET", "/status")
    assert (status["role"], status["engine"]["version"]) == ("rollout", 2)


def test_an_older_epoch_is_refused(client: DaemonClient) -> None:
    assert post(client, "/replica/publish", epoch=3, args={})["descriptor"]["version"] == 2
    for path, body in (
        ("/role", {"role": "training"}),
        ("/engine/version", {"version": 2}),
        ("/replica/status", {}),
    ):
        with pytest.raises(FencedError):
            post(client, path, epoch=2, **body)
    status = client.call("GET", "/status")
    assert (status["role"], status["epoch"]) == ("rollout", 3)
    assert status["mooncake"]["published_bytes"] > 0


def test_a_dead_replica_fails_the_cell(client: DaemonClient) -> None:
    os.kill(client.call("GET", "/status")["replica"]["pid"], signal.SIGKILL)
    wait(lambda: client.call("GET", "/status")["role"] == "failed", LIMIT_S)
    assert "the replica was killed (SIGKILL)" in client.call("GET", "/status")["detail"]
    with pytest.raises(DaemonError, match=r"422 .*was killed"):
        post(client, "/role", epoch=3, role="training")


def test_nothing_outlives_a_host_that_is_killed(host: Host, client: DaemonClient) -> None:
    processes = host.family()
    assert len(processes) >= 3, "SGLang's own children too"
    host.kill()
    wait(lambda: not alive(processes), LIMIT_S)


def test_a_host_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "empty").mkdir()
    host = Host(run, tmp_path / "empty")
    wait(lambda: host.ended())
    assert host.process.returncode == 1
    assert "cell-a can't start" in host.log.read_text()
    assert not run.store.exists(run.layout.host("cell-a"))
    assert exports(run) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_of_a_host_that_is_ended_while_it_starts(
    number: signal.Signals, tiny_policy: Path, tmp_path: Path
) -> None:
    host = Host(make_run(tmp_path), tiny_policy)
    wait(lambda: len(host.family()) >= 2)
    processes = host.family()
    os.kill(host.process.pid, number)
    host.process.wait(LIMIT_S)
    wait(lambda: not alive(processes), LIMIT_S)
    if number is signal.SIGTERM:
        assert exports(host.run) == []
