"""Where text comes from: files, folders, globs and the standard library, read as a stream of documents.

Nothing here holds more than about a megabyte of a text file, or one record of a .jsonl, at a time.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

STDLIB = "python-stdlib"
# A folder may hold anything; only files with these endings are text. A file named directly is always read.
TEXT_SUFFIXES = frozenset(
    ".bash .c .cc .cfg .cpp .css .csv .cu .cuh .cxx .go .h .hpp .html .java .jl .js .jsonl .jsx .kt .lua .m"
    " .md .parquet .php .pl .py .pyi .pyx .r .rb .rs .rst .scala .sh .sql .swift .tex .text .toml .ts .tsx"
    " .txt .xml .yaml .yml".split()
)
_PACKED = (".gz", ".zst")
_TESTS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# Compressed bytes fed at a time: small, because 16 KiB of zstd can already unpack to hundreds of megabytes.
_CHUNK_BYTES = {".gz": 1 << 16, ".zst": 1 << 14, "": 1 << 20}


Advance = Callable[[int], None]  # told of every n bytes that are done


class DataError(ValueError):
    """Something is wrong with the data: the message says what, where (file and line), and what to do."""


class SourceFile(NamedTuple):
    path: Path
    size_bytes: int
    mtime_ns: int


class Part(NamedTuple):
    """A stretch of one document; `last` ends the document. Long text files come in several parts."""

    where: str
    text: str
    last: bool


def no_file(path: str | Path) -> str:
    """Why there is nothing to read at a path that `os.path.isfile` denies."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError) as error:
        return f"there is no file that can be read ({getattr(error, 'strerror', error)})"
    return "is a folder, not a file" if stat.S_ISDIR(mode) else "is a device or a pipe, not a file"


def find(sources: Iterable[str]) -> list[SourceFile]:
    """Every file the sources name, each once, in the order of the sources, then by path. Raises DataError."""
    found: dict[Path, SourceFile] = {}
    for source in sources:
        files = [_stat(path) for path in _paths(source)]
        if not any(file.size_bytes for file in files):
            raise DataError(f"data.sources: {source}: holds no text (every file is empty)")
        for file in files:
            found.setdefault(file.path.resolve(), file)
    return list(found.values())


def read(file: SourceFile, text_column: str, advance: Advance = lambda n: None) -> Iterator[Part]:
    """The documents of one file, in order; `advance(n)` is told of every n bytes taken from the disk.

    A text file is one document; .jsonl and .parquet hold one per record, in `text_column`. Raises DataError.
    """
    packed = file.path.suffix if file.path.suffix in _PACKED else ""
    suffix = (file.path.with_suffix("") if packed else file.path).suffix.lower()
    try:
        if suffix == ".parquet" and not packed:
            yield from _parquet(file, text_column, advance)
        else:
            chunks = _unpack(file.path, packed, advance)
            records = suffix == ".jsonl"
            yield from _jsonl(file.path, chunks, text_column) if records else _text(file.path, chunks)
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from None
    if _stat(file.path) != file:
        raise DataError(f"{file.path}: changed while it was read; prepare again when nothing writes to it")


def sample(files: list[SourceFile], text_column: str, size: int) -> Iterator[str]:
    """About `size` characters from the beginnings of files spread over all of them; always the same ones."""
    files = [file for file in files if file.size_bytes]
    files = files[:: -(-len(files) // 2000)]
    for at, file in enumerate(files):
        share = size // (len(files) - at)  # what short files leave over goes to the ones after them
        for part in read(file, text_column):
            text = part.text[:share]
            yield text
            share -= len(text)
            size -= len(text)
            if not share:
                break


def _paths(source: str) -> list[Path]:
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        paths = _walk(root, lambda folder: folder not in _TESTS, lambda name: name.endswith(".py"))
        if not paths:
            raise DataError(f"data.sources: {STDLIB}: no .py files in {root}; name files of your own instead")
        return paths
    path = Path(os.path.abspath(os.path.expanduser(source)))
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        paths = _walk(path, lambda folder: True, _is_text)
        if not paths:
            endings = " ".join(sorted(TEXT_SUFFIXES))
            raise DataError(f"data.sources: {source}: no file in this folder ends in {endings} (or .gz .zst)")
        return paths
    paths = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
    if not paths and os.path.exists(path):
        raise DataError(f"data.sources: {source}: {no_file(path)}; name a file or a folder")
    if not paths:
        raise DataError(f"data.sources: {source}: there is no such file or folder, nor does it match any")
    return paths


def _walk(root: Path, enter: Callable[[str], bool], take: Callable[[str], bool]) -> list[Path]:
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and enter(name)]
        paths += [Path(folder, name) for name in names if not name.startswith(".") and take(name)]
    return sorted(path for path in paths if os.path.isfile(path))


def _is_text(name: str) -> bool:
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1].lower() in TEXT_SUFFIXES


