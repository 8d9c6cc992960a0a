"""Pages of runs over HTTP: reports, executions, sweeps, and figures for Prometheus. Read only."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from configs.load import ConfigError
from flows.execution_view import NoExecutionError, view_execution
from flows.inspect_page import page as execution_page
from flows.overview import RUN_COLUMNS, daemons_live, look_at, run_row
from flows.report import make_report
from flows.serve_metrics import RunCollector
from flows.sweep.plan import page_key
from flows.text import decoder
from storage.layout import RunLayout, execution_id
from storage.objects import MissingObjectError, StorageError, Store
from storage.records import RecordError, Scored, StepPlan
from storage.run import Run, open_run
from storage.samples import read_header
from tasks.sampling.tree import CallTreeError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FRESH_S = 30.0
"""A page of a run under way is made again when it is older."""
_KEPT_PAGES = 8
_LOOKED_AT = 50
"""Runs whose figures the list of all has: the newest."""
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    # What a model wrote is in these pages, escaped; were it not, it could still load nothing.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:",
}
_SCRIPTS = {
    **_HEADERS,
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data: blob:",
}
_STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif;
margin: 2rem auto; max-width: 72rem; padding: 0 1rem; } table { border-collapse: collapse; }
th, td { padding: .25rem .8rem; text-align: left; border-bottom: 1px solid #8884; }
"""


class UnknownPageError(LookupError):
    """There is no such run, sweep or execution."""


@dataclass(frozen=True)
class _Made:
    at: float
    html: str


