"""What the HTTP servers that stand in for others' have in common."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler


class AnsweringHandler(BaseHTTPRequestHandler):
    """A handler of HTTP 1.1 that logs nothing and answers in one call."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Sends a whole answer; an underscore in a header's name stands for a hyphen."""
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
