"""What may go: never what somebody works on, never more than the limits ask for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from storage.retention import (
    GRACE_S,
    Limits,
    Part,
    Plan,
    Remains,
    StoredPolicy,
    StoredRun,
    make_plan,
)

NOW = 1e9
DAY = 86_400.0


def run(name: str, days: float, **changed: object) -> StoredRun:
    values: dict[str, object] = {
        "run_id": name,
        "changed_at": NOW - days * DAY,
        "finished": True,
        "in_use": "",
        "size": 100,
        "workspaces": 30,
        "checkpoints": 40,
        "policy": "policies/a",
    }
    return StoredRun(**(values | changed))  # type: ignore[arg-type]


def removed(plan: Plan) -> list[tuple[Part, str]]:
    return [(removal.part, removal.name) for removal in plan.removals]


RUNS = [run("old", 9), run("middle", 5), run("new", 1)]
POLICIES = [StoredPolicy("policies/a", NOW - 9 * DAY, 10), StoredPolicy("policies/b", 0, 10)]


def test_nothing_is_asked_nothing_goes() -> None:
    plan = make_plan(RUNS, POLICIES, [], Limits(), NOW)
    assert (plan.removals, plan.left, plan.over) == ((), 320, 0)


def test_the_newest_runs_are_kept() -> None:
    plan = make_plan(RUNS, POLICIES, [], Limits(keep_runs=2), NOW)
    assert removed(plan) == [(Part.RUN, "old")]
    plan = make_plan(RUNS, POLICIES, [], Limits(keep_runs=0), NOW)
    assert {name for _, name in removed(plan)} == {"old", "middle", "new"}


def test_age_spares_what_a_count_would_take() -> None:
    plan = make_plan(RUNS, POLICIES, [], Limits(keep_runs=1, older_than_s=7 * DAY), NOW)
    assert removed(plan) == [(Part.RUN, "old")]
    plan = make_plan(RUNS, POLICIES, [], Limits(older_than_s=2 * DAY), NOW)
    assert removed(plan) == [(Part.RUN, "old"), (Part.RUN, "middle")]


def test_a_quota_takes_workspaces_then_checkpoints_then_runs_then_policies() -> None:
    def under(most: int) -> list[tuple[Part, str]]:
        return removed(make_plan(RUNS, POLICIES, [], Limits(keep_runs=3, most_bytes=most), NOW))

    assert under(320) == []
    assert under(300) == [(Part.WORKSPACES, "old")]
    assert under(230) == [(Part.WORKSPACES, name) for name in ("old", "middle", "new")]
    assert under(200)[3:] == [(Part.CHECKPOINTS, "old")]
    assert under(0)[6:] == [(Part.POLICY, "policies/b")]
    plan = make_plan(RUNS, POLICIES, [], Limits(most_bytes=100), NOW)
    assert removed(plan) == [
        (Part.WORKSPACES, "middle"),
        (Part.WORKSPACES, "new"),
        (Part.CHECKPOINTS, "middle"),
        (Part.CHECKPOINTS, "new"),
        (Part.RUN, "old"),
    ], "what goes whole is named once"
    assert (plan.left, plan.over) == (80, 0)


def test_an_unfinished_run_keeps_what_it_needs_to_go_on() -> None:
    plan = make_plan([run("broken", 9, finished=False)], [], [], Limits(1, None, 10), NOW)
    assert (removed(plan), plan.over) == ([], 90)


def test_policies_of_unknown_use_stay() -> None:
    runs = [run("first", 9, policy=None)]
    plan = make_plan(runs, POLICIES, [], Limits(keep_runs=1, most_bytes=0), NOW)
    assert Part.POLICY not in {part for part, _ in removed(plan)}


_ages = st.floats(0, 30)
_runs = st.lists(
    st.builds(
        lambda number, days, finished, in_use, a, b, c, policy: run(
            f"run-{number}",
            days,
            finished=finished,
            in_use="somebody" if in_use else "",
            size=a + b + c,
            workspaces=a,
            checkpoints=b,
            policy=policy,
        ),
        st.integers(0, 10**6),
        _ages,
        st.booleans(),
        st.booleans(),
        st.integers(0, 50),
        st.integers(0, 50),
        st.integers(0, 50),
        st.sampled_from(["policies/a", "policies/b", "policies/c", None]),
    ),
    max_size=8,
    unique_by=lambda found: found.run_id,
)
_policies = st.lists(
    st.builds(
        lambda name, days, size: StoredPolicy(f"policies/{name}", NOW - days * DAY, size),
        st.sampled_from("abcd"),
        _ages,
        st.integers(0, 50),
    ),
    unique_by=lambda found: found.key,
)
_remains = st.lists(
    st.builds(
        lambda n, days, size: Remains(f"runs/half-{n}", NOW - days * DAY, size),
        st.integers(0, 99),
        _ages,
        st.integers(0, 9),
    ),
    max_size=3,
    unique_by=lambda found: found.prefix,
)
_limits = st.builds(
    Limits,
    st.none() | st.integers(0, 9),
    st.none() | st.floats(0, 30 * DAY),
    st.none() | st.integers(0, 500),
)


@given(runs=_runs, policies=_policies, remains=_remains, limits=_limits)
def test_any_plan_spares_what_is_in_use_and_counts_right(
    runs: list[StoredRun],
    policies: list[StoredPolicy],
    remains: list[Remains],
    limits: Limits,
) -> None:
    plan = make_plan(runs, policies, remains, limits, NOW)
    by_name = {found.run_id: found for found in runs}
    touched = {removal.name for removal in plan.removals}
    whole = {removal.name for removal in plan.removals if removal.part is Part.RUN}
    newest = sorted(runs, key=lambda found: (found.changed_at, found.run_id))
    for name in touched & set(by_name):
        assert not by_name[name].in_use
        assert by_name[name].changed_at < NOW - GRACE_S
        assert by_name[name].finished or name in whole
    if limits.keep_runs:
        assert not whole & {found.run_id for found in newest[-limits.keep_runs :]}
    staying = [found for found in runs if found.run_id not in whole]
    assert not touched & {found.policy for found in staying}
    total = sum(found.size for found in (*runs, *policies, *remains))
    assert plan.left == total - sum(removal.size for removal in plan.removals) >= 0
    assert len({(removal.part, removal.name) for removal in plan.removals}) == len(plan.removals)
    if limits.most_bytes is None:
        assert plan.over == 0
    else:
        assert plan.over == max(0, plan.left - limits.most_bytes)
        if plan.over:
            free = [f for f in staying if not f.in_use and f.changed_at < NOW - GRACE_S]
            kept = {f.run_id for f in newest[-limits.keep_runs :]} if limits.keep_runs else set()
            cut = {removal.name for removal in plan.removals}
            assert not [found for found in free if found.run_id not in kept | cut and found.size], (
                "more could have gone"
            )
