"""A run as every process opens it: store, keys and settings."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from functools import lru_cache

import yaml

from configs.load import ConfigError, dump_config
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import MissingObjectError, StorageError, Store
from storage.root import check_root, mark_root

FORMAT = 1
"""Of a run's folder: raise it when what a run stores moves to other keys."""


@dataclass(frozen=True)
class Run:
    """Store, keys and settings of one run."""

    store: Store
    layout: RunLayout
    config: RunConfig
    identity: str
    """Random, made with the run: a later run of the same name never finds this one's cached task
    results."""

    @property
    def run_id(self) -> str:
        return self.layout.run_id


def create_run(root: str, run_id: str, config: RunConfig) -> Run:
    """Record the settings of a new run; a run that exists keeps its own.

    Raises:
        ConfigError: the run exists with other settings.
        StorageError: it can't be recorded; nothing is left of it.
    """
    store, layout = Store(root), RunLayout(run_id)
    mark_root(store)
    text = f"# gyre run, format {FORMAT}\n{dump_config(config)}"
    try:
        store.write_once(layout.identity, secrets.token_hex(8).encode())
        new = store.write_once(layout.config, text.encode())
    except StorageError:
        if not store.exists(layout.config):
            store.delete(layout.prefix)
        raise
    if not new:
        found = open_run(root, run_id)
        if found.config != config:
            raise ConfigError(
                f"run {run_id} exists with other settings; take another name, or resume it with "
                f"its own: gyre train --resume {run_id}"
            )
    return open_run(root, run_id)


@lru_cache(maxsize=64)
def open_run(root: str, run_id: str) -> Run:
    """The run with that name.

    Raises:
        StorageError: there is none; the text lists those that exist.
        ConfigError: its settings can't be read by this version.
    """
    store, layout = Store(root), RunLayout(run_id)
    check_root(store)
    try:
        text = store.read(layout.config)
        identity = store.read(layout.identity).decode(errors="replace")
    except MissingObjectError:
        names = ", ".join(store.children("runs")) or "none"
        raise StorageError(f"no run {run_id!r} in {root}; there are: {names}") from None
    _check_format(text, layout.config)
    try:
        config = RunConfig.model_validate(yaml.safe_load(text))
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{layout.config}: not readable by this version: {error}") from error
    return Run(store, layout, config, identity)


def _check_format(text: bytes, key: str) -> None:
    """The format stands in a comment, so that a run's settings are a file for ``--config`` too. The
    first runs had none: they are of format 1."""
    found = re.match(rb"# gyre run, format (\d+)\n", text)
    version = int(found.group(1)) if found else FORMAT
    if version != FORMAT:
        raise ConfigError(
            f"{key}: a run of format {version}, this version reads {FORMAT}: use the Gyre that "
            f"made it"
        )
