"""Sources become tokens without loss, tokens become batches in which every token counts once per epoch."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training import data as data_module
from training import sources as sources_module
from training import tokenise as tokenise_module
from training.data import Batches, DataError, Dataset, _shuffled, prepare
from training.schema import Data
from training.sources import STDLIB, find, read, sample
from training.tokenizer import Tokenizer, train

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

STDLIB_TEXT = Path(os.__file__).read_text(encoding="utf-8")
AWKWARD = [
    "\ttabs\t\r\n",
    "  runs   of  spaces ",
    "emoji 👩‍👩‍👧‍👦",
    "NUL \0",
    "<s> </s>",
    "\u2581 x\u2581",
    "\ufeffbom",
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.model"
    path.write_bytes(train([STDLIB_TEXT], 500))
    return path


@pytest.fixture
def settings(tmp_path: Path, model: Path):
    """Data settings for these sources, with a cache of their own and a tokenizer that is there already."""

    def make(*sources: object, **changes: Any) -> Data:
        given: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "tokenizer": str(model), **changes}
        return Data(sources=tuple(map(str, sources)), **given)

    return make


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of 40 small documents of different lengths."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(40):
        (folder / f"{n:02}.txt").write_text(STDLIB_TEXT[n * 300 : n * 300 + 50 + n * 17], newline="")
    return folder


@pytest.fixture
def dataset(settings, texts: Path) -> Dataset:
    return Dataset(prepare(settings(texts, validation_fraction=0.2)))


def documents(dataset: Dataset) -> list[str]:
    return [dataset.tokenizer.decode(dataset.document(n)) for n in range(len(dataset.ends))]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    return path


def left_in(settings: Data) -> list[str]:
    cache = Path(settings.cache_dir)
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


# Sources


def test_every_document_of_every_kind_of_source_comes_back_exactly(tmp_path: Path, settings) -> None:
    texts = [*AWKWARD, "ordinary text\n"]
    jsonl = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl.read_bytes()))
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), tmp_path / "a.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    for n, text in enumerate(texts):
        (folder / f"{n}.txt").write_bytes(text.encode())
    for source in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "folder", "folder/*.txt"):
        assert documents(Dataset(prepare(settings(tmp_path / source)))) == texts, source


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    files = find([STDLIB])
    names = {"/".join(file.path.parts[-2:]) for file in files}
    assert {"json/decoder.py", "asyncio/events.py"} <= names
    assert all(file.path.suffix == ".py" for file in files)
    folders = {part for file in files for part in file.path.parts}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert sum(file.size_bytes for file in files) > 5_000_000
    assert files == find([STDLIB])


def test_a_folder_gives_its_text_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/c.PY", "c.py.gz", ".git/x.txt", "a/.hidden.py", "image.png", "a.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = [str(file.path.relative_to(tmp_path)) for file in find([str(tmp_path)])]
    assert found == ["a/c.PY", "a/z.md", "b.txt", "c.py.gz"]
    again = find([str(tmp_path / "b.txt"), str(tmp_path), str(tmp_path / "**/*.md"), str(tmp_path / "image.png")])
    assert [file.path.name for file in again] == ["b.txt", "c.PY", "z.md", "c.py.gz", "image.png"]


def test_compressed_files_may_hold_several_streams_and_padding(tmp_path: Path) -> None:
    halves = b'{"text": "first"}\n{"text"', b': "second"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)) + b"\0" * 100_000)
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, halves)))
    for file in find([str(tmp_path)]):
        assert [part.text for part in read(file, "text")] == ["first", "second"]


BAD = {
    "bytes.txt": (b"one\ntwo\nthr\xffee\n", "bytes.txt:3: not UTF-8 .0xff"),
    "cut.txt": (b"one\ntwo \xe2\x82", "cut.txt:2: not UTF-8 .0xe2: unexpected end"),
    "late.txt": (b"x\n" * 1_500_000 + b"\x80", "late.txt:1500001: not UTF-8"),
    "bytes.jsonl": (b'{"text": "a"}\n{"text": "\xc3("}\n', "bytes.jsonl:2: not UTF-8 .0xc3"),
    "json.jsonl": (b'{"text": "a"}\n\n{"text": "b"\n', "json.jsonl:3: not JSON: .*at character 13"),
    "deep.jsonl": (b"[" * 200_000 + b"\n", "deep.jsonl:1: not JSON"),
    "column.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "column.jsonl:2: no field 'text', .* fields body; set"),
    "list.jsonl": (b'["text"]\n', "list.jsonl:1: no field 'text', the record has no fields"),
    "number.jsonl": (b'{"text": "a"}\n{"text": 7}\n', "number.jsonl:2: 'text' is int, not text"),
    "half.jsonl": (b'{"text": "\\ud83d"}\n', r"half.jsonl:1: not text: \\ud83d is half of a surrogate pair"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 9)[:-9], "cut.jsonl.gz:[0-9]+: .* is cut short here"),
    "cut.txt.gz": (gzip.compress(b"some text\n" * 99)[:20], "cut.txt.gz:[0-9]+: .* is cut short here"),
    "bad.txt.gz": (b"not gzip at all", "bad.txt.gz:1: the .gz file is damaged here"),
    "crc.txt.gz": (gzip.compress(b"a\n" * 99)[:-8] + b"12345678", "crc.txt.gz:[0-9]+: .* damaged here"),
    "cut.txt.zst": (zstandard.compress(b"some text\n" * 99)[:-3], "cut.txt.zst:[0-9]+: .* is cut short here"),
    "bad.txt.zst": (b"not zstd at all", "bad.txt.zst:1: the .zst file is damaged here"),
    "bad.parquet": (b"PAR1 not really PAR1", "bad.parquet: damaged .parquet file"),
    "empty.txt": (b"", "empty.txt: holds no text"),
    "blank.jsonl": (b"\n\n", "blank.jsonl: no document holds any text"),
    "void.jsonl": (b'{"text": ""}\n' * 3, "void.jsonl: no document holds any text"),
    "one.txt": (b"a single document", "one.txt: one document .* cannot be split"),
    "same.jsonl": (b'{"text": "same"}\n' * 9, "same.jsonl: one document .or copies of one. cannot be split"),
}


GOOD = b"".join(json.dumps({"text": STDLIB_TEXT[n * 90 : n * 90 + 200]}).encode() + b"\n" for n in range(60))
for name, tail, message in (
    ("late", b'{"text": "a', ":61: not JSON: "),
    ("nan", b'{"text": NaN}\n', ":61: 'text' is float, not text"),
    ("list", b'{"text": ["a"]}\n', ":61: 'text' is list, not text"),
    ("nested", b'{"text": ' + b"[" * 200_000, ":61: not JSON"),
    ("huge", b'{"text": ' + b"9" * 5000 + b"}", ":61: not JSON"),
    ("utf8", b'{"text": "\xe2\x82', ":61: not UTF-8 .0xe2"),
):
    BAD[f"{name}.jsonl"] = (GOOD + tail, f"{name}.jsonl{message}")
BAD["short.jsonl.gz"] = (gzip.compress(GOOD)[:-9], "short.jsonl.gz:[0-9]+: .* is cut short here")
BAD["trail.jsonl.gz"] = (gzip.compress(GOOD) + b"garbage", "trail.jsonl.gz:61: the .gz file is damaged here")
SMALL = {"same.jsonl"}  # too little to train a tokenizer on, and that is said first


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_that_names_the_file_and_leaves_nothing(name, tmp_path, settings) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    for tokenizer in ({}, {"tokenizer": None, "tokenizer_vocab_size": 300}):
        given = settings(tmp_path / name, **tokenizer)
        small = tokenizer and name in SMALL
        with pytest.raises(DataError, match="this text allows at most" if small else message):
            prepare(given)
        assert left_in(given) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a", "b"]}, "a.parquet: no column 'text', the file has body; set data.text_column"),
        ({"text": ["a", None]}, "a.parquet: row 2: 'text' is NoneType, not text"),
        ({"text": [1, 2]}, "a.parquet: row 1: 'text' is int, not text"),
        ({"text": pyarrow.array([], pyarrow.string())}, "a.parquet: no document holds any text"),
        ({"text": ["", ""]}, "a.parquet: no document holds any text"),
    ],
)
def test_a_parquet_file_without_text_is_an_error_that_names_the_row(columns, message, tmp_path, settings) -> None:
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    for tokenizer in ({}, {"tokenizer": None, "tokenizer_vocab_size": 300}):
        with pytest.raises(DataError, match=message):
            prepare(settings(tmp_path / "a.parquet", **tokenizer))


def test_a_source_that_is_not_there_is_an_error(tmp_path: Path, settings) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image.png").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    for source, message in (
        (tmp_path / "missing.txt", "missing.txt: there is no such file or folder"),
        (tmp_path / "pipe", "pipe: is a device or a pipe, not a file; name a file or a folder"),
        ("/dev/zero", "/dev/zero: is a device or a pipe, not a file"),
        (tmp_path / "*.rs", "there is no such file or folder, nor does it match any"),
        (tmp_path / "folder", "no file in this folder ends in .bash .c"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(settings(source))


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, settings) -> None:
    path = tmp_path / "log.txt"
    path.write_text("one\n")
    file = find([str(path)])[0]
    parts = read(file, "text")
    next(parts)
    path.write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"log.txt: changed while it was read"):
        list(parts)


def test_the_sample_is_bounded_and_takes_from_every_part_of_the_sources(tmp_path: Path) -> None:
    for n in range(10):
        (tmp_path / f"{n}.txt").write_text(str(n) * (5 if n < 5 else 1000))
    taken = Counter("".join(sample(find([str(tmp_path)]), "text", 500)))
    assert sum(taken.values()) == 500
    assert [taken[str(n)] for n in range(10)] == [5] * 5 + [95] * 5


# Tokens


def test_a_document_longer_than_a_block_has_the_ids_of_the_whole(tmp_path, settings, monkeypatch) -> None:
    """CASES 34, for documents read in chunks and for one long record."""
    text = STDLIB_TEXT + "".join(AWKWARD) + "x" * 9000 + " " * 9000 + "".join(STDLIB_TEXT.split())
    (tmp_path / "a.txt").write_bytes(text.encode())
    write_jsonl(tmp_path / "b.jsonl", [text, "another", "ab " * 20_000])
    monkeypatch.setattr(tokenise_module, "BLOCK", 20_000)
    monkeypatch.setattr(sources_module, "_CHUNK_BYTES", {"": 777})
    dataset = Dataset(prepare(settings(tmp_path / "a.txt", tmp_path / "b.jsonl")))
    assert dataset.document(0).tolist() == dataset.tokenizer.encode(text).tolist()
    assert documents(dataset) == [text, text, "another", "ab " * 20_000]


def test_the_number_of_processes_does_not_change_a_byte(settings, texts, tmp_path, monkeypatch) -> None:
    one = prepare(settings(texts, cache_dir=str(tmp_path / "one"), workers=1))
    monkeypatch.setattr(tokenise_module, "_SMALL_BYTES", 0)
    monkeypatch.setattr(tokenise_module, "BLOCK", 1000)
    three = prepare(settings(texts, cache_dir=str(tmp_path / "three"), workers=3))
    assert one.name == three.name
    for path in one.iterdir():
        assert path.read_bytes() == (three / path.name).read_bytes(), path.name


def test_memory_does_not_grow_with_the_file(tmp_path: Path, settings, monkeypatch) -> None:
    monkeypatch.setattr(tokenise_module, "BLOCK", 10_000)
    monkeypatch.setattr(sources_module, "_CHUNK_BYTES", {"": 10_000})
    monkeypatch.setattr(data_module, "COUNTED", 10_000)
    peaks = []
    for times in (5, 50):
        (tmp_path / "a.txt").write_text(STDLIB_TEXT * times)
        write_jsonl(tmp_path / "b.jsonl", [STDLIB_TEXT[:5000]] * times)
        tracemalloc.start()
        prepare(settings(tmp_path / "a.txt", tmp_path / "b.jsonl"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 300_000  # the second file is 1.8 MB longer


def test_a_second_call_prepares_nothing_again(settings, texts: Path, monkeypatch) -> None:
    first = prepare(settings(texts))
    monkeypatch.setattr(data_module, "_fill", lambda *_: pytest.fail("prepared again"))
    assert prepare(settings(texts, workers=2)) == first
    assert left_in(settings(texts)) == [first.name]


def test_the_key_follows_the_sources_and_every_setting_that_matters(settings, texts: Path) -> None:
    folders = {prepare(settings(texts))}
    for changes in ({"validation_fraction": 0.3}, {"max_documents": 7}, {"tokenizer": None}):
        size = {"tokenizer_vocab_size": 350} if "tokenizer" in changes else {}
        folders.add(prepare(settings(texts, **changes, **size)))
    (texts / "00.txt").write_text("changed")
    folders.add(prepare(settings(texts)))
    (texts / "new.txt").write_text("new")
    folders.add(prepare(settings(texts)))
    assert len(folders) == 6
    assert len(Dataset(prepare(settings(texts, max_documents=7))).ends) == 7


def test_a_tokenizer_is_trained_when_none_is_given_and_is_the_same_each_time(settings, texts, tmp_path) -> None:
    made = [
        prepare(settings(texts, tokenizer=None, tokenizer_vocab_size=350, cache_dir=str(tmp_path / name)))
        for name in "ab"
    ]
    for path in made[0].iterdir():
        assert path.read_bytes() == (made[1] / path.name).read_bytes()
    dataset = Dataset(made[0])
    assert dataset.vocab_size == 350
    assert documents(dataset) == [path.read_bytes().decode() for path in sorted(texts.iterdir())]


def test_the_end_of_every_document_is_the_tokenizers_eod(dataset: Dataset) -> None:
    """CASES 35: nothing assumes 0 or 2."""
    assert (dataset.tokens[dataset.ends - 1] == dataset.eod).all()
    assert (dataset.tokens == dataset.eod).sum() == len(dataset.ends)


SCRIPT = """
import sys, time
from training import data, tokenise
from training.schema import Data
if __name__ == "__main__":
    tokenise._SMALL_BYTES = 0
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        print(data.prepare(Data.model_validate_json(sys.argv[1], strict=False), show=True))
    except data.DataError as error:
        sys.exit(f"error: {error}")
