"""Single checks: what they find, and what they say to do."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.load import load_config
from configs.run import RunConfig
from flows.doctor import environment, machine, places, processes
from flows.doctor.finding import Status
from storage.objects import Store
from storage.records import encode
from storage.root import MARK, StorageRoot
from tasks.rollout.sandboxes import bubblewrap


def config(*overrides: str) -> RunConfig:
    return load_config("quickstart", overrides, environment={})


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that a program has that is no Prefect server: this one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_this_environment_is_as_declared_and_locked() -> None:
    assert environment.python().status is Status.OK
    assert environment.declared_packages().status is Status.OK
    assert "sglang 0.5" in environment.declared_packages().found
    assert environment.libraries().status is Status.OK


def test_locks_that_differ_are_named(tmp_path: Path) -> None:
    (tmp_path / "cpu.txt").write_text("# a lock\npydantic==1.0.0\nno-such-package==3\n")
    (tmp_path / "torch.txt").write_text(f"packaging=={environment.installed('packaging')}\n")
    found = environment.locked_packages(tmp_path)
    assert found.status is Status.WARN
    assert "(locked 1.0.0); no-such-package is missing" in found.found
    assert "packaging" not in found.found
    assert environment.locked_packages(tmp_path / "none").status is Status.OK


def test_missing_packages_and_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["pydantic<1", "no-such-package>=2", "absent>1; sys_platform == 'win32'", "pytest"]
    monkeypatch.setattr(environment.metadata, "requires", lambda name: needed)
    found = environment.declared_packages()
    assert found.status is Status.FAIL
    assert "needed <1; no-such-package is missing" in found.found
    assert "absent" not in found.found


def test_a_missing_library_names_its_package() -> None:
    found = environment.libraries({"libno-such.so.7": "libno-such7"})
    assert (found.status, found.advice[:27]) == (Status.FAIL, "apt-get install libno-such7")


def test_missing_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap._works.cache_clear()
    try:
        rows = {found.check: found for found in environment.programs(config())}
    finally:
        bubblewrap._works.cache_clear()
    assert rows["sandbox"].status is Status.FAIL
    assert "apt-get install bubblewrap" in rows["sandbox"].found
    assert rows["prlimit"].status is Status.FAIL
    assert rows["git"].status is Status.WARN


def test_no_isolation_is_a_warning() -> None:
    assert environment.sandbox(config("rollout.sandbox=process")).status is Status.WARN


def test_another_sglang_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed", lambda name: "0.5.99")
    found = environment.engine_fits(config())
    assert (found.status, "sglang==0.5.23" in found.advice) == (Status.FAIL, True)


def test_cores_that_this_process_may_not_use() -> None:
    pinned = config("cells.cells=[{name: a, cpus: [0, 7], core: true}, {name: b, cpus: [1]}]")
    found = machine.cores(pinned, {0, 1, 2, 3, 6})
    assert found.status is Status.FAIL
    assert found.found == "cell a is pinned to [7], this process may use 0-3, 6"
    assert machine.cores(pinned, {0, 1, 7}).status is not Status.FAIL


def test_a_device_that_is_not_the_one_that_is_set(tmp_path: Path) -> None:
    card = tmp_path / "nvidia0"
    cuda = config("cells.device=cuda")
    assert machine.gpu(config(), (card,)).status is Status.OK
    assert machine.gpu(cuda, (card,)).status is Status.FAIL
    card.touch()
    assert machine.gpu(config(), (card,)).status is Status.FAIL
    assert machine.gpu(cuda, (card,)).status is Status.OK


def test_network_cards(tmp_path: Path) -> None:
    assert "TCP" in machine.rdma(tmp_path / "none").found
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    found = machine.rdma(tmp_path)
    assert (found.status, found.found) == (Status.WARN, "mlx5_1: no active port")


def test_limits_memory_and_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 128))
    assert machine.open_files(config()).status is Status.FAIL
    monkeypatch.setattr(resource, "getrlimit", lambda which: (400, 4096))
    assert machine.open_files(config("rollout.concurrent=64")).status is Status.WARN
    memory = SimpleNamespace(available=1 << 30)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    assert machine.memory(config()).status is Status.FAIL
    assert machine.clock(0.0).status is Status.FAIL
    assert machine.shared_memory(tmp_path / "none").status is Status.WARN


def test_a_folder_can_be_a_root_and_nothing_is_left(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there"
    (found,) = places.storage(str(root))
    assert found.status is Status.OK
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_can_be_a_root_and_nothing_is_left(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (found,) = places.storage(f"{s3}/root")
    assert found.status is Status.OK
    assert Store(s3).keys("root") == [] and list(tmp_path.rglob("*")) == []
    (found,) = places.storage("s3://no-such-bucket/root")
    assert found.status is Status.FAIL and "no-such-bucket" in found.found
    near = config("cells.cells=[{name: a, core: true}, {name: b, elsewhere: true}]")
    far = config("cells.cells=[{name: a, core: true, elsewhere: true}]")
    assert list(places.far_core(near, f"{s3}/root")) == []
    assert list(places.far_core(far, str(tmp_path))) == []
    (found,) = places.far_core(far, f"{s3}/root")
    assert found.status is Status.FAIL and "cell a" in found.found


def test_roots_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    newer = encode(StorageRoot(made_at=0)).replace(b'"format":1', b'"format":7')
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / MARK).write_bytes(newer)
    cases = {
        "memory://somewhere": "is the memory of one process",
        str(tmp_path / "file"): "A file is where a folder is needed",
        str(tmp_path / "newer"): "StorageRoot of format 7, this version reads 1",
        "/proc/gyre": "can't be written",
    }
    for root, text in cases.items():
        (found,) = places.storage(root)
        assert found.status is Status.FAIL, root
        assert text in found.found, root


@pytest.mark.real
@pytest.mark.parametrize(
    ("mount", "text"),
    [
        (("--ro-bind", "{folder}", "{folder}"), "Read-only file system. Take a storage root"),
        (("--size", "4096", "--tmpfs", "{folder}"), "No space left on device"),
    ],
)
def test_a_read_only_and_a_full_file_system(
    mount: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    script = (
        "import sys; from flows.doctor.places import storage\n"
        "open(sys.argv[2], 'wb').write(b'x' * 4096) if sys.argv[2] else None\n"
        "print(*(f'{one.status} {one.found}' for one in storage(sys.argv[1])))\n"
    )
    filler = str(tmp_path / "filler") if "--tmpfs" in mount else ""
    argv = ["bwrap", "--dev-bind", "/", "/", *(part.format(folder=tmp_path) for part in mount)]
    done = subprocess.run(
        [*argv, "--", sys.executable, "-c", script, str(tmp_path), filler],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("fail "), done.stderr
    assert text in done.stdout


def test_a_disk_too_small_for_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert places.disk(config(), str(tmp_path / "deep" / "er")).status is not Status.FAIL
    monkeypatch.setattr(
        places.shutil, "disk_usage", lambda place: SimpleNamespace(total=10**9, free=10**8)
    )
    found = places.disk(config(), str(tmp_path))
    assert (found.status, "0.10 of 1.00 GB free" in found.found) == (Status.FAIL, True)
    more = places.needed_bytes(config("training.keep_checkpoints=100"))
    assert more > places.needed_bytes(config("training.keep_checkpoints=1"))


def test_a_port_that_another_program_has(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    found = places.prefect_port(config(f"prefect.port={taken}"))
    assert found.status is Status.FAIL
    assert f"(pid {os.getpid()})" in found.found
    assert f"--set prefect.port={taken + 1}" in found.advice
    found = places.gateway_port(config(f"gateway.port={taken}"), "/nowhere", "run")
    assert (found.status, "gateway.port=" in found.advice) == (Status.FAIL, True)


def test_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = places.gateway_port(config("gateway.host=192.0.2.1"), "/nowhere")
    assert (found.status, found.advice) == (Status.FAIL, "take an address of this machine")


def test_a_prefect_server_that_is_named_and_silent(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_HEALTH_LIMIT_S", 0.2)
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{taken}/api")
    found = places.prefect_port(config())
    assert (found.status, "unset the variable" in found.advice) == (Status.FAIL, True)


def test_a_daemon_of_a_run_that_is_gone(tmp_path: Path) -> None:
    module = tmp_path / "cells" / "host"
    module.mkdir(parents=True)
    (module.parent / "__init__.py").touch()
    (module / "__init__.py").touch()
    (module / "__main__.py").write_text("print(1, flush=True); import time; time.sleep(600)")
    argv = [sys.executable, "-m", "cells.host", "--root", str(tmp_path / "root"), "--run", "gone"]
    daemon = subprocess.Popen(
        [*argv, "--name", "cell-a"], cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert daemon.stdout is not None and daemon.stdout.readline()
        rows = [row for row in processes.stale_processes() if f"pid {daemon.pid}:" in row.found]
        assert len(rows) == 1
        assert "cell-a of run gone" in rows[0].found
        assert rows[0].advice == f"kill -TERM -- -{daemon.pid}"
    finally:
        daemon.kill()
        daemon.wait(30)
