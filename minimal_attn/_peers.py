"""How the ranks of a ring talk: blocks to the next rank, arguments to all, and an error instead of a hang."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

T = TypeVar("T")
KEYS = "minimal_attn.ring"  # the prefix of keys in the group's store
FAILED = KEYS + "/failed"  # this key has the first failure, if there was one


class RingError(RuntimeError):
    """Another rank died, stalled or failed. The process group can't be used any more."""


class _Lost(Exception):
    """What this rank saw of another one's failure; a sentence whose subject is this rank.

    `blamed` are the ranks that it waited for. If they report a failure, too, they know more of the cause.
    """

    def __init__(self, text: str, *blamed: int):
        super().__init__(text)
        self.blamed = blamed


class Peers:
    """The ranks of a process group, seen from one. As a context it ends the call on all ranks after an error.

    Arguments go through the group's store: it can tell which rank is missing, works with any backend and
    doesn't synchronise a GPU. Blocks go from rank r to rank r + 1. `call` is what errors name.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, is_cuda: bool, call: str):
        self.group, self.timeout, self.is_cuda, self.call = group, timeout, is_cuda, call
        self.rank, self.ranks = group.rank(), group.size()
        self.before, self.after = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        has_method = hasattr(group, "get_group_store")  # torch 2.8 has not
        self.store = group.get_group_store() if has_method else _get_process_group_store(group)
        self.works: list[dist.Work] = []

    def exchange(self, mine: dict) -> list[dict]:
        """The dicts of all ranks, in their order."""
        return [mine] if self.ranks == 1 else _within(self.timeout + 1, lambda: self._exchange(mine))

    def _exchange(self, mine: dict) -> list[dict]:
        call = self.store.add(f"{KEYS}/calls/{self.rank}", 1)
        keys = [f"{KEYS}/{call}/{rank}" for rank in range(self.ranks)]
        self.store.set(keys[self.rank], json.dumps(mine))
        # Not store.wait, which would log that it waited in vain.
        for _ in _until(time.monotonic() + self.timeout, longest_pause=0.05):
            if self.store.check(keys):
                break
            if self.store.check([FAILED]):
                raise _Lost("was told of an earlier failure")
        else:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if missing:
                raise _Lost(f"waited {self.timeout:g} s for {named(missing)} to call {self.call}")
        everyone = [json.loads(text) for text in self.store.multi_get(keys)]
        # All ranks are in this call, so none still reads what was said in the last one.
        self.store.delete_key(f"{KEYS}/{call - 1}/{self.rank}")
        return everyone

    def start(self, transfers: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        """Begins to send the first of each pair, and to receive into the second; None where there is none.

        Empty tensors go, too: NCCL needs all ranks.
        """
        ops = []
        for tag, (going, coming) in enumerate(transfers):
            if coming is not None:
                ops.append(dist.P2POp(dist.irecv, coming, None, self.group, tag, self.before))
                ops.append(dist.P2POp(dist.isend, going, None, self.group, tag, self.after))
        try:
            self.works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            text = f"lost rank {self.before} or {self.after} ({_line(error)})"
            raise _Lost(text, self.before, self.after) from None

    def finish(self) -> None:
        """Waits for what `start` began."""
        end = time.monotonic() + self.timeout
        got, sent = f"got no keys from rank {self.before}", f"could not send keys to rank {self.after}"
        kinds = [(got, (self.before,)), (sent, (self.after,))]
        if len(self.works) == 1:  # NCCL makes one work of all
            kinds = [(f"{got} or {sent}", (self.before, self.after))]
        for work, (name, blamed) in zip(self.works, itertools.cycle(kinds)):
            try:
                if self.is_cuda:
                    self._poll(work, end)
                work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
            except RuntimeError as error:
                is_late = time.monotonic() > end - 2e-3  # gloo waits for whole milliseconds, rounded down
                why = f"in {self.timeout:g} s" if is_late else f"({_line(error)})"
                raise _Lost(f"{name} {why}", *blamed) from None
        self.works = []

    def _poll(self, work: dist.Work, end: float) -> None:
        """Waits for NCCL, whose own limit holds for the whole group and ends the process."""
        next_look = 0.0
        for now in _until(end, longest_pause=1e-4):
            if work.is_completed():
                return
            if now >= next_look:
                next_look = now + 0.5
                if _within(5, lambda: self.store.check([FAILED])):
                    raise _Lost("was told of a failure")
        raise RuntimeError("timeout")

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or self.ranks == 1:
            return
        lost = isinstance(error, _Lost)
        does = str(error) if lost else f"raised {type(error).__name__}: {_line(error)}"
        first = self._report(f"rank {self.rank} {does}", error.blamed if lost else ())
        self._close()
        if lost:
            raise RingError(f"{self.call} ended on all ranks: {first}") from None

    def _report(self, text: str, blamed: tuple[int, ...]) -> str:
        """Tells the others of a failure, unless one told before. Returns what was told first."""

        def is_told(seconds: float) -> bool:
            return any(
                self.store.check([FAILED]) for _ in _until(time.monotonic() + seconds, longest_pause=0.05)
            )

        def report() -> str:
            self.store.set(f"{KEYS}/lost/{self.rank}", "")
            theirs = [f"{KEYS}/lost/{rank}" for rank in blamed]
            if blamed and not is_told(0.3) and self.store.check(theirs):
                is_told(1)
            return self.store.compare_set(FAILED, "", text).decode()

        try:
            return _within(3, report)
        except _Lost:
            return text

    def _close(self) -> None:
        """Closes the connections, so that ranks that wait for this one fail at once."""
        with contextlib.suppress(RuntimeError):
            self.group.abort()
            if not self.is_cuda:  # gloo has no abort, but a wait that times out closes all connections
                work = dist.irecv(torch.empty(1, device="cpu"), group=self.group, group_src=self.after, tag=1)
                work.wait(timedelta(milliseconds=1))


def named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _line(error: BaseException) -> str:
    """The first line of a C++ error, without the place in the source that it begins with."""
    return re.sub(r"^\[.*?\] ", "", (str(error).splitlines() or [""])[0])


def _until(end: float, longest_pause: float) -> Iterator[float]:
    """The time, again and again until `end`, after pauses that grow."""
    pause = 5e-5
    while (now := time.monotonic()) < end:
        yield now
        time.sleep(pause)
        pause = min(1.2 * pause, longest_pause)


def _within(seconds: float, use_store: Callable[[], T]) -> T:
    """use_store(), in a thread that is left behind if it takes longer.

    TCPStore's own limits don't hold while the host of the store, most often rank 0, is stopped.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(use_store())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    store = "the process group's store (most often rank 0 is its host)"
    if wait([future], seconds).not_done:
        raise _Lost(f"got no answer from {store} in {seconds:g} s")
    try:
        return future.result()
    except RuntimeError as error:
        raise _Lost(f"lost {store}: {_line(error)}") from None
