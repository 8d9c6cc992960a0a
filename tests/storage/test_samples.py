"""A sealed group is read back exactly, and is sealed once."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from storage.objects import MissingObjectError, Store
from storage.records import CallKind, GroupHeader, RecordError
from storage.samples import Sample, SealedGroup, read_group, read_header, seal

_ARRAYS = ("ids", "targets", "logprobs", "versions")


def _group(samples: list[Sample], sealed_at: float = 1.5) -> SealedGroup:
    header = GroupHeader(
        query_id="s00000-q0003",
        step=0,
        problem_id="specrepo-train-1-3",
        sealed_at=sealed_at,
        members=(),
        spread=False,
    )
    return SealedGroup(header, tuple(samples))


def _sample(length: int, seed: int = 0, **changes: object) -> Sample:
    random = np.random.default_rng(seed)
    values: dict[str, object] = {
        "execution_id": f"s00000-q0003-e{seed % 1000:03d}",
        "kind": CallKind.MAIN,
        "ids": random.integers(0, 2**31 - 1, length, dtype=np.int32),
        "targets": random.random(length) < 0.5,
        "logprobs": -random.random(length, dtype=np.float32),
        "versions": random.integers(-1, 40, length, dtype=np.int32),
        "advantage": float(random.normal()),
        "weight": 0.5,
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def _same(one: Sample, other: Sample) -> bool:
    scalars = ("execution_id", "kind", "advantage", "weight")
    return all(getattr(one, name) == getattr(other, name) for name in scalars) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in _ARRAYS
    )


_samples = st.lists(
    st.builds(
        _sample,
        length=st.integers(0, 50),
        seed=st.integers(0, 10_000),
        kind=st.sampled_from(CallKind),
        advantage=st.floats(allow_nan=False),
        weight=st.floats(0, 1),
    ),
    max_size=6,
)


@given(samples=_samples, sealed_at=st.floats(0, 4e9))
def test_groups_survive(samples: list[Sample], sealed_at: float) -> None:
    store = Store("memory://groups")
    group = _group(samples, sealed_at)
    store.delete("group")
    assert seal(store, "group", group) is group
    assert read_header(store, "group") == read_group(store, "group").header
    found = read_group(store, "group")
    assert found.header == group.header
    assert len(found.samples) == len(samples)
    assert all(map(_same, found.samples, samples))


def test_what_is_read_can_not_be_changed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    seal(store, "group", _group([_sample(4), _sample(3, 1)]))
    for sample in read_group(store, "group").samples:
        for name in _ARRAYS:
            with pytest.raises(ValueError, match="read-only"):
                getattr(sample, name)[0] = 1


def test_of_many_sealers_one_wins_and_all_learn_which(tmp_path: Path) -> None:
    store = Store(tmp_path)
    barrier = threading.Barrier(4)
    sealed: list[SealedGroup] = []

    def run(number: int) -> None:
        barrier.wait(20)
        sealed.append(seal(store, "group", _group([_sample(5, number)], float(number))))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len({group.header.sealed_at for group in sealed}) == 1
    assert read_group(store, "group").header.sealed_at == sealed[0].header.sealed_at


@pytest.mark.parametrize("name", ["targets", "logprobs", "versions"])
def test_arrays_of_unequal_length_are_refused(tmp_path: Path, name: str) -> None:
    short = _sample(5)
    wrong = _sample(5, **{name: getattr(short, name)[:4]})
    with pytest.raises(ValueError, match=f"has 5 ids, but 4 {name}"):
        seal(Store(tmp_path), "group", _group([wrong, short]))
    assert Store(tmp_path).keys("") == []


def test_a_damaged_group_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(MissingObjectError, match="group"):
        read_group(store, "group")
    seal(store, "group", _group([_sample(40)]))
    whole = store.read("group")
    other = save({"index": np.frombuffer(b"{}", np.uint8)})
    renamed = whole.replace(b"_Index", b"_Other")
    for damaged in (b"", whole[: len(whole) // 2], b"\0" * 64, other, renamed):
        store.write("group", damaged)
        with pytest.raises(RecordError, match=r"^group: "):
            read_group(store, "group")


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_bit_that_is_not_as_it_was_sealed_is_noticed(where: float, bit: int) -> None:
    store = Store("memory://one-bit")
    made = seal(store, "group", _group([_sample(7), _sample(9, 1)]))
    whole = bytearray(store.read("group"))
    whole[int(where * len(whole))] ^= 1 << bit
    store.write("damaged", bytes(whole))
    try:
        found = read_group(store, "damaged")
    except RecordError:
        return
    # Spaces of the table of contents, and the sign of its type of bytes, carry nothing.
    assert found.header == made.header
    assert all(_same(*pair) for pair in zip(found.samples, made.samples, strict=True))