"""


def start(tmp_path: Path, repo_root: Path, settings: Data, before: str = "") -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text(before + SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script, settings.model_dump_json()],
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_of_several_processes_one_prepares_and_all_get_the_data(tmp_path, settings, texts, repo_root) -> None:
    given = settings(texts, workers=1)
    processes = [start(tmp_path, repo_root, given) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({out for out, _ in outputs}) == 1
    assert sum("Tokenised" in err for _, err in outputs) == 1
    assert left_in(given) == [Path(outputs[0][0].strip()).name]
    assert len(Dataset(outputs[0][0].strip()).ends) == 40


def test_after_a_kill_the_next_call_starts_over_and_no_process_stays(tmp_path, settings, repo_root) -> None:
    (tmp_path / "a.txt").write_text(STDLIB_TEXT * 150)
    (tmp_path / "b.txt").write_text("another")
    given = settings(tmp_path / "a.txt", tmp_path / "b.txt", workers=2)
    process = start(tmp_path, repo_root, given)
    assert process.stdin is not None
    process.stdin.write("go\n")
    tokens = Path(given.cache_dir)
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size > 200_000 for path in tokens.glob("*.tmp/tokens.npy")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [name.endswith(".tmp") for name in left_in(given)] == [True]
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    smaller = settings(tmp_path / "a.txt", tmp_path / "b.txt")
    assert prepare(smaller).name == left_in(given)[0]
    assert len(left_in(given)) == 1
    assert len(Dataset(prepare(smaller)).ends) == 2


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, settings, texts, repo_root) -> None:
    given = settings(texts)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
    process = start(tmp_path, repo_root, given, limit)
    _, err = process.communicate("go\n", timeout=60)
    assert process.returncode == 1
    assert "error: " in err and "File too large; token files take 2 to 4 bytes per token" in err
    assert "Traceback" not in err
    assert left_in(given) == []


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("tokens.npy", lambda b: b[:-1], "tokens.npy: cannot be mapped"),
        ("tokens.npy", lambda b: b[:100], "tokens.npy: cannot be mapped"),
        ("tokens.npy", lambda b: b + b"\0\0", r"tokens.npy: has \d+ bytes, not \d+"),
        ("tokens.npy", lambda b: b"", "tokens.npy: cannot be mapped"),
        ("tokens.npy", lambda b: b"\x80\x04K\x01." + b, "tokens.npy: cannot be mapped: .*contains pickled"),
        ("tokens.npy", lambda b: b.replace(b"<u2", b"<i2"), r"tokens.npy: is not uint16 \["),
        ("tokens.npy", lambda b: b.replace(b"<u2", b"|O8"), "tokens.npy: cannot be mapped"),
        ("ends.npy", lambda b: b[:128] + b[136:] + b[128:136], "ends.npy: does not fit tokens.npy"),
        ("validation.npy", lambda b: None, "validation.npy: is missing"),
        ("counts.npy", lambda b: b.replace(b"(2,", b"(3,"), r"counts.npy: "),
        ("tokenizer.model", lambda b: b[:-30], "tokenizer.model: not a whole sentencepiece"),
        ("tokenizer.model", lambda b: train([STDLIB_TEXT], 400), "tokenizer.model: is another tokenizer"),
        ("dataset.json", lambda b: b[:-20], "dataset.json: is not JSON"),
        ("dataset.json", lambda b: b"[]", "dataset.json: is not of .*waterline tokens"),
        ("dataset.json", lambda b: b.replace(b'"version": 1', b'"version": 2'), "dataset.json: is not of"),
        ("dataset.json", lambda b: b.replace(b'"tokens"', b'"token"'), "dataset.json: lacks a size"),
        ("dataset.json", lambda b: None, "no prepared data here"),
    ],
)
def test_damaged_data_is_named_when_it_is_opened(dataset: Dataset, name, change, problem) -> None:
    path = dataset.folder / name
    changed = change(path.read_bytes())
    path.unlink()
    if changed is not None:
        path.write_bytes(changed)
    with pytest.raises(DataError, match=problem):
        Dataset(dataset.folder)


def test_an_id_beyond_the_vocabulary_is_an_error_that_names_the_token(dataset: Dataset) -> None:
    number = int(dataset.ends[dataset.documents("train")[3]]) - 5
    with open(dataset.folder / "tokens.npy", "r+b") as file:
        file.seek(128 + 2 * number)
        file.write((500).to_bytes(2, "little"))
    batches = Batches(dataset.folder, "train", 100, 1, seed=0)
    with pytest.raises(DataError, match=rf"tokens.npy: token {number} is id 500, beyond the vocabulary of 500"):
        for index in range(len(batches)):
            batches.batch(index)


def test_what_a_killed_process_left_in_its_work_folder_is_no_hindrance(settings, texts: Path, monkeypatch) -> None:
    given = settings(texts)
    folder = prepare(given)
    folder.rename(folder.with_suffix(".tmp"))
    (folder.with_suffix(".tmp") / "a" / "b").mkdir(parents=True)
    (folder.with_suffix(".tmp") / "link").symlink_to(texts)
    assert prepare(given) == folder
    assert left_in(given) == [folder.name]
    assert len(list(folder.iterdir())) == 6 and len(list(texts.iterdir())) == 40


def test_a_cache_that_cannot_be_is_named_by_its_setting(settings, texts: Path) -> None:
    file = texts / "00.txt"
    for cache in (file, file / "inside"):
        given = settings(texts, cache_dir=str(cache))
        with pytest.raises(DataError, match=f"data.cache_dir = {cache}: .*; name a folder that can be made"):
            prepare(given)
    with pytest.raises(DataError, match="data.cache_dir = ~nobody-here/x: there is no such user"):
        prepare(settings(texts, cache_dir="~nobody-here/x"))


# Batches


def stream_of(dataset: Dataset, split: Any, epoch: int, seed: int) -> list[int]:
    """The tokens of one epoch, read in one batch."""
    batches = Batches(dataset, split, 1, 1, seed)
    tokens = batches.tokens_per_epoch
    whole = Batches(dataset, split, tokens, 1, seed)
    return whole.batch(epoch)[1][0].tolist()


def test_every_token_is_a_target_once_per_epoch(dataset: Dataset) -> None:
    train_documents = dataset.documents("train")
    for epoch in (0, 1, 7):
        stream = stream_of(dataset, "train", epoch, seed=3)
        ends = [at + 1 for at, token in enumerate(stream) if token == dataset.eod]
        found = [tuple(stream[a : b - 1]) for a, b in zip([0, *ends], ends, strict=False)]
        assert ends[-1] == len(stream)
        assert Counter(found) == Counter(tuple(dataset.document(n).tolist()) for n in train_documents)


@pytest.mark.parametrize(("seq_length", "micro_batch_size"), [(7, 1), (64, 3), (1000, 2)])
def test_batches_are_the_epochs_laid_end_to_end_and_cut_and_each_epochs_sequences_shuffled(
    dataset, seq_length, micro_batch_size
) -> None:
    epochs = [stream_of(dataset, "train", epoch, seed=1) for epoch in range(4)]
    stream, per_epoch = [token for epoch in epochs for token in epoch], len(epochs[0])
    starts = range(0, len(stream) - seq_length, seq_length)
    cut = [([dataset.eod, *stream][at : at + seq_length], stream[at : at + seq_length]) for at in starts]
    batches = Batches(dataset, "train", seq_length, micro_batch_size, seed=1)
    got = []
    for index in range(3 * per_epoch // (seq_length * micro_batch_size)):
        tokens, targets = batches.batch(index)
        assert tokens.shape == targets.shape == (micro_batch_size, seq_length)
        assert tokens.dtype == targets.dtype == torch.int64
        got += zip(tokens.tolist(), targets.tolist(), strict=True)
    for epoch in range(2):
        first, end = (-(-e * per_epoch // seq_length) for e in (epoch, epoch + 1))
        assert sorted(got[first:end]) == sorted(cut[first:end])
        assert end - first < 4 or got[first:end] != cut[first:end]


def test_order_comes_from_seed_and_epoch_alone(dataset: Dataset) -> None:
    first = stream_of(dataset, "train", 0, seed=0)
    assert first == stream_of(Dataset(dataset.folder), "train", 0, seed=0)
    assert len({tuple(stream_of(dataset, "train", e, seed=s)) for e in range(3) for s in range(3)}) == 9
    # Written down, so that a new version of numpy cannot change what a seed means.
    order = np.argsort(np.random.PCG64(np.random.SeedSequence([5, 2])).random_raw(8), kind="stable")
    assert order.tolist() == [4, 7, 6, 0, 1, 5, 2, 3]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(dataset: Dataset, world_size: int) -> None:
    micro, steps, accumulation = 2, 3, 2
    global_batch = world_size * micro * accumulation
    one = Batches(dataset, "train", 33, 1, seed=0)
    ranks = [Batches(dataset, "train", 33, micro, 0, rank, world_size) for rank in range(world_size)]
    for step in range(steps):
        expected = [one.batch(step * global_batch + n)[1] for n in range(global_batch)]
        got = [
            row
            for k in range(accumulation)
            for rank in ranks
            for row in rank.batch(step * accumulation + k)[1].split(1)
        ]
        assert torch.equal(torch.cat(got), torch.cat(expected))


def test_any_step_is_reached_at_once_and_is_the_step_of_an_uninterrupted_run(dataset: Dataset) -> None:
    """CASES 36: resuming holds no more than the run did; the state is the step."""
    walked = Batches(dataset, "train", 100, 2, seed=0)
    passed = [walked.batch(index) for index in range(300)]
    for index in (299, 150, 0):
        resumed = Batches(dataset, "train", 100, 2, seed=0)
        assert all(map(torch.equal, resumed.batch(index), passed[index]))
        assert len(resumed._epochs) <= len(walked._epochs) <= 2
    began = time.monotonic()
    Batches(dataset, "train", 100, 2, seed=0).batch(10**12)
    assert time.monotonic() - began < 1


def test_a_million_tokens_from_a_corpus_shorter_than_that(dataset: Dataset) -> None:
    """CASES 37: memory grows with T, not with its square, and a short corpus repeats, each time reordered."""
    T = 1 << 20
    batches = Batches(dataset, "train", T, 1, seed=0)
    assert batches.tokens_per_epoch < T / 50 and len(batches) == 1
    tracemalloc.start()
    tokens, targets = batches.batch(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * T
    assert torch.equal(tokens[0, 1:], targets[0, :-1])
    assert targets.min() >= 0
    epochs = T // batches.tokens_per_epoch
    assert abs(int((targets == dataset.eod).sum()) - epochs * len(dataset.documents("train"))) <= 60


@pytest.mark.parametrize(("seq_length", "micro_batch_size", "world_size"), [(50, 2, 1), (64, 1, 3), (9999, 2, 2)])
def test_validation_is_one_pass_padded_at_its_end(dataset, seq_length, micro_batch_size, world_size) -> None:
    ranks = [
        Batches(dataset, "validation", seq_length, micro_batch_size, seed, rank, world_size)
        for seed, rank in enumerate(range(world_size))  # the seed does not matter
    ]
    got = [rank.batch(index) for index in range(len(ranks[0])) for rank in ranks]
    rows = [row for batch in got for row in zip(batch[0].tolist(), batch[1].tolist(), strict=True)]
    stream = stream_of(dataset, "validation", 0, seed=0)
    padding = len(rows) * seq_length - len(stream)
    tokens = [dataset.eod, *stream[:-1]] + [dataset.eod] * padding
    targets = stream + [-100] * padding
    starts = range(0, len(targets), seq_length)
    cut = [(tokens[at : at + seq_length], targets[at : at + seq_length]) for at in starts]
    assert sorted(rows) == sorted(cut)
    for index in (-1, len(ranks[0])):
        with pytest.raises(IndexError, match="validation micro-batch"):
            ranks[0].batch(index)


def test_no_document_is_in_both_splits_and_neither_is_empty(tmp_path: Path, settings) -> None:
    two = write_jsonl(tmp_path / "two.jsonl", ["first", "second"])
    for fraction in (1e-9, 0.5, 1 - 1e-9):
        dataset = Dataset(prepare(settings(two, validation_fraction=fraction)))
        assert [len(dataset.documents(split)) for split in ("train", "validation")] == [1, 1]
    lengths = write_jsonl(tmp_path / "lengths.jsonl", ["x" * n for n in (5000, 50, 200, 900)])
    dataset = Dataset(prepare(settings(lengths, validation_fraction=0.04)))
    assert not dataset.validation[0]  # the longest is for training, whatever its hash
    texts = [f"document {n % 500}" for n in range(1000)]
    dataset = Dataset(prepare(settings(write_jsonl(tmp_path / "many.jsonl", texts), validation_fraction=0.2)))
    train, validation = ({texts[n] for n in dataset.documents(split)} for split in ("train", "validation"))
    assert not train & validation and len(train | validation) == 500
    assert 60 < len(validation) < 140
    # More documents move none of those that are there already.
    more = write_jsonl(tmp_path / "more.jsonl", [f"new {n}" for n in range(300)] + texts)
    grown = Dataset(prepare(settings(more, validation_fraction=0.2)))
    assert (grown.validation[300:] == dataset.validation).all()


def test_unigram_entropy_is_that_of_the_validation_split_under_the_train_counts(dataset: Dataset) -> None:
    counts = {split: Counter(stream_of(dataset, split, 0, seed=0)) for split in ("train", "validation")}
    total = counts["train"].total() + dataset.vocab_size
    nats = -sum(n * math.log((counts["train"][id] + 1) / total) for id, n in counts["validation"].items())
    assert dataset.unigram_entropy() == pytest.approx(nats / counts["validation"].total(), rel=1e-12)
    assert 0 < dataset.unigram_entropy() < math.log(dataset.vocab_size)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 65, 1000])
def test_a_shuffle_is_a_permutation(count: int) -> None:
    orders = [[_shuffled(n, count, seed, epoch) for n in range(count)] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 64 or len({*map(tuple, orders)}) == 3


def test_a_million_documents_are_shuffled_once_per_epoch(dataset: Dataset) -> None:
    many, documents = Dataset(dataset.folder), 1_000_000
    many.tokens = np.tile(np.array([7, dataset.eod], "<u2"), documents)
    many.ends, many.validation = np.arange(2, 2 * documents + 2, 2), np.zeros(documents, bool)
    batches = Batches(many, "train", 1024, 4, seed=0)
    began = time.monotonic()
    for index in range(100):
        batches.batch(index)
    assert (time.monotonic() - began) / 100 < 0.05
    assert len(batches._epochs) == 1


# The program


def prepare_data(repo_root: Path, *words: str) -> subprocess.CompletedProcess:
    program = [sys.executable, "-X", "importtime", str(repo_root / "tools" / "prepare_data.py"), *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)


def test_the_program_says_what_it_prepared_and_where(tmp_path, texts, model, repo_root) -> None:
    overrides = [f"data.cache_dir={tmp_path / 'cache'}", f"data.sources=[{texts}]", f"data.tokenizer={model}"]
    (tmp_path / "tiny.yaml").write_text((repo_root / "recipes" / "quickstart.yaml").read_text())
    recipe = str(tmp_path / "tiny.yaml")
    text = Path(recipe).read_text().replace("  tokenizer_vocab_size: 4096\n", "")
    Path(recipe).write_text(text)
    first = prepare_data(repo_root, recipe, *overrides)
    assert first.returncode == 0, first.stderr
    assert "Tokenised" in first.stderr
    folder = next((tmp_path / "cache").iterdir())
    assert first.stdout.startswith(f"Data: {folder}\n  40 documents, ")
    again = prepare_data(repo_root, recipe, *overrides)
    assert again.stdout == first.stdout
    assert "Tokenised" not in again.stderr
    imported = {line.rsplit("|")[-1].strip() for line in again.stderr.splitlines()}
    assert not imported & {"torch", "deepspeed"}


def test_the_program_answers_bad_input_with_a_message(tmp_path: Path, repo_root: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"one\n\xff\n")
    words = [f"data.cache_dir={tmp_path / 'cache'}", f"data.sources=[{tmp_path / 'bad.txt'}]"]
    done = prepare_data(repo_root, "quickstart", *words)
    assert done.returncode == 2
    assert "error: " in done.stderr and "bad.txt:2: not UTF-8" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "cache").iterdir())


def test_a_tokenizer_given_is_used_and_its_file_checked(settings, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.model").write_bytes(b"bad")
    for name in ("bad.model", "missing.model"):
        with pytest.raises(DataError, match=f"{name}: "):
            prepare(settings(texts, tokenizer=str(tmp_path / name)))
    path = tmp_path / "other.model"
    path.write_bytes(train([STDLIB_TEXT], 444))
    dataset = Dataset(prepare(settings(texts, tokenizer=str(path))))
    assert dataset.vocab_size == 444
    assert dataset.tokenizer.model == Tokenizer.load(path).model
