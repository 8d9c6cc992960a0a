"""The serving cell equals a plain integration of its rule, and keeps all work over aborts."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import simpy
from hypothesis import given, settings

from cells.simulation.serving import ServingCell
from cells.simulation.workload import ServingModel

MODEL = ServingModel(
    decode_tokens_per_s=10,
    half_concurrency=4,
    prefill_tokens_per_s=1000,
    kv_kept_on_reroute=0.5,
    nominal_requests=1,
)


def stepwise(arrivals: list[tuple[float, float]]) -> list[float]:
    """When each request ends, by going from event to event with explicit remaining work."""
    left: dict[int, float] = {}
    ends = [0.0] * len(arrivals)
    coming = sorted(range(len(arrivals)), key=lambda number: arrivals[number][0])
    now = 0.0
    while coming or left:
        speed = MODEL.speed(len(left)) if left else 0.0
        finish = now + min(left.values()) / speed if left else float("inf")
        arrival = arrivals[coming[0]][0] if coming else float("inf")
        until = min(finish, arrival)
        left = {number: work - (until - now) * speed for number, work in left.items()}
        now = until
        if arrival <= finish:
            number = coming.pop(0)
            left[number] = arrivals[number][1]
        for number in [n for n, work in left.items() if work <= 1e-6]:
            ends[number] = now
            del left[number]
    return ends


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(1, 300)), min_size=1, max_size=12))
def test_processor_sharing_equals_the_stepwise_reference(
    arrivals: list[tuple[float, float]],
) -> None:
    env = simpy.Environment()
    cell = ServingCell(env, MODEL)
    ends = [0.0] * len(arrivals)

    def client(number: int, at: float, work: float):
        yield env.timeout(at)
        yield cell.submit(work).done
        ends[number] = env.now

    for number, (at, work) in enumerate(arrivals):
        env.process(client(number, at, work))
    env.run()
    assert ends == pytest.approx(stepwise(arrivals), abs=1e-3)


def test_an_aborted_request_returns_what_is_left() -> None:
    env = simpy.Environment()
    cell = ServingCell(env, MODEL)
    first, second = cell.submit(100.0), cell.submit(100.0)
    env.run(until=5.0)
    cell.abort(first)
    cell.abort(first)
    env.run(until=first.done)
    assert first.done.value == pytest.approx(100.0 - 5.0 * MODEL.speed(2))
    env.run(until=second.done)
    rest = 100.0 - 5.0 * MODEL.speed(2)
    assert env.now == pytest.approx(5.0 + rest / MODEL.speed(1))


def test_a_request_alone_is_fastest_and_half_as_fast_at_half_concurrency() -> None:
    assert MODEL.speed(1) == 10
    assert MODEL.speed(5) == 5
    totals = [n * MODEL.speed(n) for n in range(1, 200)]
    assert totals == sorted(totals)
    assert totals[-1] < MODEL.half_concurrency * MODEL.decode_tokens_per_s * 1.02
