"""How the scripted agent gets a function wrong, and how often.

A policy that is fitted to flawless demonstrations has nothing left to learn by reinforcement. The
wrong forms are plausible, so both lie within the policy's reach.
"""

from __future__ import annotations

import random

from tasks.problems.specrepo.specification import Function

_WRONG: dict[str, tuple[str, float]] = {
    "plus": ("x - {c}", 0.10),
    "minus": ("{c} - x", 0.30),
    "from": ("x - {c}", 0.60),
    "times": ("x + {c}", 0.10),
    "neg": ("x", 0.40),
    "sq": ("x * 2", 0.60),
    "mod": ("x // {c}", 0.60),
    "div": ("x / {c}", 0.60),
    "max": ("min(x, {c})", 0.65),
    "min": ("max(x, {c})", 0.40),
    "distance": ("x - {c}", 0.50),
    "even": ("x + {c} if x % 2 == 1 else x", 0.50),
    "negative": ("x if x < 0 else {c}", 0.40),
    "above": ("x * 2 if x < {c} else x", 0.50),
    "divides": ("1 if {c} % x == 0 else 0", 0.50),
    "sign": ("1 if x < 0 else 0", 0.40),
    "total": ("sum(xs)", 0.30),
    "largest": ("min(xs) if xs else {c}", 0.50),
    "count": ("len([x for x in xs if x < {c}])", 0.50),
    "each": ("[x + {c} for x in xs]", 0.40),
    "keep": ("[x for x in xs if x > {c}]", 0.50),
    "distinct": ("sorted(xs)", 0.60),
    "reverse": ("sorted(xs)", 0.50),
}
"""Operation to a wrong expression and the share of functions that get it."""


def written(function: Function, rng: random.Random, error_share: float) -> str:
    """Source of a function as the scripted agent writes it; right when ``error_share`` is 0."""
    wrong, share = _WRONG[function.operation.name]
    fails = rng.random() < share * error_share
    expression = wrong if fails else function.operation.expression
    return (
        f"def {function.name}({function.operation.argument}):\n"
        f"    return {expression.format(c=function.constant)}\n"
    )
