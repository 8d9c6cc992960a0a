"""A run whose storage is s3, with credentials that only a block of Prefect's has: it is paused
after a step, loses what its machine had of it, and goes on from what is stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from cells.checkpoint import latest_checkpoint
from flows.history import evaluations_of, updates_of
from flows.pause import ask_pause
from flows.plan import step_plan
from storage.objects import Store
from storage.run import Run, open_run
from storage.samples import read_group
from tests.flows.orchestrated import (
    FINAL,
    Orchestrated,
    environment,
    light,
    marked_processes,
)

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1500)]

SECRET = "AWS_SECRET_ACCESS_KEY"
REFERENCE = "{{ prefect.blocks.secret.gyre-s3 }}"
_DEPLOY = """
import json, sys
from prefect.blocks.system import Secret
from typer.testing import CliRunner
from flows.cli import app
secret, *words = json.loads(sys.stdin.read())
Secret(value=secret).save("gyre-s3", overwrite=True)
done = CliRunner().invoke(app, ["deploy", *words])
print(done.output)
sys.exit(done.exit_code)
"""


@dataclass(frozen=True)
class Remote:
    """A run on s3, its flow run, and what its processes had of the secret while it went on."""

    run: Run
    flow_run: str
    known: dict[str, str | None]
    """The secret in the environment of each process, by its command line."""


@pytest.fixture(scope="module")
def deployed(orchestrated: Orchestrated, s3: str) -> None:
    """The deployments get an address and a key, and of the secret only where it is kept."""
    words = ["--root", str(orchestrated.root)]
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION"):
        words += ["--env", f"{name}={os.environ[name]}"]
    words += ["--env", f"{SECRET}={REFERENCE}"]
    done = subprocess.run(
        [sys.executable, "-c", _DEPLOY],
        input=json.dumps([os.environ[SECRET], *words]),
        env=environment(orchestrated.root) | {"PREFECT_API_URL": f"{orchestrated.url}/api"},
        cwd=orchestrated.root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def remote(
    deployed: None, orchestrated: Orchestrated, s3: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Remote]:
    """Two steps, between which the machine loses its copies."""
    root, site = f"{s3}/root", orchestrated
    config = light(site)
    config["training"] = {"steps": 2, "updates_per_step": 1}
    path = site.root / "on-s3.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("reader")))
        site.hold.touch()
        try:
            flow_run = site.start("train", run_id="far", config=str(path), root=root)
            site.wait(flow_run, "RUNNING")
            site.until(lambda: site.steps("far") or site.state(flow_run) in FINAL, "the first step")
            assert site.state(flow_run) == "RUNNING", site.logs()
            run = open_run(root, "far")
            ask_pause(run)
            known = {
                line: process.environ().get(SECRET) for process, line in marked_processes(site.root)
            }
        finally:
            site.hold.unlink()
        site.wait(flow_run, "PAUSED")
        site.until(lambda: site.left() == [], "the daemons have ended")
        shutil.rmtree(site.root / "cache" / "gyre")
        site.resume(flow_run)
        site.wait(flow_run, "COMPLETED")
        yield Remote(run, flow_run, known)


def test_the_secret_is_resolved_by_the_worker_alone(
    remote: Remote, orchestrated: Orchestrated
) -> None:
    answer = orchestrated.api.get("/deployments/name/train/train").json()
    assert answer["job_variables"]["env"][SECRET] == REFERENCE
    assert os.environ[SECRET] not in json.dumps(orchestrated.flow_run(remote.flow_run))
    for part in ("prefect.engine", "cells.gateway.server", "cells.host"):
        (found,) = {secret for line, secret in remote.known.items() if f" {part}" in line}
        assert found == os.environ[SECRET], "the server of these tests takes any"
    for part in ("server start", "worker start"):
        (found,) = {secret for line, secret in remote.known.items() if f"-m prefect {part}" in line}
        assert found is None


def test_all_of_the_run_is_on_s3(remote: Remote) -> None:
    run = remote.run
    assert [one.policy_version for one in updates_of(run)] == [1, 2]
    assert set(evaluations_of(run)) == {2}
    for step in (0, 1):
        assert run.store.exists(run.layout.step_done(step))
        for query in step_plan(run, step, step).queries:
            assert read_group(run.store, run.layout.group(query.query_id)).samples
    assert "pass rate" in run.store.read(run.layout.report).decode()
    keys = run.store.keys(run.layout.prefix)
    assert not [key for key in keys if ".writing-" in key or key.endswith("/lock")]


def test_another_machine_fetches_its_checkpoint_whole(remote: Remote) -> None:
    found = latest_checkpoint(remote.run)
    assert found is not None and found.manifest.version == 2
    folder = remote.run.store.local_file(found.policy_key)
    assert folder.is_relative_to(os.environ["XDG_CACHE_HOME"])
    assert (folder / "config.json").is_file()


def test_nothing_of_it_lies_in_the_folder_of_the_server(
    remote: Remote, orchestrated: Orchestrated
) -> None:
    local = Store(str(orchestrated.root))
    assert "far" not in local.children("runs")
    assert not Path(orchestrated.root, "s3:").exists()
