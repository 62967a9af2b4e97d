"""A proxy before a tracking server that is as slow, faulty or absent as a test wants it to be."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class TrackingProxy:
    """Forwards requests to an MLflow server; its fields may be changed at any time, and hold for later requests."""

    upstream: str
    host: str = "127.0.0.1"
    """The address on which it listens."""
    delay_s: float = 0.0
    """How long each request waits before it is forwarded."""
    status: int = 0
    """Answered to everything instead of forwarding; 0: requests are forwarded."""
    lose_answers_after: int | None = None
    """From so many batches on, batches are forwarded, but connections are closed instead of passing on the answer."""
    authorization: str = ""
    """The header of this name that each request must have; empty: none is needed."""
    refused_names: frozenset[str] = frozenset()
    """Batches with a metric of such a name are refused, as MLflow refuses a name that it does not take."""
    requests: Counter[str] = field(default_factory=Counter)
    """How many requests have come, by the last two parts of their paths, such as ``runs/log-batch``."""
    metrics: list[tuple[str, int, float]] = field(default_factory=list)
    """Metrics of all batches that the server has taken: name, step, value. Those that were sent twice stand twice."""
    port: int = 0
    _server: ThreadingHTTPServer | None = None
    _connections: set[socket.socket] = field(default_factory=set)

    @property
    def uri(self) -> str:
        """The tracking URI of the proxy."""
        return f"http://{self.host}:{self.port}"

    def listen(self) -> None:
        """Accept connections, on the same port as before."""
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer((self.host, self.port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def refuse_connections(self) -> None:
        """Behave like a machine on which no server runs."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            # Clients keep connections open for their next requests.
            for connection in self._connections.copy():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def tracking_proxy(upstream: str, host: str = "127.0.0.1") -> Iterator[TrackingProxy]:
    """A proxy at ``host`` before the server at the URI ``upstream``, which forwards everything at first."""
    proxy = TrackingProxy(upstream, host)
    proxy.listen()
    try:
        yield proxy
    finally:
        proxy.refuse_connections()


class _Handler(BaseHTTPRequestHandler):
    """Forwards one connection's requests."""

    proxy: TrackingProxy
    protocol_version = "HTTP/1.1"
    # One packet an answer: otherwise the second one waits 40 ms for the acknowledgement of the first.
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Note the connection."""
        super().setup()
        self.proxy._connections.add(self.connection)

    def finish(self) -> None:
        """Forget the connection."""
        self.proxy._connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def _forward(self) -> None:
        proxy = self.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        method = "/".join(urlsplit(self.path).path.rsplit("/", 2)[-2:])
        proxy.requests[method] += 1
        time.sleep(proxy.delay_s)
        batch = json.loads(body).get("metrics") or [] if method == "runs/log-batch" else []
        if proxy.authorization and self.headers.get("Authorization") != proxy.authorization:
            self._answer(401, {"error_code": "UNAUTHENTICATED", "message": "who are you?"})
        elif proxy.status:
            self._answer(proxy.status, {"error_code": "INTERNAL_ERROR", "message": "out of order"})
        elif refused := sorted(proxy.refused_names & {metric["key"] for metric in batch}):
            self._answer(400, {"error_code": "INVALID_PARAMETER_VALUE", "message": f"not the name {refused[0]!r}"})
        else:
            self._pass_on(body, batch)

    def _pass_on(self, body: bytes, batch: list[dict[str, Any]]) -> None:
        proxy = self.proxy
        connection = http.client.HTTPConnection(urlsplit(proxy.upstream).netloc, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        if answer.status == http.HTTPStatus.OK:
            proxy.metrics += [(metric["key"], metric["step"], metric["value"]) for metric in batch]
        if batch and proxy.lose_answers_after is not None:
            proxy.lose_answers_after -= 1
            if proxy.lose_answers_after < 0:
                self.close_connection = True
                self.connection.close()
                return
        self._send(answer.status, content, answer.getheader("Content-Type") or "application/json")

    def _answer(self, status: int, content: dict[str, str]) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _forward  # noqa: N815 (http.server looks for these names)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
