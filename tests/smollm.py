"""SmolLM2-135M-Instruct, a small real model, made once for all tests of a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tasks.rollout.harnesses.packages import default_cache

SCRIPT = Path(__file__).parents[1] / "scripts" / "smollm2.py"
LIMIT_S = 1800
FIT_STEPS = "8"


def make_smollm() -> Path:
    """HF directory of the model in fp32; downloaded and converted on first use."""
    return _made("smollm2-135m")


def make_fitted_smollm() -> Path:
    """The same, fitted to tool calls as the preset ``smollm2`` wants it: minutes on first use."""
    return _made("smollm2-135m-fitted", "--model", str(make_smollm()), "--fit", FIT_STEPS)


def _made(name: str, *arguments: str) -> Path:
    target = default_cache().parent / "test-models" / name
    if not target.is_dir():
        made = target.with_name(f".{name}.part")
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run([sys.executable, SCRIPT, made, *arguments], check=True, timeout=LIMIT_S)
        made.rename(target)
    return target
