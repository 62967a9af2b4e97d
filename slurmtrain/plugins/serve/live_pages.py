"""What live pages show: runs observed and facts built in one thread, once however many browsers show them.

Runs are looked at as long as anybody follows a page, and when one is opened. Facts are built again only if a run that
they are about has changed, and the more rarely the longer it takes, so that a large root does not keep a login node
busy.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from slurmtrain.errors import RunNotFound
from slurmtrain.ops.shared.find import choose_all
from slurmtrain.ops.shared.looking import Look, Looker
from slurmtrain.ops.shared.views import now_iso

if TYPE_CHECKING:
    from slurmtrain.config import Config
    from slurmtrain.ops.shared.workspace import Workspace
    from slurmtrain.registry.queries import IndexRow
    from slurmtrain.registry.rows import Listed

MANY, RUN, SWEEP = "many", "run", "sweep"
# A page is sent something at least so often, in seconds: ssh and firewalls close connections that say nothing.
_KEEP_ALIVE_S = 15.0
# Building the facts of a page takes at most this share of the time, and looking at runs this: a login node has others.
_SHARE, _LOOKING_SHARE = 0.1, 0.2
# No rest from looking is longer, in seconds: reading thousands of runs takes long the first time only.
_LONGEST_REST_S = 30.0
# Facts of so many pages are kept.
_KEPT = 32
# How long a look or facts may go on when the server ends, in seconds.
_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class PageSubject:
    """What a page is about: ``kind`` many, run or sweep, and the ``id`` of a run or sweep."""

    kind: str
    id: str = ""

    @property
    def path(self) -> str:
        """The end of its addresses. The id of a sweep is whatever a journal says."""
        return f"{self.kind}/{quote(self.id, safe='')}" if self.id else self.kind


@dataclass(frozen=True, slots=True)
class Content:
    """Something to send, compressed. ``revision``: names this state of it. ``at``, ``seconds``: when, and how long."""

    revision: str
    compressed: bytes
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PageNews:
    """What a page is told: the ``revision`` of its facts, when runs were looked at last, and what failed then."""

    revision: str
    as_of: str
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The data of an event."""
        return {"revision": self.revision, "as_of": self.as_of, "problems": self.problems}


