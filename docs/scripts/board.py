"""Takes the pictures of docs/board.md with a headless Chromium: of the board, of the first run's report, and of the
site's first page if `make docs` has built it.

python docs/scripts/board.py runs/quickstart runs/t5-quickstart
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from shardzoo.cli.board.command import Board, make_server

PICTURES = Path(__file__).parents[1] / "pictures"
SITE = Path(__file__).parents[2] / "build" / "site" / "index.html"
VIEWS = {
    "board.png": ("", "1280,1040"),
    "board_shards.png": ("#layout-0", "1280,720"),
}  # file -> (address, window)


def main(runs: list[str]) -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None or not runs:
        print(
            "name the folders of runs; Chromium must be on PATH (Debian: apt-get install chromium)",
            file=sys.stderr,
        )
        return 2
    PICTURES.mkdir(exist_ok=True)
    with (
        make_server(Board(runs=tuple(map(Path, runs)), port=0)) as server,
        tempfile.TemporaryDirectory() as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        board = f"http://127.0.0.1:{server.server_address[1]}/"
        report = (Path(runs[0]) / "report.html").resolve().as_uri()
        pictures = {name: (board + view, window) for name, (view, window) in VIEWS.items()}
        pictures["report.png"] = report, "900,1190"
        if SITE.exists():
            pictures["site.png"] = SITE.as_uri(), "1280,1000"
        for name, (url, window) in pictures.items():
            options = [
                f"--screenshot={PICTURES / name}",
                f"--window-size={window}",
                f"--user-data-dir={profile}",
            ]
            settled = [
                "--virtual-time-budget=4000",
                "--hide-scrollbars",
                "--no-sandbox",
                "--disable-gpu",
            ]
            subprocess.run(
                [browser, "--headless", *options, *settled, url],
                check=True,
                capture_output=True,
                timeout=60,
            )
        server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
