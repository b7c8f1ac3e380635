"""From text to batches: sources are tokenised once into a folder of arrays, and batches are cut from it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from training.dataset import FORMAT, Dataset, Split, Stream, write
from training.schema import ROOT, Data
from training.sources import DataError, SourceFile, find, sample
from training.tokenise import Tokenised, tokenise
from training.tokenizer import Tokenizer, train

if TYPE_CHECKING:
    import torch

__all__ = ["Batches", "DataError", "Dataset", "prepare"]

SAMPLE = 8 << 20  # characters a tokenizer is trained on
COUNTED = 1 << 20  # tokens counted at a time


def prepare(data: Data, show: bool = False) -> Path:
    """Folder of the prepared data for these settings, made if it is not there yet; `show` reports on stderr.

    Any number of processes may call it at once: one prepares, the others wait. Raises DataError and leaves
    nothing behind when something is wrong with the sources, the tokenizer or the disk.
    """
    files = find(data.sources)
    tokenizer = Tokenizer.load(data.tokenizer) if data.tokenizer else None
    settings = _settings(data, tokenizer)
    key = _key(settings, files)
    cache = os.path.expanduser(data.cache_dir)
    if cache.startswith("~"):
        raise DataError(f"data.cache_dir = {cache}: there is no such user; name a folder, or write ./{cache}")
    folder = ROOT / cache / key
    if not os.path.exists(folder):  # unlike Path.exists it raises nothing, whatever is on the way there
        try:
            with _building(folder, show) as work:
                if work:
                    _fill(work, key, data, settings, files, tokenizer, show)
        except OSError as error:
            raise _disk_error(error, data.cache_dir, folder) from None
    Dataset(folder)
    return folder


class Batches:
    """Micro-batches of one rank, any of them at once: `batch(i)` depends on i and the arguments alone.

    train: the documents of epoch 0, 1, 2, ... are laid end to end, each epoch in its own order from
    (seed, epoch), and the stream is cut into sequences of `seq_length` targets. So every token is a target
    exactly once per epoch, a sequence may reach from one epoch into the next (or over many, when it is longer
    than the corpus), and batches never end. Those that begin in one epoch come in an order of their own.
    validation: one pass, the same for every seed; targets behind the end are -100.

    Sequence n goes to rank n // micro_batch_size % world_size: a global batch is the same set of sequences
    for any number of ranks. `index` counts this rank's micro-batches from step 0 (step * accumulation + k).
    """

    def __init__(
        self,
        dataset: Dataset | str | Path,
        split: Split,
        seq_length: int,
        micro_batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
        self.split, self.seq_length, self.micro_batch_size = split, seq_length, micro_batch_size
        self.seed, self.rank, self.world_size = seed if split == "train" else 0, rank, world_size
        self._documents = self.dataset.documents(split)
        self._epochs: dict[int, Stream] = {}
        self.tokens_per_epoch = len(self._epoch(0))

    def __len__(self) -> int:
        """Micro-batches of one pass over the split: with fewer, some tokens would not be seen."""
        return -(-self.tokens_per_epoch // (self.seq_length * self.micro_batch_size * self.world_size))

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets), int64 [B, T] on the CPU; targets[b, t] is the token that follows tokens[b, t].

        The first token of the stream follows an EOD, as the first token of every other document does.
        """
        import torch

        B = self.micro_batch_size
        if index < 0 or (self.split == "validation" and index >= len(self)):
            raise IndexError(f"{self.split} micro-batch {index} of {len(self)}")
        first = (index * self.world_size + self.rank) * B
        streams = np.stack([self._sequence(self._place(first + row)) for row in range(B)])
        tokens, targets = streams[:, :-1].copy(), streams[:, 1:].copy()
        tokens[tokens < 0] = self.dataset.eod
        targets[targets < 0] = -100
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def _place(self, number: int) -> int:
        """Where in the stream the sequence lies that comes `number`-th: an epoch's sequences are shuffled too.

        Else a long document would fill many batches in a row, and the steps in between would forget the others.
        """
        epoch = number * self.seq_length // self.tokens_per_epoch
        first, end = (-(-e * self.tokens_per_epoch // self.seq_length) for e in (epoch, epoch + 1))
        return first + _shuffled(number - first, end - first, self.seed, epoch)

    def _sequence(self, number: int) -> np.ndarray:
        """The `number`-th sequence of the stream and the token before it, [T + 1]; -1 behind the end."""
        start = number * self.seq_length
        stream = np.full(self.seq_length + 1, -1, np.int64)
        done = 0
        if start == 0:
            stream[0], done = self.dataset.eod, 1
        while done < len(stream):
            epoch, offset = divmod(start - 1 + done, self.tokens_per_epoch)
            if self.split == "validation" and epoch > 0:
                break
            tokens = self._epoch(epoch).read(offset, len(stream) - done)
            stream[done : done + len(tokens)] = tokens
            done += len(tokens)
        return stream

    def _epoch(self, epoch: int) -> Stream:
        """The epoch's documents in order: 24 bytes and about 0.2 us per document, kept for two epochs."""
        if epoch not in self._epochs:
            # A generator's raw bits stay the same in every numpy version; its permutations need not.
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
            order = self._documents[np.argsort(bits.random_raw(len(self._documents)), kind="stable")]
            self._epochs = {e: stream for e, stream in self._epochs.items() if abs(e - epoch) == 1}
            self._epochs[epoch] = Stream(self.dataset, order)
        return self._epochs[epoch]


def _shuffled(number: int, count: int, seed: int, epoch: int) -> int:
    """Where a permutation of range(count) puts `number`: a Feistel network, so that no list of them is kept."""
    half = max(1, (count - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        for key in range(4):
            text = f"{seed}/{epoch}/{key}/{number & mask}".encode()
            mixed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & mask
            number = (number & mask) << half | (number >> half ^ mixed)
        if number < count:  # else on to the next place, until one lies inside
            return number


def _settings(data: Data, tokenizer: Tokenizer | None) -> dict[str, object]:
    """What the prepared data depends on, besides the files."""
    made = {"vocab_size": data.tokenizer_vocab_size, "sample": SAMPLE}
    return {
        "sources": list(data.sources),
        "text_column": data.text_column,
        "tokenizer": hashlib.sha256(tokenizer.model).hexdigest() if tokenizer else made,
        "validation_fraction": data.validation_fraction,
        "max_documents": data.max_documents,
    }


def _key(settings: dict[str, object], files: list[SourceFile]) -> str:
    """Name of the data: paths, sizes and times of the files stand for their contents.

    Reading terabytes to find that nothing changed would cost more than it is worth; an edit changes the time.
    """
    stats = [[str(file.path), file.size_bytes, file.mtime_ns] for file in files]
    return hashlib.sha256(json.dumps([FORMAT, settings, stats]).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _building(folder: Path, show: bool) -> Iterator[Path | None]:
    """A work folder that becomes `folder` in one rename, or goes; None when another process made `folder`.

    Its maker holds a lock on it, which ends with the process, so what a killed one left behind is used again.
    """
    work = folder.with_suffix(".tmp")
    while True:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work, os.O_RDONLY)
        try:
            _lock(lock, folder, show)
            mine = work.exists() and os.stat(work).st_ino == os.fstat(lock).st_ino
            if folder.exists():
                shutil.rmtree(work, ignore_errors=True) if mine else None
                yield None
                return
            if mine:
                yield from _built(work, folder)
                return
        finally:
            os.close(lock)


def _built(work: Path, folder: Path) -> Iterator[Path]:
    try:
        for left in work.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield work
        _sync(work)
        work.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _lock(lock: int, folder: Path, show: bool) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if show:
            print(f"Waiting for another process that prepares {folder}", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fill(
    work: Path,
    key: str,
    data: Data,
    settings: dict[str, object],
    files: list[SourceFile],
    tokenizer: Tokenizer | None,
    show: bool,
) -> None:
    """All files of a dataset, into the work folder."""
    began = time.monotonic()
    if tokenizer is None:
        texts = filter(None, sample(files, data.text_column, SAMPLE))
        first = next(texts, None)
        if first is None:
            raise _no_text(data)
        tokenizer = Tokenizer(train(itertools.chain([first], texts), data.tokenizer_vocab_size))
        if show:
            took_s = time.monotonic() - began
            print(f"Trained a tokenizer of {tokenizer.vocab_size} ids in {took_s:.1f} s", file=sys.stderr)
    began = time.monotonic()
    path = work / "tokens.npy"
    done = tokenise(files, data.text_column, data.max_documents, tokenizer, path, data.workers, show)
    if show:
        mb, took_s = done.text_bytes / 1e6, time.monotonic() - began
        print(f"Tokenised {mb:.1f} MB of text in {took_s:.1f} s: {mb / took_s:.1f} MB/s", file=sys.stderr)
    validation = _validation(done, data)
    info = {
        **FORMAT,
        "key": key,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "tokens": int(done.ends[-1]),
        "documents": len(done.ends),
        "validation_documents": int(validation.sum()),
        "text_bytes": done.text_bytes,
        "files": len(files),
        "settings": settings,
    }
    write(work / "tokenizer.model", tokenizer.model)
    write(work / "ends.npy", done.ends)
    write(work / "validation.npy", validation)
    write(work / "counts.npy", np.zeros((2, tokenizer.vocab_size), "<i8"))
    write(work / "dataset.json", json.dumps(info, indent=2).encode())
    write(work / "counts.npy", _counts(Dataset(work)))


def _validation(done: Tokenised, data: Data) -> np.ndarray:
    """Which documents are for validation, bool [documents]: those whose hash is below the fraction of 2**64.

    Equal documents stay together, and new ones do not move those already there. Neither side is empty: the
    longest document is for training, and if no other is chosen, the one nearest to the fraction in length is.
    """
    sources = " ".join(data.sources)
    if not len(done.ends):
        raise _no_text(data)
    lengths = np.diff(done.ends, prepend=0)
    others = done.digests != done.digests[np.argmax(lengths)]
    if not others.any():
        raise DataError(
            f"data.sources: {sources}: one document (or copies of one) cannot be split into training and"
            " validation; give two files, or a .jsonl with a record for each document"
        )
    chosen = others & (done.digests < np.uint64(data.validation_fraction * 2**64))
    if not chosen.any():
        misses = np.abs(lengths - data.validation_fraction * done.ends[-1])
        chosen = done.digests == done.digests[np.argmin(np.where(others, misses, np.inf))]
    return chosen


def _counts(dataset: Dataset) -> np.ndarray:
    counts = np.zeros((2, dataset.vocab_size), "<i8")
    splits: tuple[Split, Split] = ("train", "validation")
    for row, split in zip(counts, splits, strict=True):
        stream = Stream(dataset, dataset.documents(split))
        for start in range(0, len(stream), COUNTED):
            row += np.bincount(stream.read(start, COUNTED), minlength=dataset.vocab_size)
    return counts


def _no_text(data: Data) -> DataError:
    return DataError(f"data.sources: {' '.join(data.sources)}: no document holds any text")


def _disk_error(error: OSError, cache_dir: str, folder: Path) -> DataError:
    problem = error.strerror or str(error)
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG):
        return DataError(f"data.cache_dir = {cache_dir}: {problem}; name a folder that can be made or written to")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        problem += "; token files take 2 to 4 bytes per token: free some or set data.cache_dir"
    return DataError(f"{error.filename or folder}: {problem}; nothing half-written is left behind")
