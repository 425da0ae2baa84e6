"""What `huggingface_hub.HfFileSystem` asks of the Hub, answered by a server on this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from local_server import AnsweringHandler

COMMIT = "1" * 40


@dataclass
class HubFiles:
    """What a test sees of the server.

    Attributes:
        address: Its URL.
        repositories: "models/me/tiny" -> name -> contents, in the revision `main`.
        sent: Bytes that were sent, by name.
    """

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)


@contextmanager
def serve() -> Iterator[HubFiles]:
    found = HubFiles()

    class Handler(AnsweringHandler):
        def answer_json(self, value: Any) -> None:
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            file = re.fullmatch(r"/(?:(datasets)/)?(me/\w+)/resolve/([^/]+)/(.*)", path)
            if file is not None:
                self.send_file(f"{file[1] or 'models'}/{file[2]}", file[3], file[4])
                return
            api = re.fullmatch(
                r"/api/(models|datasets)/(me/\w+)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?",
                path,
            )
            files = found.repositories.get(f"{api[1]}/{api[2]}") if api else None
            if api is None or files is None:
                self.answer(404, b"{}", X_Error_Code="RepoNotFound")
            elif (api[4] or "main") not in ("main", COMMIT):
                self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            elif api[3] in (None, "revision"):
                self.answer_json({"id": api[2], "sha": COMMIT, "siblings": []})
            elif api[3] == "paths-info":
                length = int(self.headers["Content-Length"])
                asked = parse_qs(self.rfile.read(length).decode())["paths"]
                self.answer_json([describe(name, files[name]) for name in asked if name in files])
            else:
                self.list_folder(files, api[5])

        do_HEAD = do_POST = do_GET

        def list_folder(self, files: dict[str, bytes], folder: str) -> None:
            prefix = f"{folder}/" if folder else ""
            is_recursive = "recursive=true" in self.path.lower()
            entries: dict[str, dict[str, Any]] = {}
            for name, data in files.items():
                if not name.startswith(prefix):
                    continue
                parts = name.removeprefix(prefix).split("/")
                for depth in range(1, len(parts) if is_recursive else min(2, len(parts))):
                    inner = prefix + "/".join(parts[:depth])
                    entries[inner] = {"type": "directory", "path": inner, "size": 0, "oid": "0"}
                if is_recursive or len(parts) == 1:
                    entries[name] = describe(name, data)
            if entries:
                self.answer_json(list(entries.values()))
            else:
                self.answer(404, b"{}", X_Error_Code="EntryNotFound")

        def send_file(self, repository: str, revision: str, name: str) -> None:
            data = found.repositories.get(repository, {}).get(name)
            if data is None or revision not in ("main", COMMIT):
                self.answer(404, b"{}", X_Error_Code="EntryNotFound")
                return
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept_Ranges": "bytes"}
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            status = 200
            if asked is not None:
                status = 206
                first = int(asked[1])
                last = min(int(asked[2] or len(data)), len(data) - 1)
                headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
                data = data[first : last + 1]
            if self.command != "HEAD":
                found.sent[name] = found.sent.get(name, 0) + len(data)
            self.answer(status, data, X_Repo_Commit=COMMIT, **headers)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def describe(name: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": digest}
