"""Which calls of a run did not extend their agent's last, and why, from what was recorded:
``python -m cells.gateway.forks --root R --run ID`` prints it as JSON."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from storage.journal import read_journal
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import Call, decode


@dataclass(frozen=True)
class ForkReport:
    """Calls of a run by how they go on."""

    calls: int
    first: int
    """First calls of their agents: there was nothing to extend."""
    continued: int
    """Their prompts begin with all ids of the call before."""
    forks: dict[str, int]
    """The others, by reason."""
    unexplained: tuple[str, ...]
    """Calls that neither extend anything, nor are a first one, nor have a reason: none, ever."""

    @property
    def continued_share(self) -> float:
        """Of the calls that had something to extend."""
        later = self.calls - self.first
        return self.continued / later if later else 1.0


def report_forks(executions: Iterable[list[Call]]) -> ForkReport:
    """Count the calls of executions, each given in the order in which they were recorded."""
    total = first = continued = 0
    forks: Counter[str] = Counter()
    unexplained: list[str] = []
    for calls in executions:
        ends = {
            call.call_id: call.kept + len(call.new_ids) + len(call.output_ids) for call in calls
        }
        answered: set[str] = set()
        for call in sorted(calls, key=lambda one: one.index):
            total += 1
            if call.fork_reason is not None:
                forks[call.fork_reason.split(":")[0]] += 1
            elif call.parent is not None and call.kept == ends[call.parent]:
                continued += 1
            elif call.parent is None and call.agent not in answered:
                first += 1
            else:
                unexplained.append(call.call_id)
            if call.finish_reason in ("stop", "length", "tool_calls"):
                answered.add(call.agent)
    return ForkReport(total, first, continued, dict(forks), tuple(unexplained))


def read_executions(store: Store, layout: RunLayout) -> Iterable[list[Call]]:
    """The recorded calls of each execution of a run."""
    for name in store.children(f"{layout.prefix}/executions"):
        prefix = layout.calls(name)
        yield [decode(line, Call, prefix) for line in read_journal(store, prefix)]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, help="storage root")
    parser.add_argument("--run", required=True, help="run id")
    arguments = parser.parse_args()
    report = report_forks(read_executions(Store(arguments.root), RunLayout(arguments.run)))
    print(json.dumps(asdict(report) | {"continued_share": report.continued_share}))


if __name__ == "__main__":
    main()
