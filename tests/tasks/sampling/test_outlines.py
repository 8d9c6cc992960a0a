"""An outline shows every segment once, and what became of every sampled token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from configs.training import TrajectoryConfig
from storage.records import CallKind, CallStatus
from tasks.sampling.outline import Role, outline
from tasks.sampling.selection import select
from tasks.sampling.tree import build_tree
from tests.tasks.sampling.executions import call, executions

LONG = 1000


def outlined(calls, config, context=LONG):
    tree = build_tree(calls)
    selection = select(tree, config, context)
    return tree, selection, outline(tree, selection, config, context)


@settings(max_examples=40)
@given(executions(), st.none() | st.integers(1, 4), st.sampled_from([LONG, 12, 6]))
def test_the_roles_of_all_tokens_add_up_to_the_selection(calls, cap, context):
    tree, selection, lines = outlined(calls, TrajectoryConfig(cap=cap), context)
    assert sorted((line.start, line.ids.tolist()) for line in lines) == sorted(
        (segment.start, segment.ids.tolist()) for segment in tree.segments
    )
    counts = dict.fromkeys(Role, 0)
    for line in lines:
        counts[line.role] += len(line.ids)
        assert (line.placed is None) == (line.role is Role.CONTEXT)
    assert counts[Role.TARGET] == selection.target_tokens
    assert counts[Role.DROPPED] == selection.dropped_tokens
    assert counts[Role.CUT] == selection.cut_tokens
    for number, trajectory in enumerate(selection.trajectories):
        own = sum(len(line.ids) for line in lines if line.trajectory == number)
        assert own == trajectory.target_tokens


def test_a_branch_is_whole_before_the_next_one():
    first = call(0, new=(1, 2), output=(3, 4))
    edited = call(1, first, kept=2, new=(9,), output=(7,))
    later = call(2, first, kept=4, new=(5,), output=(6,), status=CallStatus.ABANDONED)
    other = call(3, new=(8,), output=(8, 8), kind=CallKind.BACKGROUND)
    _, _, lines = outlined([first, edited, later, other], TrajectoryConfig(cap=1))
    assert [(line.depth, line.ids.tolist(), line.role) for line in lines] == [
        (0, [1, 2], Role.CONTEXT),
        (1, [3, 4], Role.TARGET),
        (2, [5], Role.CONTEXT),
        (2, [6], Role.ABANDONED),
        (1, [9], Role.CONTEXT),
        (2, [7], Role.DROPPED),
        (0, [8], Role.CONTEXT),
        (1, [8, 8], Role.BACKGROUND),
    ]
    assert lines[1].versions == (0, 1)
