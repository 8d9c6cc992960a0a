"""``gyre gc``: what of the storage may go."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cells.leftovers import Leftover, find_leftovers, remove_leftover
from configs.cells import StorageConfig
from configs.load import ConfigError, load_config
from flows.console import ConfigOption, ExitCode, RootOption, failure
from flows.inventory import Inventory, remove, take_inventory
from flows.roots import absolute_root
from storage.errors import StorageError
from storage.objects import Store
from storage.retention import Limits, Part, Plan, Removal, make_plan
from storage.root import check_root

_OUT = Console()
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_HOW = {
    Part.REMAINS: "delete",
    Part.WORKSPACES: "delete its frozen workspaces",
    Part.CHECKPOINTS: "delete its checkpoints but the last",
    Part.RUN: "delete",
    Part.POLICY: "delete: no run uses it",
}


def register(app: typer.Typer) -> None:
    """Add ``gc`` to the command line."""
    app.command("gc")(collect)


def collect(
    config: ConfigOption = "quickstart",
    root: RootOption = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=0, help="Newest runs to keep instead of storage.keep_runs."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="Only runs unchanged for so long (30d, 12h, 2w) instead of storage.keep_days.",
        ),
    ] = None,
    max_gb: Annotated[
        float | None,
        typer.Option("--max-gb", min=0, help="Quota instead of storage.max_gb."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go; delete nothing.")
    ] = False,
) -> None:
    """Delete what the limits don't keep, the oldest first, and what killed processes left.

    A quota takes the workspaces of finished runs first, then their checkpoints but the last, then
    whole runs, then policies that no run uses. Never a run that somebody works on or that changed
    in the last hour, nor a policy that a run has started from. Without any limit only remains of
    killed processes go.

    Exit code 0, or 1 when the quota can't be kept.

    Examples:

      gyre gc --dry-run

      gyre gc --keep 5 --older-than 30d

      gyre gc --max-gb 20
    """
    try:
        settings = load_config(config).storage
        limits = _limits(settings, keep, older_than, max_gb)
        store = Store(absolute_root(root or settings.root))
        check_root(store)
        inventory = take_inventory(store)
    except (ConfigError, StorageError) as error:
        raise failure(error, "Nothing was deleted") from None
    plan = make_plan(inventory.runs, inventory.policies, inventory.remains, limits, time.time())
    leftovers = find_leftovers()
    _print_table(inventory, plan, leftovers)
    freed = sum(removal.size for removal in plan.removals) + sum(one.size for one in leftovers)
    if dry_run:
        _OUT.print(f"{_size(freed)} would be freed, {_size(plan.left)} of {store.url} would stay")
    else:
        freed -= _carry_out(store, plan, leftovers)
        _OUT.print(f"{_size(freed)} freed in {store.url}")
    if plan.over:
        raise failure(
            f"{_size(plan.over)} more than the quota belong to runs in use, changed in the last "
            f"hour, unfinished, or kept: raise it, or lower --keep",
            "The quota can't be kept",
            ExitCode.FAILED,
        )


def _limits(
    settings: StorageConfig, keep: int | None, older_than: str | None, max_gb: float | None
) -> Limits:
    keep = settings.keep_runs if keep is None else keep
    days = settings.keep_days
    age = (None if days is None else days * 86_400) if older_than is None else _seconds(older_than)
    most = settings.max_gb if max_gb is None else max_gb
    return Limits(keep, age, None if most is None else int(most * 1e9))


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if not found:
        raise ConfigError(f"--older-than {text!r}: write a number and s, m, h, d or w, like 30d")
    return float(found.group(1)) * _UNITS[found.group(2)]


def _carry_out(store: Store, plan: Plan, leftovers: Sequence[Leftover]) -> int:
    """Delete; the bytes that were not, because somebody has begun to use them."""
    spared = 0
    for removal in plan.removals:
        try:
            user = remove(store, removal)
        except StorageError as error:
            raise failure(error, f"{removal.name} can't be deleted", ExitCode.FAILED) from None
        if user:
            spared += removal.size
            _OUT.print(f"{removal.name} stays: {user} uses it now", highlight=False)
    for leftover in leftovers:
        remove_leftover(leftover)
    return spared


def _print_table(inventory: Inventory, plan: Plan, leftovers: Sequence[Leftover]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("what", "size", "last change", "state", "goes"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    now = time.time()
    going: dict[str, list[Removal]] = {}
    for removal in plan.removals:
        going.setdefault(removal.name, []).append(removal)
    for run in sorted(inventory.runs, key=lambda run: run.changed_at):
        state = f"in use: {run.in_use}" if run.in_use else "finished" if run.finished else "stopped"
        gone = going.get(run.run_id, ())
        table.add_row(
            f"run {escape(run.run_id)}", _size(run.size), _age(now - run.changed_at), state,
            _goes(gone),
        )  # fmt: skip
    for policy in sorted(inventory.policies, key=lambda policy: policy.changed_at):
        gone = going.get(policy.key, ())
        table.add_row(
            escape(policy.key), _size(policy.size), _age(now - policy.changed_at), "", _goes(gone)
        )
    for rest in inventory.remains:
        gone = going.get(rest.prefix, ())
        table.add_row(
            escape(rest.prefix), _size(rest.size), _age(now - rest.changed_at), "half-written",
            _goes(gone),
        )  # fmt: skip
    for leftover in leftovers:
        table.add_row(escape(str(leftover.path)), _size(leftover.size), "", leftover.what, "delete")
    _OUT.print(table)


def _goes(removals: Sequence[Removal]) -> str:
    return "\n".join(f"{_HOW[one.part]}, {_size(one.size)}: {one.why}" for one in removals)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def _age(seconds: float) -> str:
    return f"{seconds / 86_400:.1f} d ago" if seconds >= 86_400 else f"{seconds / 3600:.1f} h ago"
