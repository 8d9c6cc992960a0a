"""Every problem of HumanEval. Takes minutes."""

from __future__ import annotations

import pytest

from configs.problems import ProblemsConfig
from tasks.problems.humaneval import FILE, HumanEval, tasks
from tests.tasks.problems.folders import evaluated


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(3600)
def test_every_canonical_solution_passes_and_no_empty_workspace() -> None:
    source = HumanEval(ProblemsConfig(source="humaneval"))
    passed = {
        name: (
            evaluated(
                source, source.load(name), {FILE: task.prompt + task.canonical_solution}
            ).passed,
            evaluated(source, source.load(name), {}).passed,
        )
        for name, task in tasks().items()
    }
    assert passed == dict.fromkeys(tasks(), (1, 0))
    assert len(passed) == 164
