"""Pages of ``gyre serve``: what is there is shown, nothing else can be reached, nothing changes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from flows.report import write_report
from flows.serve import pages_on
from flows.serve_metrics import GAUGES
from flows.serve_pages import Pages
from flows.server import ServerError
from storage.journal import append_line
from storage.layout import execution_id, query_id
from storage.run import Run
from tests.flows.recorded import record_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("pages")
    (root / "secret").write_text("not for anyone")
    run = record_run(root)
    write_report(run)
    return run


@pytest.fixture(scope="module")
def client(run: Run) -> Iterator[TestClient]:
    with TestClient(Pages(run.store.url).app()) as client:
        yield client


def test_the_index_leads_to_every_run(client: TestClient, run: Run) -> None:
    page = client.get("/").text
    for link in re.findall(r'href="([^"]+)"', page):
        assert client.get(link).status_code == 200, link
    assert f"/runs/{run.run_id}" in page
    assert "<td>done</td>" in page and "<td>6/6</td>" in page and "<td>+0.188</td>" in page


def test_a_run_that_cant_be_read_is_in_the_index_with_the_reason(tmp_path: Path) -> None:
    record_run(tmp_path, "good", steps=1)
    bad = record_run(tmp_path, "bad", steps=1)
    append_line(bad.store, bad.layout.metrics, b"{}")
    with TestClient(Pages(str(tmp_path)).app()) as client:
        page = client.get("/").text
    assert "<td>1/6</td>" in page and "bad</a></td><td>can&#x27;t be read: " in page


def test_a_finished_run_has_the_report_that_was_written(client: TestClient, run: Run) -> None:
    answer = client.get(f"/runs/{run.run_id}")
    assert answer.content == run.store.read(run.layout.report)
    assert "script-src 'unsafe-inline'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_members_of_a_step_have_their_verdicts(client: TestClient, run: Run) -> None:
    page = client.get(f"/runs/{run.run_id}/executions?step=0").text
    assert execution_id(query_id(0, 0), 0) in page
    assert "excluded: " in page
    assert execution_id(query_id(1, 0), 0) not in page
    policy = client.get(f"/runs/{run.run_id}/executions").headers["content-security-policy"]
    assert "script-src" not in policy


@pytest.mark.parametrize(
    "path",
    [
        "/runs/nobody",
        "/runs/../secret",
        "/runs/%2e%2e%2fsecret",
        "/runs/recorded%2f..%2f..%2fsecret",
        "/runs/recorded/executions/..%2f..%2f..%2fsecret",
        "/runs/recorded/executions/.hidden",
        "/runs/recorded/config.yaml",
        "/sweeps/../secret",
        "/secret",
        "/runs/recorded%00",
    ],
)
def test_nothing_else_can_be_reached(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "not for anyone" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(client: TestClient, run: Run, method: str) -> None:
    assert client.request(method, f"/runs/{run.run_id}").status_code == 405


def test_looking_changes_nothing(client: TestClient, run: Run) -> None:
    def digest() -> str:
        keys = run.store.keys("")
        whole = b"".join(key.encode() + run.store.read(key) for key in sorted(keys))
        return hashlib.sha256(whole).hexdigest()

    before = digest()
    for path in ("/", f"/runs/{run.run_id}", f"/runs/{run.run_id}/executions", "/metrics"):
        assert client.get(path).status_code == 200
    assert digest() == before


def test_figures_for_prometheus_are_those_of_the_last_update(client: TestClient, run: Run) -> None:
    text = client.get("/metrics").text
    last = json.loads(run.store.read(run.layout.metrics).splitlines()[-1])
    assert f'gyre_version{{run="recorded"}} {float(last["policy_version"])}' in text
    (rate,) = re.findall(r'gyre_pass_rate\{run="recorded"\} (\S+)', text)
    assert float(rate) == pytest.approx(last["pass_rate"])
    assert "gyre_waterlevel{" not in text, "the run is not under way"


def test_the_dashboard_asks_only_for_figures_that_there_are() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    names = {name for expression in asked for name in re.findall(r"gyre_[a-z_]+", expression)}
    assert names and names <= set(GAUGES)


def test_pages_are_there_while_the_block_lasts(run: Run) -> None:
    with pages_on(run.store.url, "127.0.0.1", 0) as url:
        assert httpx.get(url, trust_env=False, timeout=20).status_code == 200
        port = int(url.rpartition(":")[2])
        with (
            pytest.raises(ServerError, match=f"port {port}"),
            pages_on(run.store.url, "127.0.0.1", port),
        ):
            pass
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False, timeout=20)
