"""What each command does to weights, gradient and optimizer; repeats, refusals, resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cells.replica.errors import ReplicaError
from cells.replica.groups import SampleRequest
from cells.replica.settings import ReplicaSettings
from storage.objects import Store
from storage.records import CallKind, GroupHeader
from storage.samples import Sample, SealedGroup, seal
from tests.cells.replica.conftest import VOCABULARY, seal_group

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("megatron")]
LOSSES = "tests.cells.replica.losses:"
RATE = 1e-2
GROUPS = ("g0", "g1", "g2")


class Replica:
    """A replica in this process, with shorthands."""

    def __init__(self, root: Path, *, core: bool, loss: str = "SequenceRatio", **more: Any) -> None:
        from cells.replica.commands import Commands

        settings = ReplicaSettings(root=str(root), core=core, objective=LOSSES + loss, **more)
        self.commands = Commands(settings)

    def __call__(self, command: str, **args: Any) -> dict[str, Any]:
        return self.commands.run(command, args)

    def micro(self, name: str, *refs: tuple[str, int], update: int = 0) -> dict[str, Any]:
        samples = [{"group_key": key, "index": index} for key, index in refs]
        return self("micro_step", step=0, update=update, micro_step=name, samples=samples)

    def train(self, update: int) -> dict[str, Any]:
        self.micro("m0", ("g0", 0), ("g0", 2), update=update)
        self.micro("m1", ("g1", 1), ("g2", 0), update=update)
        return self("step", step=0, update=update, executions=4, learning_rate=RATE)

    @property
    def weights(self) -> torch.Tensor:
        return self.commands._loaded()[0].flat.weights.clone()

    @property
    def gradients(self) -> torch.Tensor:
        return self.commands._loaded()[1].policy.flat.gradients.clone()


@pytest.fixture
def make(tmp_path: Path, hf_folder: Callable[..., Path]) -> Callable[..., Replica]:
    """Makes replicas over one store with sealed groups, loaded as version 0."""
    store = Store(tmp_path / "store")
    for seed, key in enumerate(GROUPS):
        seal_group(store, key, seed)

    def start(*, core: bool = True, load: bool = True, **more: Any) -> Replica:
        replica = Replica(tmp_path / "store", core=core, **more)
        if load:
            replica("load", path=str(hf_folder(tied=True)), version=0)
        return replica

    return start


def test_a_repeated_micro_step_adds_nothing(make: Callable[..., Replica]) -> None:
    replica = make()
    first = replica.micro("m0", ("g0", 0), ("g1", 1))
    once = replica.gradients
    assert replica.micro("m0", ("g0", 0), ("g1", 1)) == first
    assert torch.equal(replica.gradients, once)
    assert once.abs().sum() > 0
    assert replica("status")["micro_steps"] == ["m0"]


def test_statistics_are_sums_over_samples_and_targets(make: Callable[..., Replica]) -> None:
    replica = make()
    one, two = replica.micro("a", ("g0", 0)), replica.micro("b", ("g1", 1))
    both = replica.micro("c", ("g0", 0), ("g1", 1))
    assert both["samples"] == 2
    assert both["target_tokens"] == one["target_tokens"] + two["target_tokens"]
    for name in ("logprob_gap_sum", "loss_sum", "ratio_sum", "clipped_sum", "targets"):
        total = one["stats"][name] + two["stats"][name]
        assert both["stats"][name] == pytest.approx(total, rel=1e-5)
    highest = max(one["stats"]["logprob_gap_max"], two["stats"]["logprob_gap_max"])
    assert both["stats"]["logprob_gap_max"] == pytest.approx(highest, rel=1e-5)


def test_staleness_counts_from_the_weights(make: Callable[..., Replica]) -> None:
    replica = make()
    assert replica.micro("m", ("g0", 0))["stats"]["staleness_max"] == 0
    replica("step", update=0, executions=1, learning_rate=RATE)
    stats = replica.micro("m", ("g0", 0), update=1)["stats"]
    assert (stats["staleness_max"], stats["staleness_sum"]) == (1, stats["targets"])


def branching_samples() -> list[Sample]:
    """Three trajectories of one execution: targets of the first are context in the others, and two
    of them go on differently from the same token."""
    random = np.random.default_rng(4)
    trunk = random.integers(0, VOCABULARY, 40)
    samples = []
    for kept, own, first in ((0, 40, 25), (40, 12, 40), (30, 20, 30)):
        ids = np.append(trunk[:kept], trunk if not kept else random.integers(0, VOCABULARY, own))
        targets = np.arange(len(ids)) >= first
        samples.append(
            Sample(
                execution_id="g-e0",
                kind=CallKind.MAIN,
                ids=ids.astype(np.int32),
                targets=targets,
                logprobs=np.where(targets, -4.5, 0).astype(np.float32),
                versions=np.where(targets, 0, -1).astype(np.int32),
                advantage=0.7,
                weight=1 / 3,
            )
        )
    return samples


def seal_samples(root: Path, key: str, samples: Sequence[Sample]) -> None:
    header = GroupHeader(
        query_id=key, step=0, problem_id="p", sealed_at=0.0, members=(), spread=True
    )
    seal(Store(root), key, SealedGroup(header, tuple(samples)))


def test_shared_prefixes_are_computed_once_and_change_no_gradient(
    make: Callable[..., Replica], tmp_path: Path
) -> None:
    """The loss of a sample is of its own targets: a ratio of the sequence, so that a token too many
    or too few would show."""
    samples = branching_samples()
    seal_samples(tmp_path / "store", "tree", samples)
    refs = [("tree", index) for index in range(len(samples))]
    flat, tree = make(), make(share_prefixes=True)
    apart, together = flat.micro("m", *refs), tree.micro("m", *refs)
    assert apart["tokens"] == sum(len(sample.ids) for sample in samples) == 142
    assert together["tokens"] == together["stats"]["computed_tokens_sum"] == 72
    for name in ("loss_sum", "ratio_sum", "logprob_gap_sum", "targets"):
        assert together["stats"][name] == pytest.approx(apart["stats"][name], rel=1e-5)
    assert (tree.gradients - flat.gradients).norm() < 1e-5 * flat.gradients.norm()
    listed = [{"group_key": "tree", "index": index} for index in range(len(samples))]
    gaps = [replica("logprobs", samples=listed) for replica in (flat, tree)]
    assert gaps[0]["tokens"] == gaps[1]["tokens"]
    assert gaps[0]["gap_mean"] == pytest.approx(gaps[1]["gap_mean"], rel=1e-5)


def test_values_beside_the_targets_influence_nothing(
    make: Callable[..., Replica], tmp_path: Path
) -> None:
    samples = branching_samples()
    changed = [
        replace(
            sample,
            logprobs=np.where(sample.targets, sample.logprobs, np.float32(-77)),
            versions=np.where(sample.targets, sample.versions, np.int32(9)),
        )
        for sample in samples
    ]
    for key, some in (("as-sealed", samples), ("changed", changed)):
        seal_samples(tmp_path / "store", key, some)
    found = []
    for key in ("as-sealed", "changed"):
        replica = make(share_prefixes=True)
        answer = replica.micro("m", *[(key, index) for index in range(len(samples))])
        found.append((answer["stats"], replica.gradients))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_scale_multiplies_a_sample(make: Callable[..., Replica]) -> None:
    replica = make()
    replica.micro("m", ("g0", 1))
    once = replica.gradients
    replica("discard")
    samples = [{"group_key": "g0", "index": 1, "scale": 3.0}]
    replica("micro_step", step=0, update=0, micro_step="m", samples=samples)
    assert (replica.gradients - 3 * once).norm() < 1e-5 * once.norm()


def test_a_step_divides_clips_and_raises_the_version(make: Callable[..., Replica]) -> None:
    plain, halved, clipped = make(), make(), make(clip_norm=1e-3)
    norms = []
    for replica, executions in ((plain, 1), (halved, 2), (clipped, 1)):
        replica.micro("m", ("g0", 0))
        answer = replica("step", update=0, executions=executions, learning_rate=RATE)
        assert (answer["version"], answer["skipped"]) == (1, False)
        assert replica.gradients.abs().sum() == 0
        norms.append(answer["grad_norm"])
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-5)
    assert norms[2] == pytest.approx(norms[0], rel=1e-5), "the norm is reported before clipping"


def test_a_lost_answer_of_a_step_is_given_again(make: Callable[..., Replica]) -> None:
    replica = make()
    answer = replica.train(0)
    weights = replica.weights
    again = replica("step", step=0, update=0, executions=4, learning_rate=RATE)
    assert again == answer == replica("status")["last_step"]
    assert torch.equal(replica.weights, weights)
    for other in ({"step": 0, "update": 1}, {"step": 1, "update": 0}):
        with pytest.raises(ReplicaError, match="no micro-steps"):
            replica("step", **other, executions=4, learning_rate=RATE)


def test_a_gradient_that_is_not_finite_is_skipped(make: Callable[..., Replica]) -> None:
    replica = make(loss="Infinite")
    before = replica.weights
    stats = replica.micro("m", ("g0", 0))["stats"]
    assert stats["not_finite"] == 1
    assert "loss_sum" not in stats, "JSON has no infinity"
    answer = replica("step", update=0, executions=1, learning_rate=RATE)
    assert answer == {"version": 0, "grad_norm": None, "skipped": True}
    assert torch.equal(replica.weights, before)
    assert replica("status")["micro_steps"] == []
    assert replica.gradients.abs().sum() == 0


def test_a_failing_objective_leaves_the_gradient(make: Callable[..., Replica]) -> None:
    replica = make(loss="Refusing")
    with pytest.raises(ZeroDivisionError):
        replica.micro("m", ("g0", 0))
    assert replica("status")["micro_steps"] == []
    assert replica.gradients.abs().sum() == 0


def test_a_backward_pass_that_dies_drops_the_whole_gradient(
    make: Callable[..., Replica],
) -> None:
    replica = make(loss="BrokenBelow")
    advantages = {
        (key, index): replica.commands._groups.sample(
            SampleRequest(group_key=key, index=index), context=256
        ).advantage
        for key in GROUPS
        for index in range(3)
    }
    good = next(ref for ref, advantage in advantages.items() if advantage > 0)
    bad = next(ref for ref, advantage in advantages.items() if advantage < 0)
    replica.micro("m0", good)
    with pytest.raises(ReplicaError, match="the gradient was dropped"):
        replica.micro("m1", good, bad)
    assert replica("status")["micro_steps"] == []
    assert replica.gradients.abs().sum() == 0
    replica.micro("m0", good)


def test_a_satellite_brings_exactly_what_it_did(make: Callable[..., Replica]) -> None:
    single, core, satellite = make(), make(), make(core=False)
    single.train(0)
    satellite("pull", **core("publish"))
    core.micro("m0", ("g0", 0), ("g0", 2))
    satellite.micro("m1", ("g1", 1), ("g2", 0))
    frozen = satellite("freeze", update=0)
    assert satellite("freeze", update=0) == frozen
    with pytest.raises(ReplicaError, match="frozen"):
        satellite.micro("m2", ("g1", 0))
    first = core("reduce", update=0, **frozen)
    assert first["bytes"] == core.gradients.nbytes
    assert core("reduce", update=0, **frozen)["bytes"] == 0, "again does nothing"
    satellite("release", update=0)
    satellite("release", update=0)
    assert satellite("status")["micro_steps"] == []
    assert core("status")["micro_steps"] == ["m0", "m1"]
    core("step", update=0, executions=4, learning_rate=RATE)
    assert torch.allclose(core.weights, single.weights, atol=1e-6, rtol=0)
    with pytest.raises(RuntimeError, match="not there any more"):
        core.commands._endpoint.read(_descriptor(frozen), limit_s=5)


def test_a_core_without_work_of_its_own_steps_for_a_satellite(make: Callable[..., Replica]) -> None:
    single, core, satellite = make(), make(), make(core=False)
    satellite("micro_step", **_work(step=7, update=2))
    core("reduce", update=2, **satellite("freeze", update=2))
    core("step", step=7, update=2, executions=1, learning_rate=RATE)
    single("micro_step", **_work(step=7, update=2))
    single("step", step=7, update=2, executions=1, learning_rate=RATE)
    assert torch.equal(core.weights, single.weights)


def test_gradients_of_other_weights_are_refused(make: Callable[..., Replica]) -> None:
    core, satellite = make(), make(core=False)
    satellite.micro("late", ("g1", 1))
    frozen = satellite("freeze", update=0)
    core.train(0)
    core.micro("m0", ("g0", 0), update=1)
    before = core.gradients
    with pytest.raises(ReplicaError, match="of version 0, the weights here are version 1"):
        core("reduce", update=1, **frozen)
    assert torch.equal(core.gradients, before)
    with pytest.raises(ReplicaError, match="release or discard it before a pull"):
        satellite("pull", **core("publish"))
    satellite("release", update=0)
    satellite("pull", **core("publish"))
    assert torch.equal(satellite.weights, core.weights)
    assert satellite("status")["version"] == 1


def test_a_corrupt_or_overlapping_gradient_is_refused(make: Callable[..., Replica]) -> None:
    core, satellite = make(), make(core=False)
    core.micro("m0", ("g0", 0))
    satellite.micro("m1", ("g1", 1))
    frozen = satellite("freeze", update=0)
    before = core.gradients
    satellite.commands._loaded()[1].block.payload[100] ^= 1
    with pytest.raises(RuntimeError, match="checksum"):
        core("reduce", update=0, **frozen)
    satellite.commands._loaded()[1].block.payload[100] ^= 1
    with pytest.raises(ReplicaError, match="in the gradient already"):
        core("reduce", update=0, **{**frozen, "micro_steps": ["m0", "m1"]})
    assert torch.equal(core.gradients, before)
    assert core("status")["micro_steps"] == ["m0"]
    core("reduce", update=0, **frozen)
    assert core("status")["micro_steps"] == ["m0", "m1"]


def test_updates_do_not_mix(make: Callable[..., Replica]) -> None:
    replica = make()
    replica.micro("m0", ("g0", 0))
    with pytest.raises(ReplicaError, match="gradient is of update 0 of step 0"):
        replica.micro("m1", ("g0", 0), update=1)
    with pytest.raises(ReplicaError, match="not of update 1"):
        replica("step", step=0, update=1, executions=1, learning_rate=RATE)
    replica("discard")
    replica.micro("m1", ("g0", 0), update=1)


def test_a_restored_replica_goes_on_bit_for_bit(
    make: Callable[..., Replica], tmp_path: Path
) -> None:
    replica = make()
    replica.train(0)
    replica.train(1)
    replica("save", path=str(tmp_path / "state"))
    last = replica.train(2)
    other = make(load=False)
    assert other("restore", path=str(tmp_path / "state")) == {"version": 2}
    assert other.train(2) == last
    assert torch.equal(other.weights, replica.weights)
    assert not list((tmp_path / "state").rglob("*.pt")) + list((tmp_path / "state").rglob("*.pkl"))


def test_a_damaged_state_changes_nothing(make: Callable[..., Replica], tmp_path: Path) -> None:
    replica = make()
    replica.train(0)
    replica("save", path=str(tmp_path / "state"))
    before = replica.weights
    (tmp_path / "state" / "state.safetensors").write_bytes(b"half")
    with pytest.raises(ReplicaError, match="can't be read"):
        replica("restore", path=str(tmp_path / "state"))
    assert torch.equal(replica.weights, before)
    assert replica("status")["last_step"]["version"] == 1


def test_load_starts_the_optimizer_again(
    make: Callable[..., Replica], hf_folder: Callable[..., Path]
) -> None:
    fresh, used = make(), make()
    used.train(0)
    used("load", path=str(hf_folder(tied=True)), version=0)
    fresh.train(0)
    used.train(0)
    assert torch.equal(fresh.weights, used.weights)
    with pytest.raises(ReplicaError, match="start a new replica"):
        used("load", path=str(hf_folder(tied=False)), version=0)


def test_an_export_is_the_policy_that_was_stepped(
    make: Callable[..., Replica], tmp_path: Path
) -> None:
    replica = make()
    replica.train(0)
    assert replica("export", path=str(tmp_path / "out")) == {"version": 1}
    other = make(load=False)
    other("load", path=str(tmp_path / "out"), version=1)
    assert torch.equal(other.weights, replica.weights)
    samples = [{"group_key": "g0", "index": index} for index in (0, 1, 2)]
    assert other("logprobs", samples=samples) == replica("logprobs", samples=samples)


def test_sleep_drops_the_gradient_and_wake_takes_work_again(make: Callable[..., Replica]) -> None:
    replica = make()
    replica.micro("m0", ("g0", 0))
    replica("sleep")
    assert replica("status")["micro_steps"] == []
    with pytest.raises(ReplicaError, match="asleep"):
        replica.micro("m0", ("g0", 0))
    replica("publish")
    replica("wake")
    replica.micro("m0", ("g0", 0))


@pytest.mark.parametrize(
    ("command", "args", "expected"),
    [
        ("fly", {}, "unknown command 'fly': one of load, micro_step"),
        ("load", {"path": "x"}, "version"),
        ("load", {"path": "/nowhere", "version": 0}, "/nowhere"),
        ("step", {"update": 0, "executions": 0, "learning_rate": 1e-3}, "executions"),
        ("freeze", {"update": 0}, "load one first"),
    ],
)
def test_bad_commands_are_refused_by_name(
    make: Callable[..., Replica], command: str, args: dict[str, Any], expected: str
) -> None:
    replica = make(load=False)
    with pytest.raises(ReplicaError, match=expected):
        replica(command, **args)
    assert replica("status")["state"] == "empty"


def test_satellites_do_not_step_and_samples_must_exist(make: Callable[..., Replica]) -> None:
    satellite = make(core=False)
    satellite.micro("m", ("g0", 0))
    for command, args in (
        ("step", {"update": 0, "executions": 1, "learning_rate": RATE}),
        ("publish", {}),
    ):
        with pytest.raises(ReplicaError, match="satellite"):
            satellite(command, **args)
    with pytest.raises(ReplicaError, match="g9"):
        satellite.micro("n", ("g9", 0))
    with pytest.raises(ReplicaError, match="the group has 3"):
        satellite.micro("n", ("g0", 3))


def _work(**key: int) -> dict[str, Any]:
    return {**key, "micro_step": "m", "samples": [{"group_key": "g0", "index": 0}]}


def _descriptor(frozen: dict[str, Any]) -> Any:
    from cells.transfer.block import Descriptor

    return Descriptor.model_validate(frozen["descriptor"])
