"""Rows of documents: nothing is lost, nothing is padded, positions restart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.replica.packing import in_rows, pack


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
    assert row.bounds.diff().tolist() == [len(ids) for ids, _ in documents]
    assert row.target_counts == tuple(int(targets.sum()) for _, targets in documents)
    assert row.labels.tolist() == [int(i) for ids, t in documents for i in ids[t]]
    assert (row.labels == row.ids[row.before + 1]).all()


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
