"""``gyre samples``: what a sealed group trains, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated

import numpy as np
import typer
from rich import box
from rich.table import Table
from rich.text import Text

from flows.console import RootOption, failure, opened
from flows.start import terminal
from flows.text import Decode, decoder
from storage.objects import MissingObjectError
from storage.records import CallKind, Member, RecordError, Scored
from storage.run import Run
from storage.samples import Sample, SealedGroup, read_group

_app = typer.Typer(
    no_args_is_help=True,
    help="Show what was sealed for training.",
    rich_markup_mode="rich",
)


def register(app: typer.Typer) -> None:
    """Add ``samples`` to the command line."""
    app.add_typer(_app, name="samples")


@_app.callback()
def _samples() -> None:
    pass


@_app.command()
def show(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    group: Annotated[str, typer.Argument(help="Query of the group, for example s00000-q0003.")],
    index: Annotated[
        int | None, typer.Option("--index", "-i", help="One sample: its text beside its mask.")
    ] = None,
    root: RootOption = None,
) -> None:
    """Show a sealed group: its members, what the cap kept and dropped, and its samples.

    [bold]Examples[/bold]

      gyre samples show my-run s00000-q0003

      gyre samples show my-run s00000-q0003 --index 2
    """
    run, out = opened(run_id, root), terminal()
    sealed = _sealed(run, group)
    if index is None:
        out.print(_members(sealed))
        out.print(_overview(sealed))
    elif 0 <= index < len(sealed.samples):
        out.print(_masked(sealed.samples[index], decoder(run)))
    else:
        raise failure(f"{group} has {len(sealed.samples)} samples, from 0", "No such sample")


def _sealed(run: Run, group: str) -> SealedGroup:
    try:
        return read_group(run.store, run.layout.group(group))
    except MissingObjectError:
        names = [
            name.removesuffix(".safetensors")
            for name in run.store.children(f"{run.layout.prefix}/groups")
        ]
        raise failure(
            f"{group} is not sealed in run {run.run_id}; there are: {', '.join(names) or 'none'}",
            "No such group",
        ) from None
    except RecordError as error:
        raise failure(error, "The group can't be read") from None


def _members(sealed: SealedGroup) -> Table:
    header = sealed.header
    table = Table(title=f"{header.query_id}: {header.problem_id}", box=box.SIMPLE_HEAD)
    for name in ("execution", "reward", "advantage", "paths", "kept", "dropped"):
        table.add_column(name)
    for name in ("targets", "dropped targets", "cut targets"):
        table.add_column(name, justify="right")
    for member in header.members:
        table.add_row(
            member.execution_id,
            verdict_text(member),
            "-" if member.advantage is None else f"{member.advantage:+.3f}",
            str(member.paths),
            kinds_text(member.kept),
            kinds_text(member.dropped),
            str(member.target_tokens),
            str(member.dropped_tokens),
            str(member.cut_tokens),
        )
    return table


def _overview(sealed: SealedGroup) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("sample", "execution", "kind"):
        table.add_column(name)
    for name in ("tokens", "targets", "versions", "mean log-prob", "weight", "advantage"):
        table.add_column(name, justify="right")
    for number, sample in enumerate(sealed.samples):
        table.add_row(
            str(number),
            sample.execution_id,
            sample.kind.value,
            str(len(sample.ids)),
            str(int(sample.targets.sum())),
            versions_text(sample.versions[sample.targets].tolist()),
            f"{sample.logprobs[sample.targets].mean():.3f}",
            f"{sample.weight:.3f}",
            f"{sample.advantage:+.3f}",
        )
    return table


def _masked(sample: Sample, decode: Decode) -> Table:
    """The sample in runs of targets of one version, and of context."""
    table = Table(
        title=f"{sample.execution_id} {sample.kind.value}, weight {sample.weight:.3f}, "
        f"advantage {sample.advantage:+.3f}",
        box=box.SIMPLE_HEAD,
        show_lines=True,
    )
    for name in ("positions", "mask", "version", "log-prob"):
        table.add_column(name, no_wrap=True)
    table.add_column("text", ratio=1, overflow="fold")
    for start, end in _runs(sample):
        target = bool(sample.targets[start])
        text = Text(decode(sample.ids[start:end].tolist()), style="bold green" if target else "dim")
        mean = f"{sample.logprobs[start:end].mean():.3f}" if target else ""
        version = str(sample.versions[start]) if target else ""
        mask = "target" if target else "context"
        table.add_row(f"{start}-{end - 1}", mask, version, mean, text)
    return table


def _runs(sample: Sample) -> Iterator[tuple[int, int]]:
    changes = np.flatnonzero(
        (np.diff(sample.targets.astype(np.int8)) != 0) | (np.diff(sample.versions) != 0)
    )
    return pairwise([0, *(int(at) + 1 for at in changes), len(sample.ids)])


def verdict_text(member: Member) -> str:
    """Reward of a member, or why it has none."""
    if isinstance(member.verdict, Scored):
        return f"{member.verdict.reward:.3f}" + (" timed out" if member.verdict.timed_out else "")
    return f"excluded: {member.verdict.reason}"


def kinds_text(counts: dict[CallKind, int]) -> str:
    """Numbers of trajectories by kind."""
    return ", ".join(f"{count} {kind.value}" for kind, count in counts.items()) or "-"


def versions_text(versions: list[int]) -> str:
    """The versions in a list, as a range."""
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low}-{high}"