class Pages:
    """What ``gyre serve`` shows of one storage root.

    Names in addresses are only ever compared with what storage lists, so that none can lead
    anywhere else.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._store = Store(root)
        self._making = threading.Lock()
        self._made: dict[str, _Made] = {}
        self._registry = CollectorRegistry()
        self._registry.register(RunCollector(root))

    def app(self) -> Starlette:
        """The application; every route is a GET."""
        return Starlette(
            routes=[
                Route("/", _html(self.index)),
                Route("/runs/{run}", _html(self.report, _SCRIPTS)),
                Route("/runs/{run}/executions", _html(self.executions)),
                Route("/runs/{run}/executions/{execution}", _html(self.execution)),
                Route("/sweeps/{sweep}", _html(self.sweep, _SCRIPTS)),
                Route("/metrics", self._metrics),
            ]
        )

    def index(self, request: Request) -> str:
        """All runs and sweeps, with links."""
        return self._once("", self._index)

    def _index(self) -> str:
        began = {name: self._began(name) for name in self._store.children("runs")}
        names = sorted(began, key=lambda name: began[name], reverse=True)
        head = "".join(f"<th>{column}</th>" for column in (*RUN_COLUMNS, ""))
        runs = "".join(self._run_line(name, at < _LOOKED_AT) for at, name in enumerate(names))
        sweeps = "".join(
            f'<tr><td><a href="/sweeps/{quote(name)}">{escape(name)}</a></td></tr>'
            for name in self._store.children("sweeps")
        )
        return _page(
            "Gyre",
            f"<h2>Runs</h2><table><tr>{head}</tr>{runs}</table>"
            f"<h2>Sweeps</h2><table>{sweeps}</table>"
            f'<p><a href="/metrics">metrics</a></p>',
        )

    def _began(self, name: str) -> float:
        return self._store.written_at(RunLayout(name).identity) or 0.0

    def _run_line(self, name: str, look: bool) -> str:
        """A run's figures and links; only its name where there are newer ones in plenty."""
        cells: tuple[str, ...] = ()
        if look:
            try:
                cells = run_row(look_at(open_run(self._root, name)))[1:]
            except (ConfigError, StorageError, RecordError) as error:
                cells = (f"can't be read: {error}",)
        cells += ("",) * (len(RUN_COLUMNS) - 1 - len(cells))
        rest = "".join(f"<td>{escape(one)}</td>" for one in cells)
        return (
            f'<tr><td><a href="/runs/{quote(name)}">{escape(name)}</a></td>{rest}'
            f'<td><a href="/runs/{quote(name)}/executions">executions</a></td></tr>'
        )

    def report(self, request: Request) -> str:
        """The report of a run: as it was written at its end, or made now for one under way."""
        run = self._run(request)
        stored = run.layout.report
        if self._store.exists(stored) and not daemons_live(run):
            return self._store.read(stored).decode()
        return self._once(run.run_id, lambda: make_report(run))

    def sweep(self, request: Request) -> str:
        """The page of a sweep as its flow last wrote it."""
        name = self._known(request, "sweep", "sweeps")
        return self._store.read(page_key(name)).decode()

    def executions(self, request: Request) -> str:
        """The members of the sealed groups of a step, the last one when none is asked for."""
        run = self._run(request)
        steps = [int(name) for name in run.store.children(f"{run.layout.prefix}/steps")]
        asked = request.query_params.get("step", "")
        step = int(asked) if asked.isdigit() else max(steps, default=0)
        links = " ".join(f'<a href="?step={one}">{one}</a>' for one in steps)
        rows = list(self._members(run, step))
        return _page(
            f"{run.run_id}, step {step}",
            f"<p>steps: {links}</p><table><tr><th>execution</th><th>problem</th><th>verdict</th>"
            f"<th>advantage</th><th>trajectories</th></tr>{''.join(rows)}</table>",
        )

    def execution(self, request: Request) -> str:
        """The calls of an execution."""
        run = self._run(request)
        name = self._known(request, "execution", f"{run.layout.prefix}/executions")
        return execution_page(view_execution(run, name), decoder(run))

    def _members(self, run: Run, step: int) -> list[str]:
        plan = run.store.read_record(run.layout.step_plan(step), StepPlan)
        rows = []
        for query in plan.queries:
            try:
                header = read_header(run.store, run.layout.group(query.query_id))
            except MissingObjectError:
                names = (execution_id(query.query_id, at) for at in range(query.group_size))
                rows += [_row(run, name, query.problem_id, "not yet", "", "") for name in names]
                continue
            for member in header.members:
                verdict = member.verdict
                if isinstance(verdict, Scored):
                    words = f"{verdict.reward:.3f}{', timed out' if verdict.timed_out else ''}"
                else:
                    words = f"excluded: {verdict.reason}"
                advantage = "-" if member.advantage is None else f"{member.advantage:+.3f}"
                paths = f"{member.selected} of {member.paths}"
                rows.append(
                    _row(run, member.execution_id, query.problem_id, words, advantage, paths)
                )
        return rows

    def _run(self, request: Request) -> Run:
        return open_run(self._root, self._known(request, "run", "runs"))

    def _known(self, request: Request, parameter: str, folder: str) -> str:
        name: str = request.path_params[parameter]
        if not _NAME.fullmatch(name) or name not in self._store.children(folder):
            raise UnknownPageError(f"no {parameter} {name!r}")
        return name

    def _once(self, key: str, make: Callable[[], str]) -> str:
        """One page is made at a time, and a run's at most every half minute."""
        with self._making:
            made = self._made.get(key)
            if made is None or time.monotonic() - made.at > _FRESH_S:
                made = _Made(time.monotonic(), make())
                self._made.pop(key, None)
                self._made[key] = made
                while len(self._made) > _KEPT_PAGES:
                    self._made.pop(next(iter(self._made)))
            return made.html

    def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


def _html(
    make: Callable[[Request], str], headers: dict[str, str] = _HEADERS
) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        try:
            return HTMLResponse(make(request), headers=headers)
        except (UnknownPageError, MissingObjectError, NoExecutionError) as error:
            return HTMLResponse(_page("Not found", f"<p>{escape(str(error))}</p>"), 404, _HEADERS)
        except (StorageError, RecordError, ConfigError, CallTreeError) as error:
            text = _page("It can't be shown", f"<p>{escape(str(error))}</p>")
            return HTMLResponse(text, 500, _HEADERS)

    return answer


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>"
    )


def _row(run: Run, name: str, problem: str, verdict: str, advantage: str, paths: str) -> str:
    link = f'<a href="/runs/{quote(run.run_id)}/executions/{quote(name)}">{escape(name)}</a>'
    rest = "".join(f"<td>{escape(one)}</td>" for one in (problem, verdict, advantage, paths))
    return f"<tr><td>{link}</td>{rest}</tr>"
