"""Run functions that may hang without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

_T = TypeVar("_T")


async def in_background(function: Callable[..., _T], *args: object) -> _T:
    """Run a function in its own daemon thread, and return its result or raise its exception.

    asyncio.to_thread will not do: the threads of its pool are joined when the loop ends, and again when the interpreter
    exits, so a thread that hangs, for example on a filesystem whose server is down, would keep the agent from acting on
    a signal.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(future.set_result, function(*args))
        except BaseException as error:  # noqa: BLE001 (re-raised where the result is awaited)
            settle = partial(future.set_exception, error)
        # A RuntimeError means that the loop has ended and nothing awaits the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    threading.Thread(target=run, name=f"background-{getattr(function, '__name__', '')}", daemon=True).start()
    return await future
