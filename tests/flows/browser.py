"""The Prefect UI as a person uses it: a page of a browser, a form that is filled, buttons."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.flows.orchestrated import Orchestrated

CHROMIUM = "/usr/bin/chromium"
UI_LIMIT_MS = 180_000
_PRESSES = 3
PICTURES = os.environ.get("GYRE_TEST_PICTURES")
"""A folder for screenshots, for whoever wants to look at them."""


@contextmanager
def browser_page(width: int = 1280, height: int = 1600) -> Iterator[Page]:
    """A page of Debian's Chromium."""
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        context = play.chromium.launch_persistent_context(
            folder,
            executable_path=CHROMIUM,
            args=["--no-sandbox"],
            viewport={"width": width, "height": height},
        )
        try:
            page = context.new_page()
            page.set_default_timeout(UI_LIMIT_MS)
            yield page
        finally:
            context.close()


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=str(Path(PICTURES) / f"{name}.png"))


def field(page: Page, name: str) -> Locator:
    """The input below a label of a form; the last of its name."""
    label = page.locator(".schema-form-property__label", has_text=name).last
    around = label.locator("xpath=ancestor::div[contains(@class, 'p-label ')][1]")
    return around.locator("textarea, input").first


def start_from_form(site: Orchestrated, page: Page, run_id: str, config: dict[str, Any]) -> str:
    """Fill the form of `train` with a file's name and one step, which the file has not; the flow
    run's id."""
    path = site.root / "light.yaml"
    config["training"] = {**config["training"], "steps": 4}
    path.write_text(yaml.safe_dump(config))
    address = f"{site.url}/deployments/deployment/{site.deployments['train']}/run"
    page.goto(address, wait_until="domcontentloaded")
    field(page, "run_id (Optional)").fill(run_id)
    field(page, "config (Optional)").fill(str(path))
    field(page, "Steps (Optional)").fill("1")
    field(page, "run_id (Optional)").scroll_into_view_if_needed()
    picture(page, f"form-{run_id}")
    return submit(site, page, f"train {run_id}")


def submit(site: Orchestrated, page: Page, name: str) -> str:
    """Press the form's button and wait for the flow run of that name; its id.

    The page leaves the form when the run is made. It stays where the server refused, as one on
    SQLite does when it is busy: the button is pressed again, as a person would.
    """
    button, found = page.get_by_role("button", name="Submit"), list[str]()
    button.click()

    def there() -> bool:
        found.extend(site.flow_runs(name))
        return bool(found)

    for _ in range(_PRESSES):
        with suppress(AssertionError):
            expect(button).to_be_hidden(timeout=UI_LIMIT_MS)
            break
        if there():
            break
        button.click()
    site.until(there, f"flow run {name}")
    return found[0]


def press(site: Orchestrated, page: Page, flow_run: str, button: str, confirm: str) -> None:
    """A button of a flow run's page, and the one of the dialog that it opens."""
    page.goto(f"{site.url}/runs/flow-run/{flow_run}", wait_until="domcontentloaded")
    page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.locator(".p-modal__card").get_by_role("button", name=confirm, exact=True)
    expect(dialog.last).to_be_visible(timeout=UI_LIMIT_MS)
    picture(page, button.lower())
    dialog.last.click()
    expect(dialog.last).to_be_hidden(timeout=UI_LIMIT_MS)
