"""`gyre serve` and `gyre train` with real engines and replicas, and nothing but s3 for storage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from cells.checkpoint import latest_checkpoint
from flows.cli import app
from flows.history import evaluations_of, updates_of
from flows.plan import step_plan
from flows.step_page import artifact_key
from storage.journal import read_journal
from storage.run import Run, open_run
from storage.samples import read_group
from tests.flows.browser import PICTURES, browser_page, picture
from tests.flows.conftest import finish, start_gyre
from tests.flows.operated import Operated, gyre_served
from tests.flows.orchestrated import MARK, logs

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1500)]


_DRAWN_MS = 6000
"""The UI draws time lines after all else; only pictures wait for it."""


@dataclass(frozen=True)
class Remote:
    """A run on s3 that has ended, what it printed, and its page as `gyre serve` shows it."""

    run: Run
    output: str
    page: httpx.Response


@pytest.fixture(scope="module")
def remote(
    s3: str, tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Remote]:
    """`gyre serve` and `gyre train`, which uses its server; then another machine looks at it."""
    root, storage = tmp_path_factory.mktemp("remote"), f"{s3}/smoke"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {MARK: str(root), "XDG_CACHE_HOME": str(root / "cache")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        with gyre_served(root, tiny_policy, storage=storage, env=env) as site:
            port = int(site.url.rsplit(":", 1)[1])
            words = ("train", "--config", "smoke", "--name", "far")
            command = start_gyre(root, *words, storage=storage, port=port)
            output = finish(command, root)
            if command.returncode:
                pytest.fail(f"ended with {command.returncode}:\n{output[-6000:]}\n{logs(root)}")
            page = httpx.get(f"{site.pages}/runs/far", trust_env=False, timeout=60)
            look(site)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("reader")))
        yield Remote(open_run(storage, "far"), output, page)


def look(site: Operated) -> None:
    """Pictures of a run whose engine and trainer are real, where somebody asked for them."""
    if PICTURES:
        (flow_run,) = site.flow_runs("train far")
        (newest, *_) = site.artifacts(artifact_key("far"))
        with browser_page(height=1000) as page:
            for name, address in (
                ("real-run", f"{site.url}/runs/flow-run/{flow_run}"),
                ("real-step", f"{site.url}/artifacts/artifact/{newest['id']}"),
                ("real-report", f"{site.pages}/runs/far"),
                ("real-index", site.pages),
            ):
                page.goto(address, wait_until="domcontentloaded")
                page.wait_for_timeout(_DRAWN_MS)
                picture(page, name)


def test_all_of_it_is_there(remote: Remote) -> None:
    run = remote.run
    steps, bursts = run.config.training.steps, run.config.training.updates_per_step
    assert [one.policy_version for one in updates_of(run)] == list(range(1, steps * bursts + 1))
    assert max(evaluations_of(run)) == steps * bursts
    for key in (run.layout.decisions, run.layout.levels, run.layout.ledger(0)):
        assert read_journal(run.store, key)
    for step in range(steps):
        assert run.store.exists(run.layout.step_done(step))
        for query in step_plan(run, step, 0).queries:
            group = read_group(run.store, run.layout.group(query.query_id))
            for member in group.header.members:
                assert read_journal(run.store, run.layout.calls(member.execution_id))


def test_it_has_a_report_and_weights_that_load(remote: Remote, tmp_path: Path) -> None:
    run = remote.run
    report = run.store.read(run.layout.report).decode()
    assert "pass rate" in report
    assert remote.page.status_code == 200 and remote.page.text == report
    found = latest_checkpoint(run)
    assert found is not None
    out = tmp_path / "weights"
    words = ["export", run.run_id, str(out), "--root", run.store.url]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0
