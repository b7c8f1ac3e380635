"""Text of many files to one array of ids, over processes, with a bounded amount of either in memory."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from training.dataset import npy_header
from training.sources import Advance, DataError, SourceFile, read
from training.tokenizer import Tokenizer

BLOCK = 1 << 20  # characters a process is given at a time; a longer document comes in several pieces
_SMALL_BYTES = 1 << 21  # below this, starting processes takes longer than they save


class Piece(NamedTuple):
    """A stretch of a document, cut where no id changes; the one with a `digest`, of all its text, ends it."""

    where: str
    text: str
    digest: int | None


class Tokenised(NamedTuple):
    """Where each document ends, in tokens, int64; a hash of its text, uint64; UTF-8 bytes of all text."""

    ends: np.ndarray
    digests: np.ndarray
    text_bytes: int


def tokenise(
    files: list[SourceFile],
    text_column: str,
    max_documents: int | None,
    tokenizer: Tokenizer,
    path: Path,
    workers: int | None = None,
    show: bool = False,
) -> Tokenised:
    """Write the ids of all documents, an EOD behind each, to the .npy file at `path`.

    The result does not depend on `workers`. Documents without text are left out. Raises DataError.
    """
    total_bytes = sum(file.size_bytes for file in files)
    workers = 1 if total_bytes < _SMALL_BYTES else workers or cores()
    ends, digests, tokens, text_bytes = array("q"), array("Q"), 0, 0
    with open(path, "wb") as out, progress(total_bytes, show) as advance:
        out.write(npy_header(tokenizer.dtype, (0,)))
        pieces = _pieces(files, text_column, max_documents, tokenizer, advance)
        with contextlib.closing(_encoded(_blocks(pieces), tokenizer, workers)) as encoded:
            for block, ids, counts in encoded:
                out.write(ids)
                for piece, count in zip(block, counts, strict=True):
                    tokens += count
                    if piece.digest is not None:
                        ends.append(tokens)
                        digests.append(piece.digest)
                text_bytes += sum(len(piece.text.encode()) for piece in block)
        out.seek(0)
        out.write(npy_header(tokenizer.dtype, (tokens,)))
        out.flush()
        os.fsync(out.fileno())
    return Tokenised(np.array(ends, "<i8"), np.array(digests, "<u8"), text_bytes)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pieces(
    files: list[SourceFile],
    text_column: str,
    max_documents: int | None,
    tokenizer: Tokenizer,
    advance: Advance,
) -> Iterator[Piece]:
    documents = 0
    for file in files:
        text, at, digest = "", 0, hashlib.blake2b(digest_size=8)
        for part in read(file, text_column, advance):
            digest.update(part.text.encode())
            text, at = text[at:] + part.text, 0
            while len(text) - at > BLOCK:
                stop = at + tokenizer.boundary(text[at : at + BLOCK])
                yield Piece(part.where, text[at:stop], None)
                at = stop
            if part.last:
                if at < len(text):
                    yield Piece(part.where, text[at:], int.from_bytes(digest.digest(), "little"))
                    documents += 1
                    if documents == max_documents:
                        return
                text, at, digest = "", 0, hashlib.blake2b(digest_size=8)


def _blocks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    block: list[Piece] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece.text) + 64  # so that millions of tiny documents make blocks, too
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _encode(block: list[Piece], tokenizer: Tokenizer | None = None) -> tuple[bytes, list[int]]:
    """Ids of the pieces as bytes, and how many each has, its EOD included."""
    tokenizer = tokenizer or _worker_tokenizer
    assert tokenizer is not None
    out, counts = [], []
    for piece in block:
        try:
            ids = tokenizer.encode(piece.text)
        except DataError as error:
            raise DataError(f"{piece.where}: {error}") from None
        out.append(ids.tobytes())
        if piece.digest is not None:
            out.append(np.array(tokenizer.eod, tokenizer.dtype).tobytes())
        counts.append(len(ids) + (piece.digest is not None))
    return b"".join(out), counts


def _encoded(
    blocks: Iterator[list[Piece]], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[list[Piece], bytes, list[int]]]:
    """Every block with its ids, in order; only a few blocks per process are on their way at any time."""
    if workers == 1:
        for block in blocks:
            yield block, *_encode(block, tokenizer)
        return
    # Started afresh, not forked: a fork of a process with threads (torch, rich) can hang.
    spawn = multiprocessing.get_context("spawn")
    waiting: deque[tuple[list[Piece], Future[tuple[bytes, list[int]]]]] = deque()
    with ProcessPoolExecutor(workers, spawn, _start, (tokenizer.model, tokenizer.name)) as pool:
        try:
            for block in blocks:
                waiting.append((block, _submit(pool, block)))
                if len(waiting) > 2 * workers:
                    block, future = waiting.popleft()
                    yield block, *future.result()
            while waiting:
                block, future = waiting.popleft()
                yield block, *future.result()
        except BrokenProcessPool:
            advice = "out of memory? set data.workers to a smaller number"
            raise DataError(f"{block[0].where}: a tokenising process was killed here ({advice})") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, block: list[Piece]) -> Future[tuple[bytes, list[int]]]:
    """Ctrl-C is this process's to handle: the ones that a task may start inherit that it is blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode, block)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_worker_tokenizer: Tokenizer | None = None  # of a tokenising process


def _start(model: bytes, name: str) -> None:
    global _worker_tokenizer
    _worker_tokenizer = Tokenizer(model, name)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A killed parent cannot stop its processes, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def progress(total_bytes: int, show: bool) -> Iterator[Advance]:
    """A bar on a terminal, else a line every ten seconds; the function given is told of bytes done."""
    if not show:
        yield lambda n: None
    elif sys.stderr.isatty():
        from rich import progress as rich
        from rich.console import Console

        columns = rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn()
        with rich.Progress("Tokenising", *columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total_bytes)
            yield lambda n: bar.advance(task, n)
    else:
        done, said = 0, time.monotonic()

        def advance(n: int) -> None:
            nonlocal done, said
            done += n
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"Tokenising: {done / 1e6:.0f} of {total_bytes / 1e6:.0f} MB", file=sys.stderr)

        yield advance
