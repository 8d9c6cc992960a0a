"""Pictures of a run for documents: its report, light and dark, and its live table.

    python scripts/pictures.py RUN --root .gyre --out docs/images

Writes ``report-light.png``, ``report-dark.png`` and ``live.svg``. The live table is that of the
moment: call it while the run is under way. Needs Debian's Chromium.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from flows.live import panel
from flows.report import make_report
from flows.roots import absolute_root
from flows.watch import Watch
from storage.run import Run, open_run

WIDTH, COLUMNS = 1200, 100
LIMIT_S = 120
BROWSER = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--hide-scrollbars", "--virtual-time-budget=8000"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--root", default=".gyre")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--height", type=int, default=1500, help="of the report, in pixels")
    asked = parser.parse_args()
    run = open_run(absolute_root(asked.root), asked.run)
    asked.out.mkdir(parents=True, exist_ok=True)
    _live(run, asked.out / "live.svg")
    _report(run, asked.out, asked.height)


def _live(run: Run, file: Path) -> None:
    console = Console(record=True, width=COLUMNS, force_terminal=True)
    watch = Watch(run)
    watch.flow_run("Running", run.store.written_at(run.layout.identity))
    console.print(panel(watch.picture()))
    console.save_svg(str(file), title=f"gyre train {run.run_id}")


def _report(run: Run, out: Path, height: int) -> None:
    with tempfile.TemporaryDirectory(prefix="gyre-pictures-") as folder:
        page = Path(folder) / "report.html"
        page.write_text(make_report(run), encoding="utf-8")
        for theme in ("light", "dark"):
            picture = (out / f"report-{theme}.png").resolve()
            subprocess.run(
                [
                    *BROWSER,
                    f"--user-data-dir={folder}/{theme}",
                    f"--window-size={WIDTH},{height}",
                    f"--screenshot={picture}",
                    f"file://{page}?theme={theme}",
                ],
                check=True,
                timeout=LIMIT_S,
                stderr=subprocess.DEVNULL,
            )


if __name__ == "__main__":
    main()
