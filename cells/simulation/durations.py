"""Duration logs: a CSV file with a row for each execution."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from cells.simulation.workload import Origin, RecordedDurations, Source, Workload


class DurationLogError(ValueError):
    """The log cannot be used; the text names the file, the row and what is wrong."""


def read_durations(path: Path) -> RecordedDurations:
    """Read a log with the columns `problem` and `seconds`.

    Raises:
        OSError: if the file cannot be read.
        DurationLogError: if a column is missing, a value is no positive number, or it is empty.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if not {"problem", "seconds"} <= set(rows.fieldnames or ()):
            raise DurationLogError(f"{path}: needs the columns problem and seconds")
        for row in rows:
            try:
                value = float(row["seconds"])
            except (TypeError, ValueError):
                value = 0.0
            if not 0 < value < float("inf"):
                raise DurationLogError(
                    f"{path}, line {rows.line_num}: {row['seconds']!r} is no positive duration"
                )
            seconds[row["problem"]].append(value)
    if not seconds:
        raise DurationLogError(f"{path}: no rows")
    return RecordedDurations(seconds={name: tuple(found) for name, found in seconds.items()})


def with_durations(workload: Workload, durations: RecordedDurations, note: str) -> Workload:
    """The workload with measured durations; a call's share of them stays what it was."""
    mean = sum(map(sum, durations.seconds.values())) / sum(map(len, durations.seconds.values()))
    data = workload.model_dump()
    kept = {name: s for name, s in data["sources"].items() if not name.startswith("durations.")}
    source = Source(origin=Origin.MEASURED, note=note).model_dump()
    data["durations"] = durations.model_dump()
    data["sources"] = {**kept, "durations.seconds": source}
    # As many calls in an execution of mean length as there were in one of median length.
    median = getattr(workload.durations, "median_s", mean)
    data["execution"]["block_s"] = workload.execution.block_s * mean / median
    return Workload.model_validate(data)
