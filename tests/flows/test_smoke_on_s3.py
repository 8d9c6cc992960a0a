"""What a real run has stored is read from s3 as from its folder."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from flows.history import evaluations_of, updates_of
from flows.plan import step_plan
from flows.report import make_report
from flows.serve_pages import Pages
from flows.tracking.track import track
from storage.journal import read_journal
from storage.objects import Store
from storage.run import Run, open_run
from storage.samples import read_group
from tests.flows.conftest import FinishedRun

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def copied(smoke_run: FinishedRun, s3: str) -> tuple[Run, Run]:
    """The run in its folder, and the same objects on s3."""
    local = smoke_run.run
    there = Store(f"{s3}/copied")
    for key in ["gyre.json", *local.store.keys(local.layout.prefix)]:
        there.write(key, local.store.read(key))
    return local, open_run(there.url, local.run_id)


def test_records_journals_and_groups_are_the_same(copied: tuple[Run, Run]) -> None:
    local, remote = copied
    assert remote.config == local.config and remote.identity == local.identity
    assert updates_of(remote) == updates_of(local)
    assert evaluations_of(remote) == evaluations_of(local)
    for key in (local.layout.decisions, local.layout.levels, local.layout.ledger(0)):
        lines = read_journal(remote.store, key)
        assert lines and lines == read_journal(local.store, key)
    for query in step_plan(remote, 0, 0).queries:
        key = local.layout.group(query.query_id)
        assert read_group(remote.store, key).header == read_group(local.store, key).header


def test_its_pages_and_figures_are_made_from_there(copied: tuple[Run, Run]) -> None:
    local, remote = copied
    assert "pass rate" in make_report(remote)
    with TestClient(Pages(remote.store.url).app()) as client:
        assert local.run_id in client.get("/").text
        members = client.get(f"/runs/{local.run_id}/executions?step=0")
        assert members.status_code == 200 and "s00000-q0000-e000" in members.text
        assert f'run="{local.run_id}"' in client.get("/metrics").text
    folder = f"{local.layout.prefix}/tensorboard"
    names = remote.store.children(folder)
    assert names
    remote.store.delete(folder)
    track(remote, lambda *words: pytest.fail(str(words)))
    assert remote.store.children(folder) == names
