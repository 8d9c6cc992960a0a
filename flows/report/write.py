"""Making the page about a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from configs.load import dump_config
from storage.run import Run


def make_report(run: Run) -> str:
    """The page about a run, finished or not, as text.

    Raises:
        StorageError: storage can't be read.
        RecordError: something in it is of another version of Gyre.
    """
    # Brings plotly, a second of start-up that no other part of a flow needs.
    from flows.report.history import read_history
    from flows.report.page import render

    return render(read_history(run), dump_config(run.config))


def write_report(run: Run) -> str:
    """Write the page into the run's storage and return its key.

    Raises: as ``make_report``, and
        StorageError: the store is full or refuses.
    """
    run.store.write(run.layout.report, make_report(run).encode())
    return run.layout.report


@contextmanager
def reported(run: Run, warn: Callable[[str], None]) -> Iterator[None]:
    """Write the page when the block has ended, also when it failed. Not when it was cancelled: that
    must not take longer than it has to, and ``gyre report`` can write the page later."""
    try:
        yield
    except Exception:
        _try_to_write(run, warn)
        raise
    _try_to_write(run, warn)


def _try_to_write(run: Run, warn: Callable[[str], None]) -> None:
    try:
        write_report(run)
    except Exception as error:  # noqa: BLE001 - no reason for a run to fail
        reason = f"{type(error).__name__}: {error}"
        warn(f"no report was written ({reason}); gyre report {run.run_id} tries again")
