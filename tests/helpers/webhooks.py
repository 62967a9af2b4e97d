"""A receiver of messages about runs: a web server that remembers what it was sent."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """What was sent to it.

    ``answers``: the codes of its next answers, 200 after them. ``drip_s``: how long each byte of an answer takes.
    """

    def __init__(self, host: str, port: int) -> None:
        self.url = f"http://{host}:{port}/secret-token"
        self.answers: list[int] = []
        self.drip_s = 0.0
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The bodies, from JSON."""
        return [json.loads(body) for _, _, body in self.requests]

    @property
    def kinds(self) -> list[str]:
        """The kinds of the messages, in the order in which they came."""
        return [message["kind"] for message in self.messages]


@contextmanager
def webhook(host: str = "127.0.0.1") -> Iterator[Webhook]:
    """A server at an address of this machine while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            code = hook.answers.pop(0) if hook.answers else 200
            hook.requests.append((self.path, dict(self.headers), body))
            if hook.drip_s:
                with contextlib.suppress(OSError):
                    for byte in b"HTTP/1.1 200 OK\r\n" * 9:
                        self.wfile.write(bytes([byte]))
                        time.sleep(hook.drip_s)
                return
            self.send_response(code)
            if 300 <= code < 400:
                self.send_header("Location", hook.url + "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        hook = Webhook(host, server.server_port)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hook
        finally:
            server.shutdown()
            thread.join()