def _stat(path: Path) -> SourceFile:
    try:
        info = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return SourceFile(path, info.st_size, info.st_mtime_ns)


def _unpack(path: Path, packed: str, advance: Advance) -> Iterator[bytes]:
    with open(path, "rb") as file:
        unpacker = _unpacker(packed) if packed else None
        begun = False  # inside a compressed stream; a file may hold several, one after the other
        line = 1
        while chunk := file.read(_CHUNK_BYTES[packed]):
            advance(len(chunk))
            if unpacker is None:
                yield chunk
                continue
            while chunk := chunk if begun else chunk.lstrip(b"\0"):  # some tools pad with zeros
                try:
                    text = unpacker.decompress(chunk)
                except Exception as error:  # zlib.error or ZstdError, which share no base
                    raise DataError(f"{path}:{line}: the {packed} file is damaged here: {error}") from None
                line += text.count(b"\n")
                yield text
                begun = not unpacker.eof
                chunk = b"" if begun else unpacker.unused_data
                unpacker = unpacker if begun else _unpacker(packed)
        if begun:
            raise DataError(f"{path}:{line}: the {packed} file is cut short here; fetch or write it again")


def _unpacker(packed: str):
    if packed == ".gz":
        return zlib.decompressobj(wbits=31)
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


def _text(path: Path, chunks: Iterator[bytes]) -> Iterator[Part]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    for chunk in _ended(chunks):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _undecodable(path, line + error.object[: error.start].count(b"\n"), error) from None
        line += text.count("\n")
        yield Part(str(path), text, last=not chunk)


def _jsonl(path: Path, chunks: Iterator[bytes], column: str) -> Iterator[Part]:
    for number, line in enumerate(_lines(chunks), 1):
        where = f"{path}:{number}"
        try:
            record = json.loads(line.decode("utf-8").removeprefix("\ufeff")) if line.strip() else None
        except UnicodeDecodeError as error:
            raise _undecodable(path, number, error) from None
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON: {error.msg} at character {error.pos + 1}") from None
        except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
            raise DataError(f"{where}: not JSON: {error}") from None
        if not line.strip():
            continue
        if not isinstance(record, dict) or column not in record:
            has = f"fields {' '.join(map(str, record))}" if isinstance(record, dict) else "no fields"
            raise DataError(f"{where}: no field {column!r}, the record has {has}; set data.text_column")
        yield Part(where, _checked(record[column], where, column), last=True)


def _parquet(file: SourceFile, column: str, advance: Advance) -> Iterator[Part]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file.path)
        if column not in table.schema_arrow.names:
            has = " ".join(table.schema_arrow.names)
            raise DataError(f"{file.path}: no column {column!r}, the file has {has}; set data.text_column")
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            for value in batch.column(0):
                row += 1
                where = f"{file.path}: row {row}"
                try:
                    yield Part(where, _checked(value.as_py(), where, column), last=True)
                except UnicodeDecodeError as error:
                    raise DataError(f"{where}: not UTF-8: {error.reason}") from None
            advance(file.size_bytes * len(batch) // table.metadata.num_rows)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file.path}: damaged .parquet file: {error}") from None


def _ended(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks that hold something, then b"" once."""
    yield from filter(None, chunks)
    yield b""


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []  # the pieces of a line whose end has not come yet
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        held.append(first)
        if rest:
            yield b"".join(held)
            yield from rest[:-1]
            held = [rest[-1]]
    yield b"".join(held)


def _checked(text: object, where: str, column: str) -> str:
    if not isinstance(text, str):
        raise DataError(f"{where}: {column!r} is {type(text).__name__}, not text; set data.text_column")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f"{where}: not text: {half} is half of a surrogate pair") from None
    return text


def _undecodable(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    byte = f"0x{error.object[error.start]:02x}"
    return DataError(f"{path}:{line}: not UTF-8 ({byte}: {error.reason}); convert the file to UTF-8")
