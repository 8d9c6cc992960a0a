"""Operating runs in the Prefect UI and from a terminal: the form of a deployment, what is shown of
a run, the button that cancels one, a sweep with its page, schedules, deployments."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from flows.plan import step_plan
from flows.step_page import artifact_key
from flows.sweep.plan import SweepPlan, plan_key
from flows.sweep.results import Results, read_results, results_value
from flows.sweep.share import find_shared
from storage.run import Run
from storage.samples import read_header
from tests.flows.browser import (
    UI_LIMIT_MS,
    browser_page,
    field,
    picture,
    press,
    start_from_form,
    submit,
)
from tests.flows.operated import Operated
from tests.flows.orchestrated import environment, light

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[2]
FORMED, HELD, SWEEP, TYPED = "formed", "held", "caps", "typed"
EXECUTIONS = 8
CAPS = ("1", "2", "5", "none")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser_page() as page:
        yield page


@dataclass(frozen=True)
class Formed:
    """A run that was started from the form, and its flow run."""

    run: Run
    flow_run: str


@pytest.fixture(scope="module")
def formed(operated: Operated, page: Page) -> Formed:
    flow_run = start_from_form(operated, page, FORMED, light(operated))
    operated.wait(flow_run, "COMPLETED")
    return Formed(operated.run(FORMED), flow_run)


def test_a_run_starts_from_the_form_with_what_was_filled(formed: Formed) -> None:
    assert formed.run.config.training.steps == 1
    assert formed.run.config.harness.turns == 2


def test_the_ui_shows_the_run_with_its_tables_and_links(
    formed: Formed, operated: Operated, page: Page
) -> None:
    page.goto(f"{operated.url}/runs/flow-run/{formed.flow_run}", wait_until="domcontentloaded")
    expect(page.get_by_text(f"train {FORMED}").first).to_be_visible(timeout=UI_LIMIT_MS)
    picture(page, "run")
    artifact = f"{operated.url}/artifacts/key/{artifact_key(FORMED)}"
    page.goto(artifact, wait_until="domcontentloaded")
    expect(page.get_by_text("step 1 of 1, version 1").first).to_be_visible(timeout=UI_LIMIT_MS)
    (newest, *_) = operated.artifacts(artifact_key(FORMED))
    page.goto(f"{operated.url}/artifacts/artifact/{newest['id']}", wait_until="domcontentloaded")
    link = page.get_by_role("link", name="report").first
    assert link.get_attribute("href") == f"{operated.pages}/runs/{FORMED}"
    picture(page, "step")
    page.goto(f"{operated.pages}/runs/{FORMED}/executions?step=0", wait_until="domcontentloaded")
    expect(page.get_by_role("link", name="s00000-q0000-e000")).to_be_visible()
    page.get_by_role("link", name="s00000-q0000-e000").click()
    expect(page.get_by_text("s00000-q0000-e000").first).to_be_visible()


def test_a_step_has_a_bar_and_tasks_named_after_executions(
    formed: Formed, operated: Operated
) -> None:
    bars = operated.artifacts(f"progress-{artifact_key(FORMED)}")
    assert {(bar["type"], bar["data"]) for bar in bars} == {("progress", 100)}
    (step,) = operated.steps(FORMED)
    names = [name for name, _ in operated.tasks(step["id"])]
    assert "rollout s00000-q0000-e000 to e003" in names
    assert "score s00000-q0001-e000 to e003" in names


def test_a_finished_step_sent_its_events(formed: Formed, operated: Operated) -> None:
    payloads: dict[str, dict[str, object]] = {}

    def there() -> bool:
        payloads.update(operated.events(f"gyre.run.{FORMED}"))
        return "gyre.evaluation.finished" in payloads

    operated.until(there, "events of the run")
    done = payloads["gyre.step.finished"]
    assert (done["step"], done["steps"], done["version"]) == (0, 1, 1)
    assert done["valid"] == EXECUTIONS
    assert payloads["gyre.cell.switched"]["cell"] == "a"
    assert payloads["gyre.checkpoint.published"]["version"] == 1


def test_tensorboard_has_the_run(formed: Formed) -> None:
    folder = f"{formed.run.layout.prefix}/tensorboard"
    assert [name.split(".")[-1] for name in formed.run.store.children(folder)] == [
        "00000001-step-00000",
        "00000001-z-held-out",
    ]


@pytest.fixture(scope="module")
def cancelled(operated: Operated, page: Page) -> str:
    """A run that was cancelled by the button while its executions waited for an engine; its flow
    run."""
    operated.hold.touch()
    try:
        flow_run = start_from_form(operated, page, HELD, light(operated))
        operated.wait(flow_run, "RUNNING")
        operated.until(lambda: operated.steps(HELD), "the first step")
        press(operated, page, flow_run, "Cancel", "Confirm")
        operated.wait(flow_run, "CANCELLED")
    finally:
        operated.hold.unlink()
    return flow_run


def test_the_button_cancels_a_run(cancelled: str, operated: Operated) -> None:
    operated.until(lambda: operated.left() == [], "the daemons have ended")
    run = operated.run(HELD)
    assert not run.store.exists(run.layout.step_done(0))


def test_the_command_of_the_documents_retries_it(cancelled: str, operated: Operated) -> None:
    """The button is pressed in ``test_retried_run``."""
    prefect(operated, "flow-run", "retry", cancelled)
    operated.wait(cancelled, "COMPLETED", attempt=2)
    run = operated.run(HELD)
    assert run.store.exists(run.layout.step_done(0))
    assert operated.left() == []


def prefect(site: Operated, *words: str) -> None:
    """Prefect's own command, in the folder with `prefect.yaml`."""
    addresses = {"PREFECT_API_URL": f"{site.url}/api", "GYRE_ROOT": str(site.root)}
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *words],
        env=environment(site.root) | addresses,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Swept:
    """A sweep that has ended."""

    results: Results
    flow_run: str


