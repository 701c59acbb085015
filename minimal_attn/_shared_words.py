"""Numbers in memory that processes of one node share: a ring's ranks compare their calls by them."""

from __future__ import annotations

import contextlib
import mmap
import os

TOKEN = 16  # bytes in front, by which a process knows that the memory is the right one


class SharedWords:
    """64 bits a place, which one process writes and all read; at first 0."""

    def __init__(self, memory: mmap.mmap):
        self.words = memoryview(memory)[TOKEN:].cast("Q")

    def __getitem__(self, place: int) -> int:
        return self.words[place]

    def __setitem__(self, place: int, word: int) -> None:
        self.words[place] = word


class Offer:
    """New memory for so many words, until it is closed. Who has opened it keeps it.

    `address` is for other processes, None where the system has no such memory.
    """

    def __init__(self, count: int):
        self.address: tuple[str, str, str] | None = None
        self.file: int | None = None
        if not hasattr(os, "memfd_create"):
            return
        with contextlib.suppress(OSError, ValueError):
            self.file, token = os.memfd_create("minimal_attn.ring"), os.urandom(TOKEN)
            os.truncate(self.file, TOKEN + 8 * count)
            os.pwrite(self.file, token, 0)
            self.address = _place(), f"/proc/{os.getpid()}/fd/{self.file}", token.hex()

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            os.close(self.file)


def opened(place: str, path: str, token: str) -> SharedWords | None:
    """The words at an address; None on another node, or where the system doesn't let us."""
    with contextlib.suppress(OSError, ValueError):
        if place != _place():
            return None
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(file, 0)
        finally:
            os.close(file)
        if memory[:TOKEN] == bytes.fromhex(token):
            return SharedWords(memory)
    return None


def _place() -> str:
    """The running kernel, and whose process numbers a path in /proc has."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
