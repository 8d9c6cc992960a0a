"""What makes a run impossible is one clear error at once: nothing starts, and nothing is left."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.doctor.preflight import PreflightError, preflight
from storage.records import encode
from storage.root import MARK, StorageRoot
from tests.conftest import make_run
from tests.flows.conftest import MARK as OWN
from tests.flows.conftest import marked_processes

pytestmark = pytest.mark.real


@dataclass(frozen=True)
class Ended:
    code: int
    text: str


def gyre(root: Path, *arguments: str, path: str | None = None, inside: Sequence[str] = ()) -> Ended:
    """A command of gyre on ``root`` to its end. Fails where a process of it is left."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {OWN: str(root), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    if path is not None:
        env["PATH"] = path
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    env.setdefault("GYRE_SET_PREFECT__PORT", str(free))
    done = subprocess.run(
        [*inside, sys.executable, "-m", "flows.cli", *arguments, "--root", str(root)],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert [line for _, line in marked_processes(root)] == []
    return Ended(done.returncode, done.stderr)


def train(root: Path, *settings: str, path: str | None = None, inside: Sequence[str] = ()) -> Ended:
    given = [part for setting in settings for part in ("--set", setting)]
    return gyre(root, "train", "--config", "smoke", *given, path=path, inside=inside)


def refused(ended: Ended, code: int, *texts: str) -> None:
    assert ended.code == code, ended.text
    for text in texts:
        assert text in ended.text, ended.text
    assert "Traceback" not in ended.text
    assert len(ended.text.splitlines()) <= 6, "one clear error"


def test_a_bad_configuration(tmp_path: Path) -> None:
    root = tmp_path / "root"
    refused(train(root, "trajectory.caps=3"), 2, "trajectory.caps: unknown key; did you mean cap?")
    assert not root.exists()


def test_a_missing_tool(tmp_path: Path) -> None:
    root, tools = tmp_path / "root", tmp_path / "bin"
    tools.mkdir()
    for name in ("prlimit", "git"):
        (tools / name).symlink_to(str(shutil.which(name)))
    refused(train(root, path=str(tools)), 3, "no program bwrap", "apt-get install bubblewrap")
    assert not root.exists()


def test_busy_ports(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ended = train(root, f"prefect.port={port}", f"gateway.port={port}")
    refused(
        ended,
        3,
        f"prefect: port {port} of 127.0.0.1 is taken by",
        f"gateway: port {port} of 127.0.0.1 is taken by",
        f"--set prefect.port={port + 1}",
    )
    assert not root.exists()


def test_a_model_directory_with_missing_tensors(tmp_path: Path, tiny_policy: Path) -> None:
    from safetensors.numpy import load_file, save_file

    root = tmp_path / "root"
    folder = Path(shutil.copytree(tiny_policy, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    ended = train(root, "model.source=hf_directory", f"model.path={folder}")
    refused(ended, 3, f"policy: {folder}: the weights lack model.norm.weight")
    assert not root.exists()


def test_a_layout_that_can_not_cut_the_model(tmp_path: Path) -> None:
    root = tmp_path / "root"
    expected = "layout: model.shape: kv_heads (2) must be a multiple of the layout's tensor (4)"
    refused(train(root, "cells.layout.tensor=4"), 3, expected)
    assert not root.exists()


def test_a_full_disk(tmp_path: Path) -> None:
    """A real file system of 8 MB, in namespaces of its own."""
    root = tmp_path / "root"
    root.mkdir()
    argv = ["bwrap", "--dev-bind", "/", "/", "--size", str(8 << 20), "--tmpfs", str(root), "--"]
    ended = train(root, inside=argv)
    refused(ended, 3, "disk: 0.01 of 0.01 GB free", "gyre gc --dry-run", "--root")
    assert list(root.iterdir()) == []


def test_a_root_that_can_not_be_written(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    argv = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", str(root), str(root), "--"]
    refused(train(root, inside=argv), 3, "storage: ", "Read-only file system", "--root")
    assert list(root.iterdir()) == []


def test_a_root_of_another_format(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    newer = encode(StorageRoot(made_at=0)).replace(b'"format":1', b'"format":2')
    (root / MARK).write_bytes(newer)
    refused(train(root), 3, "StorageRoot of format 2, this version reads 1", "--root")
    run = "any-run"
    for command in (("train", "--resume", run), ("evaluate", run)):
        refused(gyre(root, *command), 2, "StorageRoot of format 2, this version reads 1")
    assert [path.name for path in root.iterdir()] == [MARK]


def test_a_run_that_exists_is_not_touched(tmp_path: Path) -> None:
    run = make_run(tmp_path / "root", "cells.cells=[{name: a, core: true, cpus: [4095]}]")
    root = Path(run.store.url)
    before = run.store.keys("")
    for command in (("train", "--resume", run.run_id), ("evaluate", run.run_id)):
        refused(gyre(root, *command), 3, "cores: cell a is pinned to [4095]", "cells.cells")
    assert run.store.keys("") == before


def test_the_flow_itself_asks_before_it_makes_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is when it was started in the UI."""
    from flows import train as module

    root = tmp_path / "root"
    pinned = ("cells.cells=[{name: a, core: true, cpus: [4095]}]",)
    with pytest.raises(PreflightError, match="pinned to"):
        module.train.fn("from-the-ui", config="smoke", overrides=pinned, root=str(root))
    assert not root.exists()
    made: list[str] = []
    monkeypatch.setattr(module, "preflight", lambda *given: made.append(given[1]))
    run = module._open_or_create(str(root), "from-the-ui", "smoke", [])
    assert (made, run.run_id) == ([str(root)], "from-the-ui")


def test_every_failure_is_in_the_one_error(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, "cells.cells=[{name: a, core: true, cpus: [4095]}]", "cells.device=cuda"
    )
    with pytest.raises(PreflightError) as caught:
        preflight(run.config, "memory://nowhere")
    checks = [line.split(":")[0] for line in str(caught.value).splitlines() if line[0] != " "]
    assert checks == ["cores", "gpu", "storage"]
