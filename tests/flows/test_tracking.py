"""Figures for trackers: what is in TensorBoard's files, and what the others are called with."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from configs.load import load_config
from flows.doctor.environment import trackers
from flows.doctor.finding import Status
from flows.history import evaluations_of, updates_of
from flows.tracking.points import batches_of
from flows.tracking.remote import TrackerError, library
from flows.tracking.track import track, trackers_of
from storage.run import Run
from tests.flows.recorded import STEPS, UPDATES, record_run


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum, bit by bit: an independent reference."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    value = crc32c(data)
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(data: bytes) -> list[bytes]:
    """The records of a TFRecord file, whose checksums are right."""
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        (of_size,) = struct.unpack_from("<I", data, at + 8)
        body = data[at + 12 : at + 12 + size]
        (of_body,) = struct.unpack_from("<I", data, at + 12 + size)
        assert (of_size, of_body) == (masked(data[at : at + 8]), masked(body))
        found.append(body)
        at += 16 + size
    return found


def scalars(run: Run) -> dict[tuple[str, int], float]:
    """What TensorBoard shows of the run's folder: values by tag and step."""
    folder = f"{run.layout.prefix}/tensorboard"
    found = {}
    for name in run.store.children(folder):
        assert "tfevents" in name
        first, *events = (
            Event.FromString(one) for one in records(run.store.read(f"{folder}/{name}"))
        )
        assert first.file_version == "brain.Event:2"
        for event in events:
            for value in event.summary.value:
                assert (value.tag, event.step) not in found
                found[value.tag, event.step] = value.simple_value
    return found


def silent(*words: Any) -> None:
    pytest.fail(str(words))


def test_tensorboard_gets_every_number_once(tmp_path: Path) -> None:
    run = record_run(tmp_path)
    track(run, silent)
    before = {name: run.store.read(name) for name in run.store.keys(run.layout.prefix)}
    found = scalars(run)
    for update in updates_of(run):
        for name in ("pass_rate", "grad_norm", "logprob_gap", "target_tokens", "staleness_mean"):
            value = found[f"update/{name}", update.policy_version]
            assert value == pytest.approx(getattr(update, name), rel=1e-6)
        has_gap = ("update/fresh_gap", update.policy_version) in found
        assert has_gap is (update.fresh_gap is not None)
    for version, evaluation in evaluations_of(run).items():
        value = found["held_out/pass_rate", version]
        assert value == pytest.approx(evaluation.pass_rate, rel=1e-6)
    assert not any(tag.startswith("update/ended_at") for tag, _ in found)
    track(run, silent)
    assert {name: run.store.read(name) for name in run.store.keys(run.layout.prefix)} == before


def test_names_of_batches_sort_as_they_came(tmp_path: Path) -> None:
    """TensorBoard reads files in the order of their names and never goes back to one."""
    names = [batch.name for batch in batches_of(record_run(tmp_path))]
    assert names == sorted(names)
    assert names[0].endswith("held-out") and names[-1].endswith("held-out")
    assert len(names) == STEPS + 2


def test_a_step_under_way_is_given_when_it_is_done(tmp_path: Path) -> None:
    run = record_run(tmp_path, steps=2)
    run.store.delete(run.layout.step_done(1))
    track(run, silent)
    assert max(step for _, step in scalars(run)) == UPDATES


def test_nothing_is_written_where_nothing_is_asked(tmp_path: Path) -> None:
    run = record_run(tmp_path)
    off = run.config.model_copy(
        update={"tracking": run.config.tracking.model_copy(update={"tensorboard": False})}
    )
    assert trackers_of(Run(run.store, run.layout, off, run.identity)) == []


class FakeWandb(ModuleType):
    """What Gyre calls of wandb."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []

    def init(self, **settings: Any) -> Any:
        self.begun.append(settings)
        return SimpleNamespace(
            define_metric=lambda *_, **__: None, log=self.logged.append, finish=lambda: None
        )


def asking(run: Run, **tracking: str) -> Run:
    """The same run with other trackers."""
    section = run.config.tracking.model_copy(update=tracking)
    config = run.config.model_copy(update={"tracking": section})
    return Run(run.store, run.layout, config, run.identity)


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = asking(record_run(tmp_path), wandb="agents")
    track(run, silent)
    assert {one["id"] for one in fake.begun} == {run.identity}
    assert fake.begun[0]["project"] == "agents" and fake.begun[0]["resume"] == "allow"
    rates = [(one["version"], one["update/pass_rate"]) for one in fake.logged
             if "update/pass_rate" in one]  # fmt: skip
    assert rates == [(one.policy_version, one.pass_rate) for one in updates_of(run)]
    count = len(fake.logged)
    track(run, silent)
    assert len(fake.logged) == count


def test_a_tracker_that_fails_is_said_and_given_the_rest_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, said = FakeWandb(), []
    run = asking(record_run(tmp_path), wandb="agents")
    monkeypatch.setitem(sys.modules, "wandb", None)
    track(run, lambda *words: said.append(words))
    assert len(said) == 1 and "gyre-rl[wandb]" in str(said)
    assert scalars(run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    track(run, silent)
    assert len(fake.begun) == STEPS + 2


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_not_there_is_named_before_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TrackerError, match=rf"gyre-rl\[{name}\]"):
        library(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("flows.tracking.remote.find_spec", lambda _: None)
    found = trackers(load_config("smoke", [f"tracking.{name}=x"]))
    assert found.status is Status.FAIL and f"gyre-rl[{name}]" in found.advice
    assert trackers(load_config("smoke")).status is Status.OK


class FakeClient:
    """What Gyre calls of an MLflow client."""

    def __init__(self) -> None:
        self.runs: dict[str, str] = {}
        self.metrics: list[Any] = []
        self.uris: set[str] = set()

    def __call__(self, tracking_uri: str) -> FakeClient:
        self.uris.add(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7")

    def search_runs(self, experiments: list[str], which: str, max_results: int) -> list[Any]:
        assert experiments == ["7"]
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=name))
            for name, identity in self.runs.items()
            if which == f"tags.`gyre.identity` = '{identity}'"
        ]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.runs[run_name] = tags["gyre.identity"]
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def log_text(self, run_id: str, text: str, file: str) -> None:
        assert "training:" in text

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        assert run_id in self.runs
        self.metrics += metrics


def test_mlflow_finds_its_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    entities = ModuleType("mlflow.entities")
    entities.Metric = lambda *words: words  # type: ignore[attr-defined]
    package = ModuleType("mlflow")
    package.MlflowClient = client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    run = asking(record_run(tmp_path), mlflow="sqlite:///x.db")
    track(run, silent)
    assert client.runs == {run.run_id: run.identity} and client.uris == {"sqlite:///x.db"}
    rates = [(step, value) for name, value, _, step in client.metrics
             if name == "update/pass_rate"]  # fmt: skip
    assert rates == [(one.policy_version, one.pass_rate) for one in updates_of(run)]
