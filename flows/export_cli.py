"""``gyre export``: the weights of a run as an HF directory."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cells.checkpoint import CheckpointError, checkpoint_versions, verified_checkpoint
from flows.console import ExitCode, RootOption, failure, opened
from storage.copies import local_copy
from storage.objects import StorageError
from storage.records import RecordError
from storage.run import Run
from tasks.warm_start.policies import MANIFEST, PolicyError, first_policy, policy_files

_OUT = Console()


def register(app: typer.Typer) -> None:
    """Add ``export`` to the command line."""
    app.command("export")(export)


def export(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; not there yet.")],
    version: Annotated[
        int | None,
        typer.Option(
            "--version",
            "-v",
            min=0,
            help="Weight version; 0 is the first policy. The newest checkpoint without it.",
        ),
    ] = None,
    root: RootOption = None,
) -> None:
    """Write the weights of a run as an HF directory: config, safetensors, tokenizer.

    transformers and SGLang load it, and another run starts from it with
    model.source=hf_directory. It may be used while the run goes on.

    Examples:

      gyre export my-run ./my-policy

      gyre export my-run ./my-policy --version 8
    """
    run = opened(run_id, root)
    if out.exists():
        raise failure(f"{out} exists already; give a folder that is not there", "Not exported")
    try:
        found, source = _source(run, version)
        files = _copy(source, out)
    except (CheckpointError, PolicyError, RecordError, StorageError) as error:
        raise failure(error, "Not exported") from None
    except OSError as error:
        raise failure(f"{out}: {error}", "Not exported", ExitCode.FAILED) from None
    _OUT.print(f"{out}: version {found} of run {run_id}, {files} files", highlight=False)


def _source(run: Run, version: int | None) -> tuple[int, Path]:
    """The version to export and its HF directory, verified.

    Raises:
        CheckpointError: there is no whole checkpoint of it.
        PolicyError: the first policy is asked for, and gone.
    """
    versions = checkpoint_versions(run)
    wanted = max(versions, default=0) if version is None else version
    if wanted in versions:
        return wanted, local_copy(run.store, verified_checkpoint(run, wanted).policy_key)
    first = first_policy(run)
    if wanted == 0 and first is not None:
        return 0, local_copy(run.store, first)
    there = ", ".join(str(one) for one in ([0] if first else []) + versions) or "none yet"
    raise CheckpointError(f"run {run.run_id} has no version {wanted}; there are: {there}")


def _copy(source: Path, out: Path) -> int:
    """Copy a policy; the folder appears when it is whole. Returns the number of files."""
    names = [name for name in policy_files(source, digests=False) if name != MANIFEST]
    aside = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    try:
        aside.mkdir(parents=True)
        for name in names:
            shutil.copyfile(source / name, aside / name)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return len(names)
