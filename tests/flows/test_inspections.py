"""gyre inspect and gyre samples show what was recorded and sealed."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from configs.load import load_config
from flows.cli import app
from storage.journal import Journal
from storage.layout import execution_id
from storage.records import CallKind, QueryPlan, Split, encode
from storage.run import Run, create_run
from tasks.sampling.group import build_group
from tasks.warm_start.policies import MANIFEST, remember_policy
from tests.tasks.sampling.executions import call
from tests.tasks.sampling.test_groups import result, scored

QUERY = QueryPlan(query_id="s00000-q0000", problem_id="p", split=Split.TRAIN, group_size=2)
NAMES = [execution_id(QUERY.query_id, member) for member in range(2)]
WORDS = ["system", "ask", "answer", "<b>&", "more", "summary"]


def calls(name: str) -> list[bytes]:
    first = call(0, new=(0, 1), output=(2, 3), execution=name)
    summary = call(
        1, first, kept=4, new=(4,), output=(5,), kind=CallKind.MAIN_SUMMARY, execution=name
    )
    helper = call(2, new=(0, 4), output=(2,), kind=CallKind.SUB_AGENT, execution=name)
    return [encode(one) for one in (first, summary, helper)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with one sealed group of two executions, and the tokenizer of its policy."""
    config = load_config("quickstart", ["trajectory.cap=1"], environment={})
    run = create_run(str(tmp_path), "seen", config)
    for name in NAMES:
        journal = Journal(run.store, run.layout.calls(name))
        journal.append(calls(name))
        journal.close()
    verdicts = {name: scored(name, reward) for name, reward in zip(NAMES, (0, 1), strict=True)}
    results = {name: result(name) for name in NAMES}
    build_group(run.store, run.layout, config, QUERY, 0, results, verdicts)
    words = WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="system")
    text = Tokenizer(words).to_str().encode()
    run.store.write("policies/words/tokenizer.json", text)
    run.store.write(f"policies/words/{MANIFEST}", b"{}")
    remember_policy(run, "policies/words")
    return run


def gyre(run: Run, *arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, [*arguments, "--root", run.store.url], env={"COLUMNS": "200"})
    assert found.exit_code == code, found.output
    return found.output


class Page(HTMLParser):
    """Tags that are open and what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "pre":
            self.texts.append(data)


def test_the_tree_says_what_is_trained_and_what_is_not(run: Run) -> None:
    output = gyre(run, "inspect", "seen", NAMES[1], "--text")
    assert "reward 1.000, advantage +1.0" in output
    assert "trained: 1 main-summary; 3 targets in 6 tokens" in output
    assert "beyond the cap: 1 sub-agent; 1 targets; too long: 0 targets" in output
    assert "2 main  call 0  main  version 0, 1  trained in 0" in output
    assert "1 sub-agent  call 2  main  version 1  dropped" in output
    assert "answer <b>&" in output


def test_the_page_needs_nothing_else_and_escapes_what_was_sampled(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    gyre(run, "inspect", "seen", NAMES[0], "--html", str(file))
    text = file.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == [] and page.links == []
    assert "answer <b>&" in page.texts
    assert "prefers-color-scheme: dark" in text and "<script" not in text


def test_samples_are_shown_with_their_mask(run: Run) -> None:
    output = gyre(run, "samples", "show", "seen", QUERY.query_id)
    assert NAMES[0] in output and "1 main-summary" in output and "1 sub-agent" in output
    output = gyre(run, "samples", "show", "seen", QUERY.query_id, "--index", "1")
    rows = [line.split() for line in output.splitlines()]
    assert ["0-1", "context", "system", "ask"] in rows
    assert ["2-2", "target", "0", "-0.001", "answer"] in rows
    assert ["4-4", "context", "more"] in rows


def test_what_is_not_there_is_named(run: Run) -> None:
    output = gyre(run, "inspect", "seen", "s00000-q0000-e009", code=2)
    assert f"there are: {NAMES[0]}" in output
    output = gyre(run, "samples", "show", "seen", "s00000-q0007", code=2)
    assert "there are: s00000-q0000" in output
    assert "has 2 samples" in gyre(
        run, "samples", "show", "seen", QUERY.query_id, "--index", "2", code=2
    )