@pytest.fixture(scope="module")
def swept(formed: Formed, operated: Operated, page: Page) -> Swept:
    """Started from the form of `sweep`, filled by an address as `Copy to new run` makes it."""
    parameters = {
        "name": SWEEP,
        "parameters": [{"key": "trajectory.cap", "values": CAPS}],
        "seeds": 2,
        "from_run": FORMED,
        "root": str(operated.root),
    }
    address = f"{operated.url}/deployments/deployment/{operated.deployments['sweep']}/run"
    filled = quote(json.dumps(parameters))
    page.goto(f"{address}?parameters={filled}", wait_until="domcontentloaded")
    expect(field(page, "from_run")).to_have_value(FORMED, timeout=UI_LIMIT_MS)
    picture(page, "form-sweep")
    flow_run = submit(operated, page, f"sweep {SWEEP}")
    operated.wait(flow_run, "COMPLETED")
    plan = formed.run.store.read_record(plan_key(SWEEP), SweepPlan)
    return Swept(read_results(formed.run.store, plan), flow_run)


def test_a_sweep_trains_every_point_on_the_same_first_rollouts(
    swept: Swept, formed: Formed, operated: Operated
) -> None:
    source = formed.run
    assert swept.results.done == len(swept.results.runs) == 2 * len(CAPS)
    for one in swept.results.runs:
        run = operated.run(one.run_id)
        shared = find_shared(run)
        assert shared is not None and shared.executions == EXECUTIONS
        assert step_plan(run, 0, 0) == step_plan(source, 0, 0)
        cap = run.config.trajectory.cap
        for query in step_plan(run, 0, 0).queries:
            own = read_header(run.store, run.layout.group(query.query_id))
            theirs = read_header(source.store, source.layout.group(query.query_id))
            assert [m.verdict for m in own.members] == [m.verdict for m in theirs.members]
            assert all(member.selected <= (cap or 1000) for member in own.members)
        (flow_run,) = operated.flow_runs(f"train {one.run_id}")
        tags = operated.flow_run(flow_run)["tags"]
        shown = "none" if cap is None else str(cap)
        assert {f"sweep:{SWEEP}", f"trajectory.cap={shown}", f"seed={one.seed}"} <= set(tags)
        (step,) = operated.steps(one.run_id)
        names = {name.split(" ")[0] for name, _ in operated.tasks(step["id"])}
        assert "samples" in names and not names & {"rollout", "score"}


def test_the_page_of_a_sweep_shows_its_points(swept: Swept, operated: Operated, page: Page) -> None:
    page.goto(f"{operated.pages}/sweeps/{SWEEP}", wait_until="domcontentloaded")
    expect(page.get_by_role("heading", name=SWEEP)).to_be_visible()
    expect(page.locator(".plotly-graph-div svg.main-svg").first).to_be_visible()
    body = page.inner_text("body")
    assert "Shared first step" in body and all(f"cap {cap}" in body for cap in CAPS)
    assert "within noise" in body or "wins" in body
    picture(page, "sweep")


