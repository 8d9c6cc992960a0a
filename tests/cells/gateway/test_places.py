"""Places on cells: who sits where when cells come, go and come back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from cells.gateway.routing import Cell, CellState, Places

NAMES = ("a", "b", "c")


def cell(name: str, *, capacity: int = 4, version: int = 0, state: str = "serving") -> Cell:
    return Cell(name, f"http://{name}", capacity, version, CellState(state))


@dataclass
class Sitting:
    """Executions that ask for places, some of which wait."""

    places: Places = field(default_factory=Places)
    waiting: dict[str, asyncio.Task[Cell]] = field(default_factory=dict)

    async def sit(self, holder: str, version: int = 0) -> None:
        self.waiting[holder] = asyncio.create_task(self.places.place(holder, version))
        await asyncio.sleep(0)

    def where(self, holder: str) -> str | None:
        found = self.places.held(holder)
        return found.name if found else None

    async def close(self) -> None:
        for task in self.waiting.values():
            task.cancel()
        await asyncio.gather(*self.waiting.values(), return_exceptions=True)


async def test_a_cell_that_comes_back_gets_its_share_at_the_next_calls() -> None:
    sitting = Sitting()
    places = sitting.places
    places.put(cell("a", capacity=8))
    for number in range(6):
        await sitting.sit(f"e{number}")
        places.note(f"e{number}", 100 * (number + 1))
    places.put(cell("b", capacity=8, state="leaving"))
    assert places.cells["b"].live == 0
    places.put(cell("b", capacity=8))
    assert places.cells["a"].live == 6, "nobody is interrupted for it"
    assert [sitting.where(f"e{number}") for number in range(6)] == [*"bbb", *"aaa"], (
        "the shortest contexts go"
    )
    assert (places.cells["a"].tokens, places.cells["b"].tokens) == (1500, 600)
    assert [sitting.where(f"e{number}") for number in range(6)] == [*"bbb", *"aaa"]
    await sitting.close()


async def test_who_waits_sits_down_before_anybody_moves() -> None:
    sitting = Sitting()
    places = sitting.places
    places.put(cell("a", capacity=2))
    for number in range(4):
        await sitting.sit(f"e{number}")
    assert (places.live(), places.waiting()) == (2, 2)
    places.put(cell("b", capacity=2))
    await asyncio.sleep(0)
    assert [sitting.where(f"e{number}") for number in range(4)] == [*"aabb"]
    await sitting.close()


async def test_who_lost_a_cell_waits_for_its_pages_and_nobody_overtakes() -> None:
    sitting = Sitting()
    places = sitting.places
    places.put(cell("a", capacity=2))
    for number in range(3):
        await sitting.sit(f"e{number}")
    left = places.put(cell("a", state="leaving"), settle=True)
    places.put(cell("b", capacity=2))
    await asyncio.sleep(0)
    assert [sitting.where(f"e{number}") for number in range(3)] == [None] * 3
    places.settled(left)
    assert [sitting.where(f"e{number}") for number in range(3)] == ["b", "b", None]
    places.put(cell("c", capacity=2))
    assert sitting.where("e2") == "c"
    await sitting.close()


async def test_nobody_moves_to_a_cell_with_other_weights_or_that_left_again() -> None:
    sitting = Sitting()
    places = sitting.places
    places.put(cell("a", capacity=8))
    for number in range(4):
        await sitting.sit(f"e{number}")
    places.put(cell("c", capacity=8, version=1))
    places.put(cell("b", capacity=8))
    places.put(cell("b", capacity=8, state="leaving"))
    assert {sitting.where(f"e{number}") for number in range(4)} == {"a"}
    await sitting.close()


@st.composite
def happenings(draw: st.DrawFn) -> list[tuple[str, ...]]:
    kinds = st.sampled_from(["sit", "call", "release", "serve", "leave", "remove", "avoid"])
    return [
        (draw(kinds), f"e{draw(st.integers(0, 7))}", draw(st.sampled_from(NAMES)))
        for _ in range(draw(st.integers(0, 60)))
    ]


@given(happenings(), st.integers(1, 4))
def test_counts_are_right_whatever_happens(happened: list[tuple[str, ...]], capacity: int) -> None:
    async def play() -> None:
        sitting = Sitting()
        places = sitting.places
        known: set[str] = set()
        for number, (kind, holder, name) in enumerate(happened):
            match kind:
                case "sit" if holder not in known:
                    known.add(holder)
                    await sitting.sit(holder)
                case "call" if places.held(holder):
                    places.note(holder, number)
                case "release":
                    known.discard(holder)
                    places.release(holder)
                    if task := sitting.waiting.pop(holder, None):
                        task.cancel()
                case "serve":
                    places.put(cell(name, capacity=capacity))
                case "leave":
                    places.put(cell(name, capacity=capacity, state="leaving"))
                case "remove":
                    places.remove(name)
                case "avoid" if (at := places.held(holder)) is not None:
                    places.avoid(holder, at)
            seated = [places.held(one) for one in sorted(known)]
            for one in places.cells.values():
                assert one.live == sum(at is one for at in seated) <= one.capacity
                assert one.tokens >= 0
                assert one.state is CellState.SERVING or not one.live
            assert places.live() + places.waiting() == len(known)
            room = any(
                one.state is CellState.SERVING and one.live < one.capacity
                for one in places.cells.values()
            )
            assert not (room and places.waiting()), "nobody waits beside an empty place"
        await sitting.close()

    asyncio.run(play())


async def test_newer_weights_serve_those_that_were_opened_so_and_older_ones_never() -> None:
    sitting = Sitting()
    places = sitting.places
    await sitting.sit("fixed", version=1)
    for holder in ("carried", "young"):
        version = 1 if holder == "carried" else 3
        sitting.waiting[holder] = asyncio.create_task(places.place(holder, version, newer=True))
    await asyncio.sleep(0)
    places.put(cell("a", capacity=8, version=2))
    assert [sitting.where(one) for one in ("fixed", "carried", "young")] == [None, "a", None]
    places.put(cell("a", capacity=8, version=3))
    assert [sitting.where(one) for one in ("fixed", "carried", "young")] == [None, "a", "a"]
    places.put(cell("b", capacity=8, version=1))
    assert sitting.where("fixed") == "b"
    await sitting.close()
