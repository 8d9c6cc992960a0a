"""Which daemons of a run have registered, and whether one of them lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from cells.client import DaemonClient, DaemonError, DaemonGoneError
from cells.daemon import Registration
from storage.errors import StorageError
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import RecordError

_ASK_LIMIT_S = 5.0


def registered(store: Store, layout: RunLayout) -> Iterator[Registration]:
    """What the daemons of a run have registered, those included that were killed."""
    folder = layout.host("x").rsplit("/", 1)[0]
    for name in store.children(folder):
        with suppress(RecordError, StorageError):
            yield store.read_record(f"{folder}/{name}", Registration)


def living_daemon(store: Store, layout: RunLayout) -> str:
    """Name of a daemon of the run that lives; empty when none does.

    One that listens and does not answer in time counts as living: it may be busy.
    """
    for registration in registered(store, layout):
        client = DaemonClient(registration)
        try:
            answer = client.call("GET", "/healthz", limit_s=_ASK_LIMIT_S)
            if answer.get("incarnation") == registration.incarnation:
                return registration.name
        except DaemonGoneError:
            continue
        except DaemonError:
            return registration.name
        finally:
            client.close()
    return ""
