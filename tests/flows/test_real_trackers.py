"""Weights & Biases and MLflow, with their own packages: what Gyre sends is what they hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("wandb==0.31.0", "mlflow==3.17.2")
"""Optional, so neither is in the locks."""
LIMIT_S = 600

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(2 * LIMIT_S)]

SEND = """
import json, struct, sys
from pathlib import Path
import mlflow, wandb
from wandb.proto import wandb_internal_pb2 as messages
from flows.history import evaluations_of, updates_of
from flows.tracking.track import track
from tests.flows.recorded import record_run
from tests.flows.test_tracking import asking

root, said = Path(sys.argv[1]), []
run = asking(record_run(root), wandb="agents", mlflow=f"sqlite:///{root}/mlflow.db")
for _ in range(2):
    track(run, lambda *words: said.append(words))

client = mlflow.MlflowClient(tracking_uri=run.config.tracking.mlflow)
where = client.get_experiment_by_name("gyre").experiment_id
(held,) = client.search_runs([where])

def mlflow_has(name):
    return [[one.step, one.value] for one in client.get_metric_history(held.info.run_id, name)]

def records(data):
    # A log of blocks of 32 KiB: checksum, size, kind (1 whole, 2 first, 3 middle, 4 last).
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield messages.Record.FromString(whole)
            whole = b""

lines, runs = [], set()
for file in sorted(root.glob("wandb/offline-run-*/*.wandb")):
    for record in records(file.read_bytes()):
        if record.HasField("run"):
            runs.add((record.run.run_id, record.run.project, record.run.display_name))
        if record.HasField("history"):
            values = {i.key or "/".join(i.nested_key): json.loads(i.value_json)
                      for i in record.history.item}
            lines.append(values)

def wandb_has(name):
    return sorted([one["version"], one[name]] for one in lines if name in one)

print(json.dumps({
    "said": said,
    "runs": sorted(runs),
    "run": [[run.identity, "agents", run.run_id]],
    "rates": [[one.policy_version, one.pass_rate] for one in updates_of(run)],
    "held_out": [[version, one.pass_rate] for version, one in evaluations_of(run).items()],
    "mlflow": [mlflow_has("update/pass_rate"), mlflow_has("held_out/pass_rate")],
    "wandb": [wandb_has("update/pass_rate"), wandb_has("held_out/pass_rate")],
}))
"""


def with_packages(folder: Path) -> Path:
    """The Python of an environment that has what this one has, and the trackers' packages."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=LIMIT_S)
    python = folder / "bin" / "python"
    ours = sysconfig.get_path("purelib")
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"{ours}\n{ROOT}\n")
    install = [str(python), "-m", "pip", "install", "-q", *PACKAGES]
    subprocess.run(install, check=True, timeout=LIMIT_S)
    return python


def test_both_hold_every_figure_once(tmp_path: Path) -> None:
    python = with_packages(tmp_path / "environment")
    root = tmp_path / "root"
    root.mkdir()
    env = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(root), "WANDB_SILENT": "true"}
    done = subprocess.run(
        [str(python), "-c", SEND, str(root)],
        env=env,
        cwd=root,  # MLflow keeps what is no figure below it
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["said"] == []
    assert found["runs"] == found["run"]
    for tracker in ("mlflow", "wandb"):
        assert found[tracker] == [found["rates"], found["held_out"]]
