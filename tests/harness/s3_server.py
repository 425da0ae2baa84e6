"""An S3 server on this machine, which counts what it sends, and can fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BUCKET = "models"


@dataclass
class S3Server:
    """What a test sees of the server.

    Attributes:
        address: Its URL.
        sent: Bytes of the bodies of all answers, by the path of the object.
        variables: The environment of its clients.
        on_request: Is called at the beginning of each request.
        refuse: Is asked about each request (method, path); if it returns True, the server fails.
        respond: Is asked next, and may return the status of a failure, such as "503 Slow Down".
    """

    address: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    refuse: Callable[[str, str], bool] = lambda method, path: False
    on_request: Callable[[], None] = lambda: None
    respond: Callable[[str, str], str | None] | None = None

    @property
    def variables(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def total(self, ending: str = "") -> int:
        return sum(count for path, count in self.sent.items() if path.endswith(ending))


@contextmanager
def serve() -> Iterator[S3Server]:
    """Runs moto's server in a thread, with one bucket."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    found = S3Server()
    moto = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        found.on_request()
        if found.refuse(environ["REQUEST_METHOD"], path):
            start_response("403 Forbidden", [("Content-Length", "0")])
            return []
        status = found.respond(environ["REQUEST_METHOD"], path) if found.respond else None
        if status is not None:
            code = "".join(status.split()[1:])
            text = f"<Error><Code>{code}</Code><Message>Reduce your request rate.</Message></Error>"
            start_response(status, [("Content-Length", str(len(text)))])
            return [text.encode()]
        body = list(moto(environ, start_response))
        with lock:
            found.sent[path] = found.sent.get(path, 0) + sum(map(len, body))
        return body

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *arguments: object) -> None:
            pass

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    found.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