COMMANDS = (
    ("train", "--config", "light.yaml", "--name", TYPED, "--seed", "5",
     "--set", "training.steps=1"),
    ("evaluate", TYPED, "--version", "1", "--problems", "2", "--samples", "2", "--json"),
    ("deploy", "--work-pool", "other",
     "--env", "AWS_SECRET_ACCESS_KEY={{ prefect.blocks.secret.gyre-s3 }}"),
    ("schedule", "train", "weekly", "--cron", "0 2 * * 6", "--config", "light.yaml"),
    ("schedule", "evaluate", "nightly", "--run", FORMED, "--cron", "0 3 * * *",
     "--timezone", "Europe/Berlin"),
    ("schedule", "list", "--json"),
    ("deploy",),
    ("schedule", "remove", "weekly"),
    ("pause", FORMED),
    ("pause", FORMED, "--undo"),
    ("sweep", "caps2", "--param", "trajectory.cap=1,5", "--from-run", FORMED, "--check"),
    ("attach", FORMED),
)  # fmt: skip
_RUN_ALL = """
import json, sys
from typer.testing import CliRunner
from flows.cli import app
lines = []
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, words)
    lines.append([" ".join(words[:2]), done.exit_code, done.stdout])
print(json.dumps(lines))
"""


def typed(site: Operated, *commands: tuple[str, ...]) -> dict[str, str]:
    """What commands of `gyre` print, by their first two words. All in one process: each would load
    Prefect anew."""
    root = ("--root", str(site.root))
    env = environment(site.root) | {"PREFECT_API_URL": f"{site.url}/api"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, json.dumps([[*one, *root] for one in commands])],
        env=env,
        cwd=site.root,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    assert [code for _, code, _ in lines] == [0] * len(commands), lines
    return {words: output for words, _, output in lines}


def test_the_command_of_a_sweep_that_is_done_shows_it(swept: Swept, operated: Operated) -> None:
    params = ("--param", f"trajectory.cap={','.join(CAPS)}", "--seeds", "2")
    printed = typed(operated, ("sweep", SWEEP, *params, "--from-run", FORMED, "--json"))
    again = json.loads(printed[f"sweep {SWEEP}"].splitlines()[-1])
    assert again == json.loads(json.dumps(results_value(swept.results)))


def test_commands_of_the_documents_work_on_the_server(formed: Formed, operated: Operated) -> None:
    printed = typed(operated, *COMMANDS)
    assert operated.run(TYPED).config.seed == 5
    evaluated = json.loads(printed[f"evaluate {TYPED}"].splitlines()[-1])
    assert (evaluated["problems"], evaluated["samples"]) == (2, 2)
    assert [one["policy"] for one in evaluated["versions"]] == ["1"]
    schedules = {one["name"]: one for one in json.loads(printed["schedule list"])}
    assert schedules["nightly"]["timezone"] == "Europe/Berlin"
    assert schedules["weekly"]["cron"] == "0 2 * * 6"
    assert schedules["weekly"]["parameters"]["config"] == str(operated.root / "light.yaml")
    answer = operated.api.get("/deployments/name/train/train").json()
    assert answer["job_variables"]["env"]["AWS_SECRET_ACCESS_KEY"].startswith("{{ prefect.blocks")
    assert not answer["schedules"]
    assert operated.api.get("/deployments/name/evaluate/evaluate").json()["schedules"]


def test_prefects_own_commands_make_pools_and_the_same_deployments(operated: Operated) -> None:
    template = ("--base-job-template", "docs/kubernetes.json")
    prefect(operated, "work-pool", "create", "k8s", "--type", "kubernetes", *template)
    pool = operated.api.get("/work_pools/k8s").json()
    assert pool["base_job_template"] == json.loads((ROOT / template[1]).read_text())
    before = {name: operated.deployments[name] for name in ("train", "sweep")}
    prefect(operated, "--no-prompt", "deploy", "--all")
    for name, one in before.items():
        answer = operated.api.get(f"/deployments/name/{name}/{name}").json()
        assert answer["id"] == one and answer["parameters"] == {"root": str(operated.root)}
        assert answer["work_pool_name"] == "gyre"
