"""The server of live pages: addresses, and who may read them.

It listens on this machine only, where other accounts can connect too, as can any page that the user's browser shows.
Hence every request needs the token, which is never compared character by character, and is moved from the address to a
cookie at once: addresses stay in histories and are shown to others. The name of the server in a request must be one of
this machine: the page of a stranger whose name suddenly means this machine is thus refused (DNS rebinding). Whatever is
refused gets the same answer, which says nothing about runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlencode, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from slurmtrain.errors import SlurmtrainError
from slurmtrain.plugins.report.pages import build_page
from slurmtrain.plugins.serve.live_pages import MANY, RUN, SWEEP, LivePages, PageSubject

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAMES = frozenset(("127.0.0.1", "localhost", "::1"))
_REFUSAL = "403 Forbidden: open the address that this server has printed; each server has a new token.\n"
# A browser that has lost the connection tries again after so many milliseconds.
_RETRY_MS = 2000
# How long answers may go on when the server ends, in seconds; pages that follow runs end at once.
_PATIENCE_S = 1
# Pages without facts of so many subjects are kept.
_FRAMES = 32
_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Guard:
    """Lets requests with the token pass, and refuses all others."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        """``app``: the application behind the guard. ``token``: the key."""
        self._app = app
        self._token = token.encode()
        # Browsers send a cookie to all ports of a name: another server's cookie must not replace this one's.
        self._cookie = f"slurmtrain-{secrets.token_hex(4)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI has it: its ``scope``, and how to ``receive`` and ``send`` messages."""
        if scope["type"] != "http":
            # There are no websockets, and no such request passes.
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._answer(Request(scope))
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """The answer to what may not pass; None: it may."""
        try:
            name = urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError:
            name = None
        site = request.headers.get("sec-fetch-site", "none")
        navigates = request.headers.get("sec-fetch-mode", "navigate") == "navigate"
        if name not in _NAMES or not (navigates or site in ("none", "same-origin")):
            return _refused()
        if self._fits(request.query_params.get("token")):
            return self._admitted(request, crosses=site == "cross-site")
        return None if self._fits(request.cookies.get(self._cookie)) else _refused()

    def _fits(self, token: str | None) -> bool:
        """Whether this is the token; takes the same time wherever it differs."""
        return hmac.compare_digest((token or "").encode(errors="replace"), self._token)

    def _admitted(self, request: Request, *, crosses: bool) -> Response:
        """Hands over the cookie, and leads to the same address without the token."""
        others = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        # What begins with two slashes would name another server.
        target = "/" + quote(request.scope["path"].lstrip("/")) + (f"?{urlencode(others)}" if others else "")
        answer: Response
        if crosses:
            # After a redirect from a link on another site, browsers withhold such a cookie; from our own page they
            # do not.
            answer = Response(headers={"refresh": f"0; url={target}"}, media_type="text/html")
        else:
            answer = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        answer.headers["cache-control"] = "no-store"
        answer.set_cookie(self._cookie, self._token.decode(), httponly=True, samesite="strict")
        return answer


def _refused() -> Response:
    return PlainTextResponse(_REFUSAL, HTTPStatus.FORBIDDEN, {"cache-control": "no-store"})


def _compressed_answer(request: Request, compressed: bytes, revision: str, media_type: str) -> Response:
    """Compressed content, unless the browser has this revision of it already."""
    headers = {"cache-control": "private, no-cache", "etag": f'"{revision}"', "vary": "accept-encoding"}
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(gzip.decompress(compressed), headers=headers, media_type=media_type)
    return Response(compressed, headers={**headers, "content-encoding": "gzip"}, media_type=media_type)


