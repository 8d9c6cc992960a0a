"""Weights & Biases and MLflow, whose packages are loaded only where a run asks for them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from configs.load import dump_config
from configs.tracking import TrackingConfig
from flows.tracking.points import Batch
from storage.run import Run

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}
"""The package that each tracker needs, which is also the name of Gyre's extra."""
EXPERIMENT = "gyre"
"""The MLflow experiment of all runs."""
_IDENTITY = "gyre.identity"


class TrackerError(RuntimeError):
    """A tracker can't be used; the text says why and what to do."""


def missing(config: TrackingConfig) -> list[str]:
    """The trackers that are asked for and whose package is not installed."""
    asked = {"wandb": config.wandb, "mlflow": config.mlflow}
    return [name for name, where in asked.items() if where and find_spec(PACKAGES[name]) is None]


def library(name: str) -> Any:
    """The package of a tracker.

    Raises:
        TrackerError: it is not installed.
    """
    try:
        return import_module(PACKAGES[name])
    except ImportError as error:
        raise TrackerError(
            f"tracking.{name} is set, and its package can't be loaded: {error}. "
            f"pip install 'gyre-rl[{name}]', or leave tracking.{name} empty"
        ) from None


class _Marked:
    """Remembers in storage what was sent, so that a retry of the run sends the rest."""

    name: str

    def __init__(self, run: Run) -> None:
        self.run = run
        self._folder = f"{run.layout.prefix}/tracking/{self.name}"

    def sent(self) -> set[str]:
        """Names of the batches that were sent."""
        return set(self.run.store.children(self._folder))

    def mark(self, batch: Batch) -> None:
        self.run.store.write_once(f"{self._folder}/{batch.name}", b"")


class WeightsAndBiases(_Marked):
    """A run of the project, named after ours, that goes on with each batch."""

    name = "wandb"

    def send(self, batch: Batch) -> None:
        """Log a batch over the axis ``version``."""
        wandb, run = library(self.name), self.run
        own = wandb.init(
            project=run.config.tracking.wandb,
            id=run.identity,
            name=run.run_id,
            resume="allow",
            config=run.config.model_dump(mode="json"),
        )
        # Its own counter only rises: an evaluation of a version that was trained before it is
        # dropped unless the axis is a figure of its own.
        own.define_metric("*", step_metric="version")
        for point in batch.points:
            own.log({**point.values, "version": point.version})
        own.finish()
        self.mark(batch)


class MlFlow(_Marked):
    """A run of the experiment ``gyre``, found again by ours' identity."""

    name = "mlflow"

    def send(self, batch: Batch) -> None:
        """Log a batch; the step of MLflow is the weight version."""
        mlflow = library(self.name)
        client = mlflow.MlflowClient(tracking_uri=self.run.config.tracking.mlflow)
        entities = import_module("mlflow.entities")
        metrics = [
            entities.Metric(name, value, int(1000 * point.at), point.version)
            for point in batch.points
            for name, value in point.values.items()
        ]
        client.log_batch(self._run_id(client), metrics=metrics)
        self.mark(batch)

    def _run_id(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(EXPERIMENT)
        where = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
        which = f"tags.`{_IDENTITY}` = '{self.run.identity}'"
        found = client.search_runs([where], which, max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {_IDENTITY: self.run.identity}
        made = str(client.create_run(where, run_name=self.run.run_id, tags=tags).info.run_id)
        client.log_text(made, dump_config(self.run.config), "config.yaml")
        return made
