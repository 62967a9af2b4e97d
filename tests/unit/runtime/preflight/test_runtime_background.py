"""Functions beside an event loop that nothing has to wait for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from slurmtrain.runtime.preflight.background import in_background


def test_what_a_function_returns_is_returned() -> None:
    assert asyncio.run(in_background(divmod, 7, 2)) == (3, 1)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), TimeoutError()])
def test_what_a_function_raises_is_raised(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def wait() -> None:
        with pytest.raises(type(error)) as raised:
            await in_background(fail)
        assert raised.value is error

    asyncio.run(wait())


def test_several_functions_run_at_the_same_time() -> None:
    together = threading.Barrier(40, timeout=60)

    async def wait() -> None:
        # A barrier tells each of those that it held back which of them it was.
        assert sorted(await asyncio.gather(*(in_background(together.wait) for _ in range(40)))) == list(range(40))

    asyncio.run(wait())


def test_a_function_that_hangs_can_be_given_up() -> None:
    over = threading.Event()

    async def wait() -> None:
        waiting = asyncio.create_task(in_background(over.wait, 60))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # What it returns in the end disturbs nobody, whether the loop still runs or not.
        over.set()
        await in_background(lambda: None)

    asyncio.run(wait())


def test_neither_the_loop_nor_the_interpreter_waits_for_a_function_that_hangs() -> None:
    program = """if True:
        import asyncio, threading
        from slurmtrain.runtime.preflight.background import in_background
        async def give_up():
            try:
                async with asyncio.timeout(0.05):
                    await in_background(threading.Event().wait)
            except TimeoutError:
                print("given up")
        asyncio.run(give_up())
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("given up\n", "")