class Addresses:
    """What is at each address."""

    def __init__(self, pages: LivePages) -> None:
        """``pages``: the content."""
        self._pages = pages
        # Pages without facts, compressed, with their hashes: they differ by their subject only.
        self._frames: dict[PageSubject, tuple[bytes, str]] = {}

    def app(self) -> Starlette:
        """The application, which anybody may ask."""
        routes = [
            Route("/", self.page),
            *(Route(f"/{kind}/{{name}}", self.page) for kind in (RUN, SWEEP)),
            *(Route(f"/facts{end}", self.facts) for end in ("/{kind}", "/{kind}/{id}")),
            *(Route(f"/events{end}", self.events) for end in ("/{kind}", "/{kind}/{id}")),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={SlurmtrainError: _explain})

    async def page(self, request: Request) -> Response:
        """A page, which then fetches its facts and follows them."""
        name = request.path_params.get("name")
        subject = PageSubject(MANY) if name is None else await self._pages.find(name)
        address = "/" if subject.kind == MANY else f"/{subject.path}"
        if request.scope["path"] != unquote(address):
            return RedirectResponse(address, HTTPStatus.SEE_OTHER)
        if subject not in self._frames:
            facts = {"kind": subject.kind, "title": f"{subject.kind} {subject.id}" if subject.id else "runs"}
            page = build_page(facts, source=f"/facts/{subject.path}", links=f"/{RUN}/", scripts=("live.js",)).encode()
            while len(self._frames) >= _FRAMES:
                del self._frames[next(iter(self._frames))]
            self._frames[subject] = gzip.compress(page, 6, mtime=0), hashlib.sha256(page).hexdigest()
        # The page itself says what may be loaded and executed.
        answer = _compressed_answer(request, *self._frames[subject], "text/html")
        answer.headers["content-security-policy"] = "frame-ancestors 'none'"
        return answer

    async def facts(self, request: Request) -> Response:
        """The facts of a page."""
        content = await self._pages.facts(_subject(request))
        return _compressed_answer(request, content.compressed, content.revision, "application/json")

    async def events(self, request: Request) -> Response:
        """What is new about a page, as server-sent events."""
        subject = _subject(request)

        async def stream() -> AsyncIterator[str]:
            yield f"retry: {_RETRY_MS}\n\n"
            async with contextlib.aclosing(self._pages.follow(subject)) as news:
                async for each in news:
                    yield f"data: {json.dumps(each.to_json())}\n\n"

        return StreamingResponse(stream(), headers={"cache-control": "no-store"}, media_type="text/event-stream")

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        looks = asyncio.create_task(self._pages.run())
        yield
        looks.cancel()


def _subject(request: Request) -> PageSubject:
    """What facts and events at an address are about."""
    subject = PageSubject(**request.path_params)
    if (subject.kind == MANY) != (not subject.id) or subject.kind not in (MANY, RUN, SWEEP):
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return subject


async def _explain(request: Request, error: Exception) -> Response:
    """What is wrong, in a sentence."""
    if request.url.path.startswith("/facts/"):
        return JSONResponse({"problem": str(error)}, HTTPStatus.NOT_FOUND, {"cache-control": "no-store"})
    return PlainTextResponse(f"{error}\n", HTTPStatus.NOT_FOUND, {"cache-control": "no-store"})


class PageServer:
    """Serves pages in a thread, as long as it is entered."""

    def __init__(self, pages: LivePages, listener: socket.socket) -> None:
        """Not yet.

        Args:
            pages: What is served.
            listener: The socket where browsers connect, which stays the caller's.
        """
        self.token = secrets.token_urlsafe(32)
        """Who has it may read everything."""
        self._pages = pages
        app = Guard(Addresses(pages).app(), self.token)
        # Neither a line for each request, which may have the token, nor more than HTTP needs.
        config = uvicorn.Config(
            app, loop="asyncio", http="h11", ws="none", lifespan="on", log_config=None, log_level="error",
            access_log=False, proxy_headers=False, server_header=False, timeout_graceful_shutdown=_PATIENCE_S,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it goes on."""
        return self._thread.is_alive()

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        if self._loop is not None:
            # Otherwise the server would wait for open streams.
            with contextlib.suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(self._pages.close(), self._loop)
        self._thread.join()
        self._pages.stop()

    def _serve(self, listener: socket.socket) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[listener])

        asyncio.run(serve())
