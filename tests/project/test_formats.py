"""Every record and file that outlives a process tells its format; others are refused by name."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import orjson
import pytest

from configs.load import ConfigError
from storage.errors import StorageError
from storage.objects import Store
from storage.records import Record, RecordError, Upgrade, decode, encode
from storage.root import MARK, StorageRoot, check_root, mark_root
from storage.run import create_run, open_run
from tests.conftest import make_run

ROOT = Path(__file__).parents[2]
LAYERS = ("storage", "cells", "tasks", "flows")
_CLASS = re.compile(r"^class (\w+)\((?:\w+, )*Record\):", re.MULTILINE)


def _record_classes() -> dict[str, type[Record]]:
    """Every record class of the product, by module and name."""
    found: dict[str, type[Record]] = {}
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            for name in _CLASS.findall(path.read_text(encoding="utf-8")):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found[f"{module}:{name}"] = getattr(importlib.import_module(module), name)
    return found


RECORDS = _record_classes()


def test_the_records_were_found() -> None:
    assert len(RECORDS) >= 24
    assert "storage.records:Call" in RECORDS and "cells.daemon:Registration" in RECORDS


def test_no_two_records_have_one_name() -> None:
    names = [kind.__name__ for kind in RECORDS.values()]
    assert len(set(names)) == len(names), "what is stored tells only the name"


@pytest.mark.parametrize("where", RECORDS)
def test_every_record_tells_its_format(where: str) -> None:
    kind = RECORDS[where]
    body = orjson.loads(encode(kind.model_construct()))
    assert (body["record"], body["format"]) == (kind.__name__, kind.FORMAT)
    assert not {"record", "format"} & set(kind.model_fields)
    assert set(kind.OLDER) <= set(range(1, kind.FORMAT))


@pytest.mark.parametrize("where", RECORDS)
def test_a_newer_record_is_refused_with_both_formats(where: str) -> None:
    kind = RECORDS[where]
    body = orjson.loads(encode(kind.model_construct())) | {"format": kind.FORMAT + 1}
    text = f"key: {kind.__name__} of format {kind.FORMAT + 1}, this version reads {kind.FORMAT}"
    with pytest.raises(RecordError, match=f"{text}: a newer Gyre wrote it"):
        decode(orjson.dumps(body), kind, where="key")


def _named(body: dict[str, Any]) -> dict[str, Any]:
    return {"seconds": body["minutes"] * 60}


def _whole(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"whole": True}


class _Third(Record):
    FORMAT: ClassVar[int] = 4
    OLDER: ClassVar[dict[int, Upgrade]] = {2: _named, 3: _whole}

    seconds: int
    whole: bool


def test_an_older_record_is_brought_to_this_format() -> None:
    now = _Third(seconds=120, whole=True)
    for stored in ({"format": 2, "minutes": 2}, {"format": 3, "seconds": 120}):
        assert decode(json.dumps({"record": "_Third", **stored}).encode(), _Third) == now
    assert decode(encode(now), _Third) == now


@pytest.mark.parametrize(
    ("version", "text"),
    [(1, "an older Gyre wrote it"), (0, "damaged"), (True, "damaged"), ("2", "damaged")],
)
def test_a_format_that_can_not_be_read(version: object, text: str) -> None:
    data = json.dumps({"record": "_Third", "format": version, "minutes": 1}).encode()
    with pytest.raises(RecordError, match=f"format {version}, this version reads 4: .*{text}"):
        decode(data, _Third)


def test_a_root_tells_its_format(tmp_path: Path) -> None:
    store = Store(tmp_path)
    check_root(store)
    assert store.keys("") == [], "looking leaves nothing"
    mark_root(store)
    mark_root(store)
    assert store.read_record(MARK, StorageRoot).made_at > 0
    store.write(MARK, store.read(MARK).replace(b'"format":1', b'"format":3'))
    for use in (check_root, mark_root):
        with pytest.raises(StorageError, match=r"StorageRoot of format 3, .* reads 1.*--root"):
            use(store)


def test_a_run_tells_its_format_and_one_without_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    text = run.store.read(run.layout.config)
    assert text.startswith(b"# gyre run, format 1\n")
    key = run.layout.config
    run.store.write(key, text.split(b"\n", 1)[1])
    open_run.cache_clear()
    assert open_run(str(tmp_path), run.run_id).config == run.config
    run.store.write(key, text.replace(b"format 1", b"format 2", 1))
    open_run.cache_clear()
    with pytest.raises(ConfigError, match="a run of format 2, this version reads 1"):
        open_run(str(tmp_path), run.run_id)


def test_a_run_of_a_newer_root_is_neither_made_nor_opened(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.store.write(MARK, run.store.read(MARK).replace(b'"format":1', b'"format":2'))
    open_run.cache_clear()
    with pytest.raises(StorageError, match="format 2"):
        open_run(str(tmp_path), run.run_id)
    with pytest.raises(StorageError, match="format 2"):
        create_run(str(tmp_path), "another", run.config)
    assert run.store.children("runs") == [run.run_id]
