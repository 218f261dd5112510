"""An event loop without threads, sockets or real time: the same program takes the same steps every time.

A step is one callback, or one call to the disk. The process that the loop belongs to can be ended after any of them.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Callable
from typing import Any, TypeVar

from tests.gateway.scheduling.stateful.clock import Clock

T = TypeVar("T")


class Crash(SystemExit):
    """The process is no more. Of this kind since nothing in a loop holds it up."""


class Pause(SystemExit):
    """The loop goes on from here later."""


class _Step(events.Handle):
    """One that hides no exception."""

    def _run(self) -> None:
        loop: SimulatedLoop = self._loop  # type: ignore[attr-defined]
        if loop.is_to_pause():
            loop.put_first(self)
            raise Pause
        loop.work()
        self._context.run(self._callback, *self._args)  # type: ignore[attr-defined]


class SimulatedLoop(asyncio.BaseEventLoop):
    """steps: taken so far. crash_at: the process crashes before that step; on_crash is called first.

    delay_s: how long the next thing that runs in a thread takes.
    """

    def __init__(self, clock: Clock, delay_s: Callable[[], float]) -> None:
        super().__init__()
        self.steps = 0
        self.crash_at: int | None = None
        self.on_crash: Callable[[], None] = lambda: None
        self.errors: list[dict[str, Any]] = []
        self._clock = clock
        self._delay_s = delay_s
        self._pause_at: int | None = None
        self._pause_when: Callable[[], bool] = lambda: False
        self._selector = self
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def run(self, until: Callable[[], bool], steps: int | None = None) -> None:
        """Until something is so, or for so many steps. Raises `Crash`."""
        self._pause_when = until
        self._pause_at = None if steps is None else self.steps + steps
        try:
            self.run_forever()
        except Pause:
            pass

    def call(self, act: Callable[[], T]) -> T:
        """As a part of a step."""
        events._set_running_loop(self)
        try:
            return act()
        finally:
            events._set_running_loop(None)

    def is_to_pause(self) -> bool:
        return self._pause_when() or (self._pause_at is not None and self.steps >= self._pause_at)

    def put_first(self, step: events.Handle) -> None:
        self._ready.appendleft(step)  # type: ignore[attr-defined]

    def work(self) -> None:
        """One step is about to be taken."""
        self.steps += 1
        if self.crash_at is not None and self.steps >= self.crash_at:
            self.on_crash()
            raise Crash

    def time(self) -> float:
        return self._clock.now

    def select(self, timeout: float | None) -> list[Any]:
        if not self._ready:  # type: ignore[attr-defined]
            self._clock.advance(None if timeout is None else self._clock.now + timeout)
        else:
            self._clock.advance_due()
        if self.is_to_pause():
            raise Pause
        return []

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Whatever blocks is done at one moment a little later, but for what it sleeps."""
        result = self.create_future()

        def run() -> None:
            if self.is_closed():
                return
            answer = error = None
            try:
                answer = func(*args)
            except Crash:
                raise
            except BaseException as raised:
                error = raised
            if self.is_closed() or result.done():
                return  # the process ended, or nobody waits any more
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(answer)

        self._clock.later(self._delay_s(), lambda: self._clock.thread(run))
        return result

    def _call_soon(self, callback: Callable[..., Any], args: Any, context: Any) -> events.Handle:
        handle = _Step(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