class _ReaderThread(threading.Thread):
    """Executes one call after the other: a registry is not shared between threads.

    It is a daemon: whoever ends the server does not wait for a call that waits for Slurm or a file system.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    async def ask(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # noqa: BLE001 (raised where it was asked)
                    future.set_exception(error)

    def stop(self) -> None:
        self._calls.put(None)
        self.join(_PATIENCE_S)


class LivePages:
    """The facts of all pages, and what is new about them.

    Its coroutines are for one event loop.
    """

    def __init__(self, config: Config, interval_s: float, patience_s: float | None = None) -> None:
        """Nothing has been looked at.

        Args:
            config: The runs root.
            interval_s: Seconds between two looks at all runs.
            patience_s: How long Slurm may take to answer; None: as long as needed.
        """
        self._interval_s = interval_s
        self._counter = itertools.count(1)
        # Without it, a page of an earlier server could take its own state for the present one.
        self._prefix = secrets.token_hex(4)
        # For each run, when it last changed, as a number that grows; and the runs that come from it, or it from them.
        self._look: Look[int] = Look()
        self._relatives: dict[str, set[str]] = {}
        self._next_at = -float("inf")
        self._as_of = ""
        self._looker: Looker[int] | None = None
        self._config, self._patience_s = config, patience_s
        self._reader = _ReaderThread()
        self._contents: OrderedDict[PageSubject, Content] = OrderedDict()
        self._lock, self._news, self._followed = asyncio.Lock(), asyncio.Condition(), asyncio.Event()
        self._followers = 0
        self._is_over = False
        self.looks = 0
        """How often all runs were looked at."""
        self.builds = 0
        """How often facts were built."""

    async def run(self) -> None:
        """Look at all runs again and again while anybody follows a page."""
        self._reader.start()
        # The first look may have thousands of runs to read: nobody need wait for it twice.
        self._followed.set()
        while not self._is_over:
            await self._followed.wait()
            await self._look_again()
            if not self._followers:
                self._followed.clear()
            await asyncio.sleep(max(0.0, self._next_at - time.monotonic()))

    async def close(self) -> None:
        """End: open pages get no more events."""
        self._is_over = True
        async with self._news:
            self._news.notify_all()

    def stop(self) -> None:
        """End the thread that reads."""
        self._reader.stop()

    async def find(self, name: str) -> PageSubject:
        """The run or the sweep of this name or id. Raises RunNotFound."""
        await self._look_again()
        if name in self._look.runs:
            return PageSubject(RUN, name)
        subject: PageSubject = await self._reader.ask(lambda: self._choose(name))
        return subject

    async def facts(self, subject: PageSubject) -> Content:
        """The facts of a page as JSON. Raises RunNotFound, UserError."""
        await self._look_again()
        content: Content = await self._reader.ask(lambda: self._build(subject))
        return content

    async def follow(self, subject: PageSubject) -> AsyncGenerator[PageNews, None]:
        """What is new about a page: at once, after each change, and now and then."""
        self._followers += 1
        self._followed.set()
        try:
            sent, sent_at = None, 0.0
            while not self._is_over:
                looks = self.looks
                news = PageNews(self._revision(subject), self._as_of, self._look.problems)
                is_new = sent is None or (news.revision, news.problems) != (sent.revision, sent.problems)
                if looks and (is_new or time.monotonic() - sent_at >= _KEEP_ALIVE_S):
                    sent, sent_at = news, time.monotonic()
                    yield news
                if not await self._next_look(looks):
                    # It takes long: the connection is to stay.
                    sent_at = 0.0
        finally:
            self._followers -= 1

    async def _next_look(self, looks: int) -> bool:
        """Wait until there were more looks than this; False: that takes long."""
        try:
            async with asyncio.timeout(_KEEP_ALIVE_S), self._news:
                await self._news.wait_for(lambda: self._is_over or self.looks != looks)
        except TimeoutError:
            return False
        return True

    async def _look_again(self) -> None:
        """Look at all runs, unless that was done a moment ago."""
        async with self._lock:
            if time.monotonic() < self._next_at:
                return
            self._look, seconds = await self._reader.ask(self._look_now)
            self._next_at = time.monotonic() + max(self._interval_s, min(seconds / _LOOKING_SHARE, _LONGEST_REST_S))
            self._as_of = now_iso()
            self.looks += 1
        async with self._news:
            self._news.notify_all()

    def _look_now(self) -> tuple[Look[int], float]:
        """All runs, and how long that took."""
        began = time.monotonic()
        # Made here, in the thread that looks with it.
        self._looker = self._looker or Looker(self._config, self._note_change, self._patience_s)
        return self._looker.look(), time.monotonic() - began

    def _note_change(self, _workspace: Workspace, listed: Listed, _index: IndexRow) -> int:
        for parent in listed.parents:
            origin = str(parent.get("run"))
            self._relatives.setdefault(origin, set()).add(listed.id)
            self._relatives.setdefault(listed.id, set()).add(origin)
        return next(self._counter)

    def _family(self, run_id: str) -> set[str]:
        """A run, and all that it comes from or starts after, and the reverse, in turn: its page shows their states."""
        family, unseen = {run_id}, [run_id]
        while unseen:
            # A copy, made at once: the thread that reads may add some.
            new = set(self._relatives.get(unseen.pop(), ())) - family
            family |= new
            unseen += new
        return family

    def _choose(self, name: str) -> PageSubject:
        """What a name means."""
        assert self._looker is not None
        if self._look.observed is None:
            raise RunNotFound(f"there is no run {name!r}, as far as is known: {'; '.join(self._look.problems)}")
        ids = choose_all(self._looker.workspace, self._look.observed.runs, [name])
        sweeps = {self._look.index[run_id].sweep for run_id in ids}
        if len(ids) > 1 and len(sweeps) == 1 and (sweep := sweeps.pop()) is not None:
            return PageSubject(SWEEP, sweep)
        return PageSubject(RUN, ids[-1])

    def _revision(self, subject: PageSubject) -> str:
        """Names the state of a page's facts: of those that were built, unless it is time to build them again."""
        look, content = self._look, self._contents.get(subject)
        if content is not None and time.monotonic() - content.at < content.seconds / _SHARE:
            return content.revision
        chosen = look.runs
        if subject.kind == RUN:
            family = self._family(subject.id)
            chosen = {run_id: look.runs[run_id] for run_id in family if run_id in look.runs}
        elif subject.kind == SWEEP:
            chosen = {run_id: state for run_id, state in look.runs.items() if look.index[run_id].sweep == subject.id}
        # The number of runs changes when one is deleted.
        return f"{self._prefix}-{max(chosen.values(), default=0)}-{len(chosen)}"

    def _build(self, subject: PageSubject) -> Content:
        """The facts of a page, as far as they are new."""
        from slurmtrain.plugins.report.pages import facts_text

        revision, content = self._revision(subject), self._contents.get(subject)
        if content is None or content.revision != revision:
            began = time.monotonic()
            text = facts_text({**self._facts(subject), "revision": revision})
            compressed = gzip.compress(text.encode(), compresslevel=5, mtime=0)
            content = Content(revision, compressed, time.monotonic(), time.monotonic() - began)
            self._contents[subject] = content
            self.builds += 1
        self._contents.move_to_end(subject)
        while len(self._contents) > _KEPT:
            self._contents.popitem(last=False)
        return content

    def _facts(self, subject: PageSubject) -> dict[str, Any]:
        from slurmtrain.ops.query.select import Question
        from slurmtrain.plugins.report.many_facts import many_facts
        from slurmtrain.plugins.report.run_facts import run_facts
        from slurmtrain.plugins.report.sweep_facts import sweep_facts

        assert self._looker is not None
        workspace, observed = self._looker.workspace, self._look.observed
        if observed is None:
            raise RunNotFound(f"the runs cannot be read: {'; '.join(self._look.problems)}")
        if subject.kind == RUN:
            return run_facts(workspace, observed, subject.id)
        if subject.kind == SWEEP:
            if not any(row.sweep == subject.id for row in self._look.index.values()):
                raise RunNotFound(f"there is no run of sweep {subject.id!r} any more")
            return sweep_facts(workspace, observed, subject.id)
        return many_facts(workspace, observed, Question(for_programs=True))
