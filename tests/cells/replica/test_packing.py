"""Rows of documents: nothing is lost, nothing is padded, a shared prefix is there once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.replica.packing import in_rows, pack
from cells.replica.prefixes import shared_prefix, sort_key


@given(st.lists(st.integers(1, 50)), st.integers(1, 80))
def test_rows_keep_order_and_size(lengths: list[int], most: int) -> None:
    rows = in_rows(list(enumerate(lengths)), lengths, most)
    assert [item for row in rows for item in row] == list(enumerate(lengths))
    for row in rows:
        assert len(row) == 1 or sum(length for _, length in row) <= most


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
def test_a_row_holds_every_document_and_target(marks: list[list[bool]]) -> None:
    documents = []
    for index, mark in enumerate(marks):
        targets = np.array([False, *mark[1:]])
        documents.append((np.arange(len(mark), dtype=np.int32) + 100 * index, targets))
    row = pack(documents)
    assert row.ids.tolist() == [int(i) for ids, _ in documents for i in ids]
    assert row.positions.tolist() == [p for ids, _ in documents for p in range(len(ids))]
    assert row.chains.bounds.diff().tolist() == [len(ids) for ids, _ in documents]
    assert not row.chains.shared
    assert row.target_counts == tuple(int(targets.sum()) for _, targets in documents)
    assert row.labels.tolist() == [int(i) for ids, t in documents for i in ids[t]]
    assert (row.labels == row.ids[row.before + 1]).all()


@st.composite
def branching(draw: st.DrawFn) -> list[tuple[np.ndarray, np.ndarray]]:
    """Documents that begin like others, or like nothing, or are equal to others."""
    documents: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(draw(st.integers(1, 8))):
        start = draw(st.sampled_from(documents))[0] if documents and draw(st.booleans()) else []
        kept = list(start[: draw(st.integers(0, len(start)))])
        ids = kept + draw(st.lists(st.integers(0, 3), min_size=0 if kept else 1, max_size=20))
        marks = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        documents.append((np.array(ids, np.int32), np.array([False, *marks[1:]])))
    return documents


@given(branching())
def test_a_shared_row_holds_each_prefix_once_and_every_path_whole(documents: list) -> None:
    row = pack(documents, share=True)
    bounds = row.chains.bounds.tolist()
    chain_of = {}
    paths = []
    for number, context in enumerate(row.chains.contexts):
        own = list(range(bounds[number], bounds[number + 1]))
        paths.append([*context.tolist(), *own])
        chain_of.update(dict.fromkeys(own, number))
    done = 0
    for (ids, targets), count in zip(documents, row.target_counts, strict=True):
        before, labels = row.before[done : done + count], row.labels[done : done + count]
        done += count
        assert labels.tolist() == ids[targets].tolist()
        for place, position in zip(before.tolist(), np.flatnonzero(targets), strict=True):
            path = paths[chain_of[place]]
            path = path[: path.index(place) + 1]
            assert row.ids[path].tolist() == ids[:position].tolist()
            assert row.positions[path].tolist() == list(range(position))
    order = sorted((ids for ids, _ in documents), key=sort_key)
    saved = sum(shared_prefix(a, b) for a, b in pairwise(order))
    assert len(row.ids) == sum(len(ids) for ids in order) - saved


@given(branching())
def test_what_sees_what_is_the_same_in_both_forms(documents: list) -> None:
    """The chains that a CPU goes by, and the ends that a GPU's mask is made of."""
    chains = pack(documents, share=True).chains
    total = int(chains.bounds[-1])
    expected = np.zeros((total, total), np.bool_)
    for number, context in enumerate(chains.contexts):
        for query in range(int(chains.bounds[number]), int(chains.bounds[number + 1])):
            expected[query, context.numpy()] = True
            expected[query, int(chains.bounds[number]) : query + 1] = True
    query, key = np.arange(total)[:, None], np.arange(total)[None]
    assert ((key <= query) & (query < chains.ends.numpy()[key]) == expected).all()


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=6))
def test_keys_sort_like_ids(rows: list[list[int]]) -> None:
    by_key = sorted(rows, key=lambda ids: sort_key(np.array(ids, np.int32)))
    assert by_key == sorted(rows)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([], "at least one"),
        ([([1, 2], [True, False])], "first token"),
        ([([1, 2], [False])], "2 ids and 1 target marks"),
        ([([], [])], "0 ids"),
    ],
)
def test_unusable_documents_are_refused(
    documents: list[tuple[list[int], list[bool]]], expected: str
) -> None:
    made = [(np.array(ids, np.int32), np.array(marks, np.bool_)) for ids, marks in documents]
    with pytest.raises(ValueError, match=expected):
        pack(made)
