"""What the documents promise of faults and threats has a test of that name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/faults.md", "docs/threats.md")
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page: str) -> None:
    named = _NAMED.findall((ROOT / page).read_text(encoding="utf-8"))
    assert named
    for path, test in named:
        assert (ROOT / path).is_file(), f"{page}: {path}"
        assert not test or test in names_in(ROOT / path), f"{page}: {path}::{test}"


@pytest.mark.parametrize("page", PAGES)
def test_every_row_of_a_table_names_a_test(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    rows = [
        line
        for line, before in zip(lines[1:], lines, strict=False)
        if line.startswith("| ") and before.startswith("|")
    ]
    assert rows
    for row in rows:
        assert _NAMED.search(row), f"{page}: {row}"
