"""``gyre harness``: clients that are not part of Gyre, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from configs.problems import HarnessConfig, SandboxKind
from flows.console import ExitCode, failure
from tasks.rollout.harnesses.check import check_client
from tasks.rollout.harnesses.client import Client
from tasks.rollout.harnesses.command import HarnessError
from tasks.rollout.harnesses.launch import CLIENTS, cache_of, find_client, make_client
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sandboxes.sandbox import SandboxError

_OUT = Console()
_app = typer.Typer(no_args_is_help=True, help="Install and check clients that run as harnesses.")

NameArgument = Annotated[str, typer.Argument(help="Name of the harness.")]
VersionOption = Annotated[
    str | None, typer.Option("--version", help="One of its versions instead of the first.")
]
FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="As harness.folder: where clients are installed.")
]


def register(app: typer.Typer) -> None:
    """Add ``harness`` to the command line."""
    app.add_typer(_app, name="harness")


@_app.command("list")
def show(
    folder: FolderOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the clients, their versions, and which are installed.

    Examples:

      gyre harness list
    """
    cache = cache_of(_config("loop", None, folder))
    rows = [
        {
            "name": name,
            "version": version,
            "from": client.package(version).manager,
            "installed": client.package(version).is_installed(cache),
            "default": version == client.versions[0],
        }
        for name, client in CLIENTS.items()
        for version in client.versions
    ]
    if as_json:
        typer.echo(json.dumps({"folder": str(cache), "harnesses": rows}))
        return
    table = Table(title=f"clients in {cache}", title_justify="left")
    for column in ("name", "version", "from", "installed"):
        table.add_column(column)
    for row in rows:
        default = " (default)" if row["default"] else ""
        installed = "yes" if row["installed"] else "no"
        table.add_row(str(row["name"]), f"{row['version']}{default}", str(row["from"]), installed)
    _OUT.print(table)


@_app.command("install")
def install(name: NameArgument, version: VersionOption = None, folder: FolderOption = None) -> None:
    """Download a client, as its lock has it. Afterwards it needs no network.

    Examples:

      gyre harness install claude-code

      gyre harness install qwen-code --folder shared/harnesses
    """
    client = _client(name, version, folder)
    _OUT.print(f"{client.name} {client.version} is in {client.folder}", soft_wrap=True)


@_app.command("check")
def check(name: NameArgument, version: VersionOption = None, folder: FolderOption = None) -> None:
    """Start an installed client in a sandbox and ask for its version.

    Exit code 3 when it is not installed or does not start.

    Examples:

      gyre harness check claude-code
    """
    try:
        found = find_client(name)
        chosen = found.choose_version(version)
    except HarnessError as error:
        raise failure(error, "There is no such harness") from None
    config = _config(name, version, folder)
    if not found.package(chosen).is_installed(cache_of(config)):
        text = f"{name} {chosen} is not installed: gyre harness install {name}"
        raise failure(text, "The harness can't be used", ExitCode.NOT_READY)
    client = _client(name, version, folder)
    try:
        said = check_client(client, make_sandbox(SandboxKind.BUBBLEWRAP, ""))
    except (HarnessError, SandboxError) as error:
        raise failure(error, "The harness can't be used", ExitCode.NOT_READY) from None
    _OUT.print(f"{client.name} starts in a sandbox and says: {said}", soft_wrap=True)


def _client(name: str, version: str | None, folder: Path | None) -> Client:
    """The client, installed."""
    try:
        return make_client(_config(name, version, folder), call_limit_s=0, context=None)
    except HarnessError as error:
        raise failure(error, "The harness can't be installed", ExitCode.NOT_READY) from None


def _config(name: str, version: str | None, folder: Path | None) -> HarnessConfig:
    given = None if folder is None else str(folder.absolute())
    return HarnessConfig(name=name, version=version, folder=given)
