"""Long calls to the disk and digests, in two threads: while one waits for the disk, the other has work for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

Task = Callable[[], None]


def run_side_by_side(tasks: Iterable[Task], name: str) -> None:
    """Run the tasks, begun in order, in this thread and a second one called `name`.

    Raises the first error of either, once neither runs any more; nothing new is begun after an error.
    """
    queue = deque(tasks)
    if len(queue) < 2:
        _run(queue)
        return
    with ThreadPoolExecutor(1, name) as second:
        others = second.submit(_run, queue)
        _run(queue)
    others.result()


def _run(queue: deque[Task]) -> None:
    try:
        while (task := _taken(queue)) is not None:
            task()
    finally:
        queue.clear()


def _taken(queue: deque[Task]) -> Task | None:
    try:
        return queue.popleft()
    except IndexError:
        return None  # the other thread has taken the last one
