"""What a function of a specification may be asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

CONSTANTS = range(2, 20)

NUMBERS = (-7, 0, 5, 23, 40)
"""Arguments that a function of one number is checked with."""

LISTS: tuple[list[int], ...] = (
    [],
    [4],
    [5, -7, 5, 23],
    [40, 0, 12, 12, -3],
    list(range(-2, 25, 3)),
)
"""Arguments that a function of one list is checked with."""

_BUILTINS = {"abs": abs, "len": len, "max": max, "min": min, "set": set, "sorted": sorted,
             "sum": sum}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One behaviour: how a specification words it and what computes it.

    ``{c}`` in both texts stands for the function's constant.
    """

    name: str
    level: int
    words: str
    expression: str
    """The reference solution, a Python expression of ``argument``."""
    argument: str = "x"

    @property
    def takes_constant(self) -> bool:
        return "{c}" in self.words

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What the hidden test of a function calls it with."""
        return LISTS if self.argument == "xs" else NUMBERS

    def expected(self, constant: int) -> list[Any]:
        """The right value for each of ``inputs``."""
        code = _compiled(self.expression.format(c=constant))
        # A comprehension inside eval sees only globals, so the argument goes there.
        return [
            eval(code, {"__builtins__": _BUILTINS, self.argument: value}) for value in self.inputs
        ]


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<reference>", "eval")


_ALL = (
    Operation("plus", 1, "x plus {c}", "x + {c}"),
    Operation("minus", 1, "x minus {c}", "x - {c}"),
    Operation("from", 1, "{c} minus x", "{c} - x"),
    Operation("times", 1, "x times {c}", "x * {c}"),
    Operation("neg", 1, "minus x", "-x"),
    Operation("sq", 1, "x squared", "x * x"),
    Operation("mod", 1, "x modulo {c}", "x % {c}"),
    Operation("div", 1, "x divided by {c}, floored", "x // {c}"),
    Operation("max", 1, "larger of x and {c}", "max(x, {c})"),
    Operation("min", 1, "smaller of x and {c}", "min(x, {c})"),
    Operation("distance", 2, "distance of x and {c}", "abs(x - {c})"),
    Operation("even", 2, "x plus {c} if x is even, else x", "x + {c} if x % 2 == 0 else x"),
    Operation("negative", 2, "{c} if x is negative, else x", "{c} if x < 0 else x"),
    Operation("above", 2, "x times 2 if x is above {c}, else x", "x * 2 if x > {c} else x"),
    Operation("divides", 2, "1 if {c} divides x, else 0", "1 if x % {c} == 0 else 0"),
    Operation("sign", 2, "1 if x is positive, else 0", "1 if x > 0 else 0"),
    Operation("total", 3, "sum of xs plus {c}", "sum(xs) + {c}", "xs"),
    Operation("largest", 3, "largest of xs, {c} if empty", "max(xs) if xs else {c}", "xs"),
    Operation("count", 3, "how many of xs are above {c}", "len([x for x in xs if x > {c}])", "xs"),
    Operation("each", 3, "each of xs times {c}", "[x * {c} for x in xs]", "xs"),
    Operation("keep", 3, "those of xs below {c}", "[x for x in xs if x < {c}]", "xs"),
    Operation("distinct", 3, "xs sorted without repeats", "sorted(set(xs))", "xs"),
    Operation("reverse", 3, "xs backwards", "xs[::-1]", "xs"),
)
OPERATIONS = {operation.name: operation for operation in _ALL}


def operations_up_to(level: int) -> tuple[Operation, ...]:
    """Operations that a difficulty allows, in a fixed order."""
    return tuple(operation for operation in _ALL if operation.level <= level)
