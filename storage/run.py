"""A run as every process opens it: store, keys and settings."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import lru_cache

import yaml

from configs.load import ConfigError, dump_config
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import MissingObjectError, StorageError, Store


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
    """
    store, layout = Store(root), RunLayout(run_id)
    store.write_once(layout.identity, secrets.token_hex(8).encode())
    if not store.write_once(layout.config, dump_config(config).encode()):
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
    try:
        text = store.read(layout.config)
        identity = store.read(layout.identity).decode()
    except MissingObjectError:
        names = ", ".join(store.children("runs")) or "none"
        raise StorageError(f"no run {run_id!r} in {root}; there are: {names}") from None
    try:
        config = RunConfig.model_validate(yaml.safe_load(text))
    except ValueError as error:
        raise ConfigError(f"{layout.config}: not readable by this version: {error}") from error
    return Run(store, layout, config, identity)
