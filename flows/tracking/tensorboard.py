"""Event files for TensorBoard: one for each batch, whole or not there, on any storage."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flows.tracking.points import Batch
from storage.run import Run

_MARK = "events.out.tfevents."
"""TensorBoard reads files with this in their name, in the order of their names."""


class TensorBoard:
    """The folder ``tensorboard`` of a run.

    A file of its own for each batch can be written anew by a retry and put on an object store,
    where nothing can be appended.
    """

    def __init__(self, run: Run) -> None:
        self._store = run.store
        self._folder = f"{run.layout.prefix}/tensorboard"

    def sent(self) -> set[str]:
        """Names of the batches that are there."""
        return {name.removeprefix(_MARK) for name in self._store.children(self._folder)}

    def send(self, batch: Batch) -> None:
        """Write the file of a batch.

        Raises:
            StorageError: storage is full or refuses.
        """
        self._store.write(f"{self._folder}/{_MARK}{batch.name}", encoded(batch))


def encoded(batch: Batch) -> bytes:
    """The file: framed records, the first with the version of their format."""
    # Only now: it brings more than a flow needs before its first step is done.
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter

    with tempfile.TemporaryDirectory(prefix="gyre-tensorboard-") as folder:
        file = Path(folder) / "events"
        writer = RecordWriter(str(file))
        first = batch.points[0].at if batch.points else 0.0
        writer.write(Event(wall_time=first, file_version="brain.Event:2").SerializeToString())
        for point in batch.points:
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            event = Event(wall_time=point.at, step=point.version, summary=Summary(value=values))
            writer.write(event.SerializeToString())
        writer.close()
        return file.read_bytes()
