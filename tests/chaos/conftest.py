"""What the tests of other folders made for a gateway, here too."""

from __future__ import annotations

from tests.cells.gateway.conftest import (
    bench,
    codec,
    engine,
    gateway_process,
    make_bench,
    other,
    say,
    script,
    tokenizer,
)
from tests.chaos.failing_store import failing
from tests.flows.conftest import orchestrated

__all__ = [
    "bench",
    "codec",
    "engine",
    "failing",
    "gateway_process",
    "make_bench",
    "orchestrated",
    "other",
    "say",
    "script",
    "tokenizer",
]
