"""Corpus files: what was written is read, what can't be fitted is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from cells.replica.corpus import CorpusError, read_corpus, write_corpus

IDS = st.integers(0, 999)
SEQUENCES = st.lists(st.lists(IDS, min_size=2, max_size=12), min_size=1, max_size=8)


@given(SEQUENCES, st.integers(0, 2**32 - 1))
def test_sequences_survive_in_order(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]], seed: int
) -> None:
    random = np.random.default_rng(seed)
    marks = [[False, *(random.random(len(ids) - 1) < 0.5)] for ids in sequences]
    for mark in marks:
        mark[-1] = True
    path = tmp_path_factory.mktemp("corpus") / "c.safetensors"
    assert write_corpus(path, zip(sequences, marks, strict=True)) == len(sequences)
    corpus = read_corpus(path, vocabulary=1000)
    assert len(corpus) == len(sequences)
    for index, (ids, mark) in enumerate(zip(sequences, marks, strict=True)):
        found = corpus.document(index + len(corpus))  # the file starts again at its end
        assert found[0].tolist() == ids
        assert found[1].tolist() == mark


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        ([], "no sequences"),
        ([([1, 2], [True, True])], "sequence 0 has a target at its first token"),
        ([([1, 2], [False, True]), ([3, 4], [False, False])], "sequence 1 has no target"),
        ([([1, 2], [False])], "2 ids and 1 target marks"),
        ([([1, -2], [False, True])], "negative"),
    ],
)
def test_unusable_sequences_are_refused(
    tmp_path: Path, sequences: list[tuple[list[int], list[bool]]], expected: str
) -> None:
    with pytest.raises(CorpusError, match=expected):
        write_corpus(tmp_path / "c.safetensors", sequences)
    assert not list(tmp_path.iterdir())


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    with pytest.raises(CorpusError, match="can't be read"):
        read_corpus(path)
    save_file({"ids": np.zeros(1, np.int32)}, path)
    with pytest.raises(CorpusError, match="not ids, targets and lengths"):
        read_corpus(path)
    write_corpus(path, [([1, 77], [False, True])])
    with pytest.raises(CorpusError, match="id 77 is outside a vocabulary of 77"):
        read_corpus(path, vocabulary=77)
