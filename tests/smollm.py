"""SmolLM2-135M-Instruct, a small real model, made once for all tests of a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tasks.rollout.harnesses.packages import default_cache

SCRIPT = Path(__file__).parents[1] / "scripts" / "smollm2.py"
LIMIT_S = 600


def make_smollm() -> Path:
    """HF directory of the model in fp32; downloaded and converted on first use."""
    target = default_cache().parent / "test-models" / "smollm2-135m"
    if not target.is_dir():
        made = target.with_name(".smollm2-135m.part")
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run([sys.executable, SCRIPT, made], check=True, timeout=LIMIT_S)
        made.rename(target)
    return target
