from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any], int], Any]


DRIP = object()
"""An answer that sends one byte at a time and never ends."""


KILLED = object()
"""A truncated answer, like that of an endpoint process which exits."""


class FakeEndpoint(ThreadingHTTPServer):
    """`answer(request, number)` returns the model's text, or bytes to send unchanged."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.answer: Answer = lambda request, number: "Final Answer: {}"
        self.models = ["fake"]
        self.tokens = 10
        self.status = 200
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeEndpoint

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": name} for name in self.server.models]}).encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({**request, "path": self.path})
        said = self.server.answer(request, len(self.server.asked))
        if said is DRIP:
            self._drip()
            return
        if said is KILLED:
            self.wfile.write(b'HTTP/1.0 200 OK\r\nContent-Length: 900\r\n\r\n{"choices": [')
            return
        message = {"choices": [{"message": {"content": said}}], "usage": {"total_tokens": self.server.tokens}}
        data = said if isinstance(said, bytes) else json.dumps(message).encode()
        self.send_response(self.server.status)
        self.end_headers()
        try:
            self.wfile.write(data)
        except OSError:
            pass

    def _drip(self) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.server.released.wait(0.05):
            try:
                self.wfile.write(b" ")
            except OSError:
                return

    def log_message(self, *args: Any) -> None:
        """Write no log line."""
