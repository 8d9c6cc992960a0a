"""The stand-ins refuse what they were not written for, and leave a GPU alone."""

from __future__ import annotations

import pytest
import torch

from cells.replica import cpu_support


def test_refused_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(cpu_support.CpuSupportError, match="a GPU is present"):
        cpu_support.install()


def test_imports_change_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device, torch.compile
    with cpu_support.megatron_imports():
        assert (torch.cuda.current_device, torch.compile) == before
    assert (torch.cuda.current_device, torch.compile) == before


def test_another_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_support, "version", lambda name: "0.17.2")
    with pytest.raises(cpu_support.CpuSupportError, match=r"megatron-core 0\.17\.2"):
        cpu_support.install()


def test_compile_is_back_after_the_imports() -> None:
    compile_ = torch.compile
    with cpu_support.megatron_imports():
        assert torch.compile(len)("abc") == 3
        assert torch.compile is not compile_
    assert torch.compile is compile_
