"""Samples and sealed groups: one object per group, written before its first micro-step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from storage.objects import MissingObjectError, Store
from storage.records import CallKind, GroupHeader, Record, RecordError, decode, encode

_CONTENTS_BYTES = 1 << 20


@dataclass(frozen=True)
class Sample:
    """A trajectory ready for training.

    Shapes: ``ids`` [tokens]; all others but the scalars are per token of ``ids`` too. Position 0
    is never a target.
    """

    execution_id: str
    kind: CallKind
    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    """Own targets: the token at this position was sampled and is trained here."""
    logprobs: npt.NDArray[np.float32]
    """Recorded behaviour log-probability at targets; 0 elsewhere."""
    versions: npt.NDArray[np.int32]
    """Weight version that sampled the token at targets; -1 elsewhere."""
    advantage: float
    weight: float
    """Share of its execution's loss; the weights of an execution sum to one."""

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """Of each token in its own context: a trajectory starts at 0 and has no gaps."""
        return np.arange(len(self.ids), dtype=np.int32)


@dataclass(frozen=True)
class SealedGroup:
    """Members, verdicts, advantages and samples of a query, fixed for ever."""

    header: GroupHeader
    samples: tuple[Sample, ...]


class _Row(Record):
    execution_id: str
    kind: CallKind
    start: int
    end: int
    advantage: float
    weight: float


class _Index(Record):
    header: GroupHeader
    rows: tuple[_Row, ...]
    digest: str = ""
    """Of the arrays beside it; empty in a group of an older version."""


def seal(store: Store, key: str, group: SealedGroup) -> SealedGroup:
    """Write a group unless it is sealed already, and return what is sealed now.

    Raises:
        ValueError: the arrays of a sample differ in length.
    """
    if store.write_once(key, _encode(group)):
        return group
    return read_group(store, key)


def read_group(store: Store, key: str) -> SealedGroup:
    """The group at ``key``.

    Raises:
        MissingObjectError: it is not sealed.
        RecordError: the object is damaged or of a format this version can't read.
    """
    data = store.read(key)
    try:
        arrays = load_tensors(data)
        index = decode(arrays.pop("index").tobytes(), _Index, where=key)
        rows = index.rows
        stored = min(len(arrays[name]) for name in ("ids", "targets", "logprobs", "versions"))
        if any(not 0 <= row.start <= row.end <= stored for row in rows):
            raise ValueError(f"its rows exceed the {stored} tokens stored")
        if index.digest and index.digest != _digest(arrays):
            raise ValueError("its checksum differs")
    except (SafetensorError, KeyError, ValueError) as error:
        raise RecordError(f"{key}: not a sealed group: {error}") from error
    samples = tuple(_sample(row, arrays) for row in rows)
    return SealedGroup(index.header, samples)


def read_header(store: Store, key: str) -> GroupHeader:
    """The header of the group at ``key``, without reading its samples.

    Raises:
        MissingObjectError: it is not sealed.
        RecordError: the object is damaged or of a format this version can't read.
    """
    if not store.exists(key):
        raise MissingObjectError(f"{key}: no such object")
    try:
        # safetensors: eight bytes with the length of a JSON table of contents, then the tensors.
        length = int.from_bytes(store.read_from(key, 0, 8), "little")
        contents = orjson.loads(store.read_from(key, 8, min(length, _CONTENTS_BYTES)))
        start, end = contents["index"]["data_offsets"]
        index = decode(store.read_from(key, 8 + length + start, end - start), _Index, where=key)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{key}: not a sealed group: {error}") from error
    return index.header


def _sample(row: _Row, arrays: dict[str, npt.NDArray[np.generic]]) -> Sample:
    cut = slice(row.start, row.end)

    def part(name: str, kind: type[np.generic]) -> npt.NDArray[np.generic]:
        piece = arrays[name][cut].astype(kind)
        piece.flags.writeable = False
        return piece

    return Sample(
        execution_id=row.execution_id,
        kind=row.kind,
        ids=part("ids", np.int32),  # type: ignore[arg-type]
        targets=part("targets", np.bool_),  # type: ignore[arg-type]
        logprobs=part("logprobs", np.float32),  # type: ignore[arg-type]
        versions=part("versions", np.int32),  # type: ignore[arg-type]
        advantage=row.advantage,
        weight=row.weight,
    )


def _encode(group: SealedGroup) -> bytes:
    rows: list[_Row] = []
    start = 0
    for sample in group.samples:
        end = start + len(sample.ids)
        for name in ("targets", "logprobs", "versions"):
            length = len(getattr(sample, name))
            if length != len(sample.ids):
                raise ValueError(
                    f"a sample of {sample.execution_id} has {len(sample.ids)} ids, but {length} "
                    f"{name}"
                )
        rows.append(
            _Row(
                execution_id=sample.execution_id,
                kind=sample.kind,
                start=start,
                end=end,
                advantage=sample.advantage,
                weight=sample.weight,
            )
        )
        start = end

    def joined(name: str, kind: type[np.generic]) -> npt.NDArray[np.generic]:
        parts = [getattr(sample, name).astype(kind) for sample in group.samples]
        return np.concatenate(parts) if parts else np.zeros(0, kind)

    arrays = {
        "ids": joined("ids", np.int32),
        "targets": joined("targets", np.bool_),
        "logprobs": joined("logprobs", np.float32),
        "versions": joined("versions", np.int32),
    }
    index = encode(_Index(header=group.header, rows=tuple(rows), digest=_digest(arrays)))
    return save_tensors({"index": np.frombuffer(index, np.uint8), **arrays})


def _digest(arrays: Mapping[str, npt.NDArray[np.generic]]) -> str:
    found = blake2b(digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(array.tobytes())
    return found.hexdigest()
