"""The folder of prepared data, plain arrays only: nothing in it can run code when it is read.

- tokens.npy: uint16 or uint32 [tokens], every document followed by its end-of-document id (EOD)
- ends.npy: int64 [documents], where in tokens.npy each document ends, its EOD included
- validation.npy: bool [documents], whether the document is kept for validation
- counts.npy: int64 [2, vocabulary], how often each id occurs in train and in validation
- tokenizer.model: the sentencepiece model
- dataset.json: format, version, key, sizes, and the settings it came from
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from training.sources import DataError
from training.tokenizer import Tokenizer

FORMAT = {"format": "waterline tokens", "version": 1}
HEADER_BYTES = 128  # of the .npy files; a multiple of 64, so that the numbers behind it are aligned
Split = Literal["train", "validation"]


class Dataset:
    """Prepared data, memory mapped. Opening checks every file; DataError names a bad one."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.info = self._read_info()
        self.key: str = self.info["key"]
        self.tokenizer = Tokenizer.load(self.folder / "tokenizer.model")
        self.vocab_size, self.eod = self.tokenizer.vocab_size, self.tokenizer.eod
        if (self.vocab_size, self.eod) != (self.info["vocab_size"], self.info["eod"]):
            raise self._damaged("tokenizer.model", "is another tokenizer than the one that was used")
        documents = self.info["documents"]
        self.tokens = self._array("tokens.npy", self.tokenizer.dtype, (self.info["tokens"],))
        self.ends = self._array("ends.npy", np.dtype("<i8"), (documents,))
        self.validation = self._array("validation.npy", np.dtype("?"), (documents,))
        self.counts = self._array("counts.npy", np.dtype("<i8"), (2, self.vocab_size))
        lengths = np.diff(self.ends, prepend=0)
        if lengths.min() < 2 or self.ends[-1] != len(self.tokens):
            raise self._damaged("ends.npy", "does not fit tokens.npy")

    def documents(self, split: Split) -> np.ndarray:
        """Numbers of the split's documents, int64, in source order."""
        return np.flatnonzero(self.validation if split == "validation" else ~self.validation)

    def document(self, number: int) -> np.ndarray:
        """Ids of one document, without its EOD."""
        return self.tokens[self.ends[number - 1] if number else 0 : self.ends[number] - 1]

    def unigram_entropy(self) -> float:
        """Nats per token of the validation split under the id frequencies of the train split (each plus one).

        What a model reaches that knows how often tokens occur, and nothing about their order.
        """
        train, validation = self.counts.astype(np.float64)
        log_p = np.log((train + 1) / (train.sum() + len(train)))
        return float(-(validation * log_p).sum() / validation.sum())

    def _read_info(self) -> dict[str, Any]:
        path = self.folder / "dataset.json"
        try:
            info = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise DataError(f"{self.folder}: no prepared data here (dataset.json is missing)") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise self._damaged(path.name, "is not JSON") from None
        if not isinstance(info, dict) or {name: info.get(name) for name in FORMAT} != FORMAT:
            raise self._damaged(path.name, f"is not of {FORMAT}")
        sizes = [info.get(name) for name in ("vocab_size", "eod", "tokens", "documents")]
        if not isinstance(info.get("key"), str) or not all(type(size) is int and size >= 0 for size in sizes):
            raise self._damaged(path.name, "lacks a size")
        return info

    def _array(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        path = self.folder / name
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise self._damaged(name, "is missing") from None
        except (OSError, ValueError, OverflowError, SyntaxError, EOFError) as error:
            raise self._damaged(name, f"cannot be mapped: {error}") from None
        if not isinstance(array, np.ndarray) or (array.dtype, array.shape) != (dtype, shape):
            raise self._damaged(name, f"is not {dtype} {list(shape)}")
        if os.path.getsize(path) != HEADER_BYTES + array.nbytes:
            raise self._damaged(name, f"has {os.path.getsize(path)} bytes, not {HEADER_BYTES + array.nbytes}")
        return array.view(np.ndarray)  # a memmap's own slicing is several times slower

    def _damaged(self, name: str, problem: str) -> DataError:
        return DataError(f"{self.folder / name}: {problem}; delete the folder and prepare the data again")


class Stream:
    """Documents laid end to end in a given order, of which any stretch can be read."""

    def __init__(self, dataset: Dataset, order: np.ndarray) -> None:
        self._dataset = dataset
        self._stops = dataset.ends[order]
        self._starts = np.where(order > 0, dataset.ends[order - 1], 0)
        self._ends = np.cumsum(self._stops - self._starts)  # where in the stream each document ends

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start + count of the stream, fewer at its end. DataError for an id out of range."""
        stop = min(start + count, len(self))
        first, last = np.searchsorted(self._ends, (start, stop - 1), side="right")
        starts = self._starts[first : last + 1].copy()
        stops = self._stops[first : last + 1].copy()
        starts[0] = stops[0] - (self._ends[first] - start)
        stops[-1] -= self._ends[last] - stop
        tokens = self._dataset.tokens
        pieces = [tokens[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        out = np.concatenate(pieces)
        if out.max() >= self._dataset.vocab_size:
            raise self._beyond(starts, stops, out)
        return out

    def _beyond(self, starts: np.ndarray, stops: np.ndarray, out: np.ndarray) -> DataError:
        at = int(np.argmax(out >= self._dataset.vocab_size))
        before = np.cumsum(stops - starts)
        piece = int(np.searchsorted(before, at, side="right"))
        token = int(stops[piece] - (before[piece] - at))
        problem = f"token {token} is id {out[at]}, beyond the vocabulary of {self._dataset.vocab_size}"
        return self._dataset._damaged("tokens.npy", problem)


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """The first bytes of a .npy file, as many for any shape: they can be written again when it is known."""
    text = f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + f"{text:<117}\n".encode()


def write(path: Path, content: bytes | np.ndarray) -> None:
    """A file on the disk, not only in the system's buffers."""
    with open(path, "wb") as file:
        if isinstance(content, np.ndarray):
            file.write(npy_header(content.dtype, content.shape))
        file.write(content if isinstance(content, bytes) else np.ascontiguousarray(content).data)
        file.flush()
        os.fsync(file.fileno())
