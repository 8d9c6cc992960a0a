from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tasks.rollout.stub_gateway import StubGateway


@pytest.fixture
def gateway() -> Iterator[StubGateway]:
    stub = StubGateway()
    yield stub
    stub.close()
