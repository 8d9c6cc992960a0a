"""Making the page about a run."""

from __future__ import annotations

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
