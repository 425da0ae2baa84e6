"""A package index on this machine, which pip reads like any other."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Logs nothing."""


@contextlib.contextmanager
def local_index(distributions: Path, folder: Path) -> Iterator[str]:
    """Serves a simple index (PEP 503) of the files in a folder while the context lasts, and yields its address.

    Args:
        folder: An empty folder, for the index.
    """
    for file in (*distributions.glob("*.whl"), *distributions.glob("*.tar.gz")):
        project = folder / "simple" / file.name.partition("-")[0].lower().replace("_", "-")
        project.mkdir(parents=True, exist_ok=True)
        (project / file.name).symlink_to(file.resolve())
    for project in (folder / "simple").iterdir():
        links = "".join(
            f'<a href="{file.name}">{file.name}</a><br>' for file in sorted(project.iterdir())
        )
        (project / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
        server.shutdown()
