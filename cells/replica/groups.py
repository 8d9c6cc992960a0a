"""Samples by reference, from storage, with the last groups kept."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from pydantic import Field

from cells.replica.corpus import Document
from cells.replica.errors import ReplicaError
from configs.field import Section
from storage.objects import MissingObjectError, Store
from storage.records import RecordError
from storage.samples import Sample, SealedGroup, read_group


class SampleRequest(Section):
    """A sample to train, as a command names it."""

    group_key: str = Field(min_length=1, max_length=4096)
    index: int = Field(ge=0)
    scale: float = 1.0
    """Multiplies the sample's own weight."""


class GroupCache:
    """The most recently used sealed groups."""

    def __init__(self, store: Store, most: int) -> None:
        self._store = store
        self._most = most
        self._groups: OrderedDict[str, SealedGroup] = OrderedDict()

    def sample(self, request: SampleRequest, context: int) -> Sample:
        """The sample, checked.

        Raises:
            ReplicaError: no such group or index, no targets, or more than ``context`` tokens.
        """
        samples = self._group(request.group_key).samples
        where = f"{request.group_key}, sample {request.index}"
        if request.index >= len(samples):
            raise ReplicaError(f"{where}: the group has {len(samples)}")
        sample = samples[request.index]
        if not sample.targets.any():
            raise ReplicaError(f"{where}: no targets")
        if len(sample.ids) > context:
            raise ReplicaError(f"{where}: {len(sample.ids)} tokens, the policy takes {context}")
        return sample

    def _group(self, key: str) -> SealedGroup:
        group = self._groups.get(key)
        if group is None:
            try:
                group = read_group(self._store, key)
            except (MissingObjectError, RecordError) as error:
                raise ReplicaError(str(error)) from error
            self._groups[key] = group
            if len(self._groups) > self._most:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return group


def document(sample: Sample) -> Document:
    """Ids and target marks of a sample."""
    return np.asarray(sample.ids), np.asarray(sample.targets)
