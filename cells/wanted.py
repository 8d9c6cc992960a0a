"""What an attempt at a run wants hosts to hold that are started on other machines."""

from __future__ import annotations

from storage.objects import MissingObjectError
from storage.records import Record
from storage.run import Run


class Wanted(Record):
    """There from the moment that an attempt needs its daemons until it ends."""

    attempt: int
    """Rises with each attempt at the run."""
    policy_key: str
    """HF directory in storage that engines and replicas start with."""
    version: int
    """The weight version that it is."""


def want(run: Run, wanted: Wanted) -> None:
    """Tell hosts elsewhere what to start with."""
    run.store.write_record(run.layout.wanted, wanted)


def want_newer(run: Run, policy_key: str, version: int) -> None:
    """Hosts that start from now on begin with these weights, as the ones before may be deleted."""
    wanted = find_wanted(run)
    if wanted is not None:
        want(run, wanted.model_copy(update={"policy_key": policy_key, "version": version}))


def find_wanted(run: Run) -> Wanted | None:
    """What is wanted now; None between attempts."""
    try:
        return run.store.read_record(run.layout.wanted, Wanted)
    except MissingObjectError:
        return None


def want_no_more(run: Run) -> None:
    """Hosts need not start any more."""
    run.store.delete(run.layout.wanted)
