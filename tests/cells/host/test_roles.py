"""The role of a cell as a state machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.host.roles import ALLOWED, HostRole, RoleMachine, WrongRoleError

ACTIONS = st.one_of(
    st.just(("started", None)),
    st.tuples(
        st.sampled_from(["begin", "finish"]),
        st.sampled_from([HostRole.ROLLOUT, HostRole.TRAINING]),
    ),
    st.tuples(st.sampled_from(["abandon", "fail"]), st.sampled_from(["late", "dead"])),
)


@given(st.lists(ACTIONS, max_size=30))
def test_every_path_stays_inside_the_table(actions: list[tuple[str, object]]) -> None:
    roles = RoleMachine()
    settled, finished = HostRole.STARTING, 0
    for name, argument in actions:
        before, detail = roles.role, roles.detail
        try:
            getattr(roles, name)(*([] if argument is None else [argument]))
        except WrongRoleError:
            assert (roles.role, roles.detail) == (before, detail), "a refusal changes nothing"
            continue
        assert roles.role is before or roles.role in ALLOWED[before]
        if name == "abandon":
            assert roles.role is settled, "a refused switch ends where it began"
        finished += name == "finish"
        assert len(roles.switches) == finished
        if before is HostRole.FAILED:
            assert (roles.role, roles.detail) == (HostRole.FAILED, detail), "the first reason stays"
        if roles.role in (HostRole.ROLLOUT, HostRole.TRAINING):
            settled = roles.role


def test_errors_name_role_and_reason() -> None:
    roles = RoleMachine()
    with pytest.raises(WrongRoleError, match=r"role starting can't go to switching.*are starting"):
        roles.begin(HostRole.TRAINING)
    roles.fail("SGLang ended with exit code 1")
    with pytest.raises(WrongRoleError, match=r"micro_step needs role training.*exit code 1"):
        roles.require(HostRole.TRAINING, "micro_step")
