"""Training: replicas against HF transformers, two cells against one, streaming against waiting.

    python -m tests.benchmarks.training [--parts speed,cells,tail] [--shapes quickstart,small]
        [--cases unpacked,short,...] [--turns 3]

Prints one JSON object. The workloads and their seeds are in ``training_speed.py`` and
``training_streams.py``; all of their cases are printed, also those that lose.

``tokens_per_s_over_hf``: tokens of samples per CPU second of a replica's micro-steps over those of
HF transformers with the same weights, samples and loss, in one process, by turns. ``unpacked`` has
one sample a micro-step; ``packed`` has many short ones in a row, against the better of HF with each
sample by itself and HF with padded batches. ``padding_share``: of the tokens that are computed for
the short samples, those that are padding. ``two_cells_over_one`` and
``tail_s_streamed_over_waiting`` are of real replica processes under the product's stream.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

AIMS = {
    "tokens_per_s_over_hf_unpacked": 0.9,
    "tokens_per_s_over_hf_packed": 1.1,
}
"""At least."""


def main() -> None:
    """Measure the parts that are asked for."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.training")
    parser.add_argument("--parts", default="speed,cells,tail")
    parser.add_argument("--shapes", default="quickstart,small")
    parser.add_argument("--cases", default="")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    result: dict[str, Any] = {}
    parts = given.parts.split(",")
    if "speed" in parts:
        from tests.benchmarks.training_speed import WORKLOADS, speed

        cases = given.cases.split(",") if given.cases else list(WORKLOADS)
        found = speed(given.turns, given.shapes.split(","), cases)
        result |= _headlines(found) | {"speed": found}
    if "cells" in parts or "tail" in parts:
        from tests.benchmarks.training_streams import Streams

        with Streams() as streams:
            if "cells" in parts:
                result |= streams.two_cells(given.turns)
            if "tail" in parts:
                result |= streams.tail(given.turns)
    print(json.dumps(result))


def _headlines(found: dict[str, Any]) -> dict[str, Any]:
    """The figures that have an aim, by shape."""
    titles = {"unpacked": "unpacked", "packed": "short"}
    shown = {
        name: {
            shape: cases[case]["tokens_per_s_over_hf"]
            for shape, cases in found.items()
            if case in cases
        }
        for name, case in titles.items()
    }
    return {
        "tokens_per_s_over_hf": shown,
        "aims": AIMS,
        "padding_share": {
            shape: cases["short"]["padding_share"]
            for shape, cases in found.items()
            if "short" in cases
        },
    }


if __name__ == "__main__":
    main()
