"""An s3 server that fails as it is told to."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

Start = Callable[[str, list[tuple[str, str]]], object]


class Failing:
    """moto's server behind one that fails the first ``failures`` tries of each request."""

    def __init__(self) -> None:
        self.root = ""
        self.failures = 0
        self.status = "503 Slow Down"
        self.code = "SlowDown"
        self.loses_answers = False
        """What fails has taken effect all the same."""
        self.tries: Counter[tuple[str, str]] = Counter()
        self._inner = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environment: dict[str, Any], start: Start) -> Iterable[bytes]:
        request = (environment["REQUEST_METHOD"], environment["PATH_INFO"])
        self.tries[request] += 1
        if self.tries[request] <= self.failures:
            if self.loses_answers:
                b"".join(self._inner(environment, lambda *_: None))
            else:
                environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            start(self.status, [("content-type", "application/xml")])
            return [f"<Error><Code>{self.code}</Code><Message>no</Message></Error>".encode()]
        return self._inner(environment, start)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    made = Failing()
    server = make_server("127.0.0.1", 0, made, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="failing")
    made.root = f"root-{secrets.token_hex(4)}"  # buckets outlive their server in this process
    yield made
    S3FileSystem.clear_instance_cache()
    server.shutdown()
    thread.join(20)
