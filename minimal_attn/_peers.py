"""How the ranks of a ring talk: blocks to the next rank, arguments to all, and an error instead of a hang."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager, _get_process_group_store

from minimal_attn._shared_words import Offer, SharedWords, opened

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


class Disagreement(Exception):
    """The ranks' arguments aren't what they were. Nothing has been sent yet."""


@dataclass
class _Calls:
    """Of a group: how many calls there were. A store may have known earlier groups of this name."""

    generation: int  # of the group's name
    number: int = 0
    has_exchanged: bool = False
    words: SharedWords | None = None  # once all ranks have opened them, which are on one node then

    def word(self, number: int) -> int:
        """What a rank in this call shows: the call's number and its own."""
        return self.number % (1 << 32) << 32 | number


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, _Calls] = weakref.WeakKeyDictionary()
_streams: dict[torch.device, torch.cuda.Stream] = {}  # for transfers


@dataclass
class Transfer:
    works: list[dist.Work]


class Peers:
    """The ranks of a process group, seen from one. As a context it ends the call on all ranks after an error.

    Arguments go through the group's store: it can tell which rank is missing, works with any backend and
    doesn't synchronise a GPU. Blocks go from rank r to rank r + 1. `call` is what errors name.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, is_cuda: bool, call: str):
        self.group, self.timeout, self.is_cuda, self.call = group, timeout, is_cuda, call
        self.rank, self.ranks = group.rank(), group.size()
        self.before, self.after = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        has_method = hasattr(group, "get_group_store")  # torch 2.8 lacks it
        self.store = group.get_group_store() if has_method else _get_process_group_store(group)
        self.stream = torch.cuda.current_stream() if is_cuda else None
        self.transfers: list[Transfer] = []
        self.number = 0  # of the call, among the group's: since its handshake

    def handshake(self, number: int | None) -> Callable[[], bool]:
        """Begins a call. The result waits for all ranks, and says whether all have the same number.

        It is below 2^32; None is like no other one. Through shared memory on one node, else by a sum in the
        store: a call like an earlier one has no time for more (docs/ring.md).
        """
        if self.ranks == 1:
            return lambda: number is not None
        if number is None:
            number = int.from_bytes(os.urandom(4), "little")
        calls = _calls.get(self.group)
        if calls is None or calls.words is None:
            return _started(self.timeout + 1, lambda: self._all_in_store(number))
        calls.number += 1
        self.number = calls.number
        # Two calls take turns: a rank that is two calls on knows that all have begun the one between, and so
        # have read this one's.
        places = range(calls.number % 2 * self.ranks, (calls.number % 2 + 1) * self.ranks)
        calls.words[places[self.rank]] = calls.word(number)
        return lambda: self._all_in_memory(calls, places, number)

    def _all_in_memory(self, calls: _Calls, places: range, number: int) -> bool:
        end, next_look, words = time.monotonic() + self.timeout, time.monotonic() + 0.5, []
        for now in itertools.chain(itertools.repeat(0.0, 200), _until(end, longest_pause=0.01)):
            words = [calls.words[place] for place in places]
            if all(word >> 32 == calls.word(0) >> 32 for word in words):
                return all(word == calls.word(number) for word in words)
            if now >= next_look:
                next_look = now + 0.5
                if _within(max(min(5, end - now), 0.1), lambda: self.store.check([FAILED])):
                    raise _Lost("was told of an earlier failure")
        missing = [rank for rank, word in enumerate(words) if word >> 32 != calls.word(0) >> 32]
        raise _Lost(f"waited {self.timeout:g} s for {named(missing)} to call {self.call}")

    def _all_in_store(self, number: int) -> bool:
        if (calls := _calls.get(self.group)) is None:
            calls = _calls[self.group] = _Calls(self.store.add(f"{KEYS}/generations/{self.rank}", 1))
        calls.number += 1
        self.number = calls.number
        key, here = f"{KEYS}/{calls.generation}/{calls.number}", f"{KEYS}/{calls.generation}/here"
        self.store.set(f"{here}/{self.rank}", str(calls.number))
        count, total = divmod(self.store.add(key, (1 << 48) + number), 1 << 48)
        for _ in _until(time.monotonic() + self.timeout, longest_pause=0.05):
            if count == self.ranks:
                break
            if self.store.check([FAILED]):
                raise _Lost("was told of an earlier failure")
            count, total = divmod(self.store.add(key, 0), 1 << 48)
        else:
            keys = [f"{here}/{rank}" for rank in range(self.ranks)]
            numbers = [self.store.get(key).decode() if self.store.check([key]) else "" for key in keys]
            if missing := [rank for rank, text in enumerate(numbers) if text != str(calls.number)]:
                raise _Lost(f"waited {self.timeout:g} s for {named(missing)} to call {self.call}")
        if self.rank == 0:  # all ranks are in this call, so none still looks at the last one's sum
            _started(1, lambda: self.store.delete_key(f"{KEYS}/{calls.generation}/{calls.number - 1}"))
        return total == number * self.ranks

    def exchange(self, mine: dict) -> list[dict]:
        """The dicts of all ranks, in their order. All have greeted before."""
        return [mine] if self.ranks == 1 else _within(self.timeout + 1, lambda: self._exchange(mine))

    def _exchange(self, mine: dict) -> list[dict]:
        calls = _calls[self.group]
        if calls.has_exchanged:
            return self._gathered(f"said {calls.number % 2}", mine)
        calls.has_exchanged = True
        with contextlib.ExitStack() as stack:
            address = None
            if self.rank == 0:
                address = stack.enter_context(Offer(2 * self.ranks)).address
            said = self._gathered("first", [mine, address])
            address = said[0][1]
            words = opened(*address) if address else None
            if all(self._gathered("opened", words is not None)):
                calls.words = words
        return [its for its, _ in said]

    def _gathered(self, topic: str, mine: object) -> list:
        """What all ranks say of a topic in this call."""
        calls = _calls[self.group]
        keys = [f"{KEYS}/{calls.generation}/{topic}/{rank}" for rank in range(self.ranks)]
        self.store.set(keys[self.rank], json.dumps([calls.number, mine]))
        # Not store.wait, which would log that it waited in vain.
        for _ in _until(time.monotonic() + self.timeout, longest_pause=0.05):
            if self.store.check(keys):
                said = [json.loads(text) for text in self.store.multi_get(keys)]
                if all(number == calls.number for number, _ in said):
                    return [its for _, its in said]
            if self.store.check([FAILED]):
                raise _Lost("was told of an earlier failure")
        raise _Lost(f"waited {self.timeout:g} s for the arguments of other ranks")

    def event(self) -> torch.cuda.Event | None:
        """What a transfer may wait for: all that this rank has queued until now."""
        return self.stream.record_event() if self.stream else None

    def start(self, transfers: Sequence[tuple[Tensor, Tensor]], *events: torch.cuda.Event | None) -> Transfer:
        """Begins to send the first of each pair, and to receive into the second, behind these events.

        Empty tensors go, too: NCCL needs all ranks.
        """
        try:
            if self.stream is None:
                works = self._queue(transfers)
            else:
                stream = _streams.get(self.stream.device) or torch.cuda.Stream()
                _streams[self.stream.device] = stream
                for event in events:
                    if event is not None:
                        stream.wait_event(event)
                coalescing = _coalescing_manager(self.group, self.stream.device, async_ops=True)
                with torch.cuda.stream(stream), coalescing as one:
                    self._queue(transfers)
                works = one.works
        except RuntimeError as error:
            text = f"lost rank {self.before} or {self.after} ({_line(error)})"
            raise _Lost(text, self.before, self.after) from None
        transfer = Transfer(works)
        if self.is_cuda:  # else `wait` has waited for it
            self.transfers.append(transfer)
        return transfer

    def _queue(self, transfers: Sequence[tuple[Tensor, Tensor]]) -> list[dist.Work]:
        """As dist.batch_isend_irecv, whose checks take the host as long as a small transfer takes."""
        works = []
        for tag, (going, coming) in enumerate(transfers):
            works.append(self.group.recv([coming], self.before, tag))
            works.append(self.group.send([going], self.after, tag))
        return works

    def wait(self, transfer: Transfer) -> None:
        """What is queued from now on may use what comes and change what goes. On a CPU it waits for that."""
        if self.is_cuda:
            try:
                for work in transfer.works:
                    work.wait()  # a stream waits
            except RuntimeError as error:
                text = f"lost rank {self.before} or {self.after} ({_line(error)})"
                raise _Lost(text, self.before, self.after) from None
        else:
            self._wait(transfer)

    def finish(self) -> None:
        """Waits until all has come and gone. On a GPU that is captured in a graph nothing can wait."""
        if self.is_cuda and not torch.cuda.is_current_stream_capturing():
            for transfer in self.transfers:
                self._wait(transfer)
        self.transfers = []

    def _wait(self, transfer: Transfer) -> None:
        end = time.monotonic() + self.timeout
        got, sent = f"got no keys from rank {self.before}", f"could not send keys to rank {self.after}"
        kinds = [(got, (self.before,)), (sent, (self.after,))]
        if len(transfer.works) == 1:  # NCCL makes one work of all
            kinds = [(f"{got} or {sent}", (self.before, self.after))]
        for work, (name, blamed) in zip(transfer.works, itertools.cycle(kinds)):
            try:
                if self.is_cuda:
                    self._poll(work, end)
                work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))  # raises if it failed
            except RuntimeError as error:
                is_late = time.monotonic() > end - 2e-3  # gloo waits for whole milliseconds, rounded down
                why = f"in {self.timeout:g} s" if is_late else f"({_line(error)})"
                raise _Lost(f"{name} {why}", *blamed) from None

    def _poll(self, work: dist.Work, end: float) -> None:
        """Waits for NCCL, whose own limit holds for the whole group and ends the process."""
        next_look = time.monotonic() + 0.5
        for now in _until(end, longest_pause=1e-4):
            if work.is_completed():
                return
            if now >= next_look:
                next_look = now + 0.5
                if _within(max(min(5, end - now), 0.1), lambda: self.store.check([FAILED])):
                    raise _Lost("was told of a failure")
        raise RuntimeError("timeout")

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or isinstance(error, Disagreement) or self.ranks == 1:
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
                work = dist.irecv(torch.empty(1, device="cpu"), group=self.group, group_src=self.after, tag=9)
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
    return _started(seconds, use_store)()


def _started(seconds: float, use_store: Callable[[], T]) -> Callable[[], T]:
    """Starts use_store() in a thread that is left behind if it takes longer. The result waits for its result.

    TCPStore's own limits don't hold while the host of the store, most often rank 0, is stopped.
    """
    future: Future[T] = Future()
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = _new_thread()
    tasks.put((future, use_store))
    end = time.monotonic() + seconds

    def result() -> T:
        with contextlib.suppress(TimeoutError):
            future.exception(max(end - time.monotonic(), 0))
        store = "the process group's store (most often rank 0 is its host)"
        if not future.done():
            raise _Lost(f"got no answer from {store} in {seconds:g} s")
        try:
            return future.result()
        except RuntimeError as error:
            raise _Lost(f"lost {store}: {_line(error)}") from None

    return result


def _new_thread() -> queue.SimpleQueue:
    """The tasks of a new thread."""
    tasks: queue.SimpleQueue = queue.SimpleQueue()

    def run() -> None:
        while True:
            future, task = tasks.get()
            try:
                result = task()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, task
            _idle.append(tasks)

    threading.Thread(target=run, daemon=True).start()
    return tasks


_idle: list[queue.SimpleQueue] = []  # tasks of threads that wait for one
os.register_at_fork(after_in_child=_idle.clear)
