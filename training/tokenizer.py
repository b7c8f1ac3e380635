"""A sentencepiece model used as a lossless code: decode(encode(text)) == text, for every text.

sentencepiece alone is not: it writes a space as U+2581, so that a real U+2581 comes back as a space, and a
model may rewrite, add or drop characters. Here U+2581 and NUL go through their UTF-8 bytes, a model's own
normalisation is switched off, and every word is checked when it is first met: a loss is an error.
"""

from __future__ import annotations

import io
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from training.sources import DataError, no_file

_SPACE = "\u2581"  # how sentencepiece writes " " inside a piece
_ODD = re.compile(f"([\0{_SPACE}]+)")  # characters it cannot hold: these go through their UTF-8 bytes
# A word is some spaces and what follows up to the next one. No piece of a model trained here reaches from one
# word into the next, so words are encoded apart and remembered: their ids are those of the whole text.
_WORD = re.compile(" *[^ ]+| +")
_LONGEST_WORD = 1 << 14  # characters; sentencepiece slows down on longer ones
_REMEMBERED = 1 << 20  # characters of words that are remembered
# A protobuf message followed by another is the two merged, the later value counting. This one says
# normalizer_spec { name: "identity" precompiled_charsmap: "" add_dummy_prefix: false
#                   remove_extra_whitespaces: false escape_whitespaces: true }
_IDENTITY = b"\x0a\x08identity\x12\x00\x18\x00\x20\x00\x28\x01"
_KEEP_TEXT = b"\x1a" + bytes([len(_IDENTITY)]) + _IDENTITY


class Tokenizer:
    """`vocab_size` ids; `eod`, the id that ends a document, is the model's own end-of-sequence.

    `name` is what errors call the model. Raises DataError for a model without eos or without all byte pieces.
    """

    def __init__(self, model: bytes, name: str = "tokenizer") -> None:
        self.name = name
        self.model = model.removesuffix(_KEEP_TEXT) + _KEEP_TEXT
        try:
            sentencepiece.SentencePieceProcessor(model_proto=model or b"empty")  # before anything is added
            # One thread: parallel work is over processes.
            pieces = sentencepiece.SentencePieceProcessor(model_proto=self.model, num_threads=1)
        except RuntimeError:
            raise DataError(f"{name}: not a whole sentencepiece .model file") from None
        self._pieces = pieces
        self.vocab_size: int = pieces.vocab_size()
        self.eod: int = pieces.eos_id()
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self._code = self.dtype.char
        if self.eod < 0:
            raise DataError(f"{name}: has no end-of-sequence id; train it with an eos_id, or give another")
        self._bytes = [self._bytes_of(id) for id in range(self.vocab_size)]  # what an id stands for
        self._bytes[self.eod] = b""  # text that spells it must not end a document
        self._byte_ids = {self._bytes[id]: id for id in range(self.vocab_size) if pieces.is_byte(id)}
        if len(self._byte_ids) != 256:
            raise DataError(
                f"{name}: has {len(self._byte_ids)} of the 256 byte pieces, so some text cannot be encoded;"
                " train it with byte_fallback=true, or give another"
            )
        # Two neighbouring characters inside some piece: between any others, no piece can lie across a cut.
        words = (self._bytes[id].decode(errors="ignore") for id in range(self.vocab_size))
        self._joined = {word[at : at + 2] for word in words for at in range(len(word) - 1)}
        self._ids: dict[str, bytes] = {}  # word -> its ids, as bytes of self.dtype
        self._remembered = 0

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        if not os.path.isfile(path):  # a device may have no end
            raise DataError(f"{path}: {no_file(path)}; name a sentencepiece .model file")
        try:
            return cls(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] of the text, uint16 or uint32 by vocabulary; no special ids among them."""
        words = _WORD.findall(text)
        if self._remembered > _REMEMBERED:
            self._ids.clear()
            self._remembered = 0
        self._learn([word for word in set(words) if word not in self._ids])
        return np.frombuffer(b"".join([self._ids[word] for word in words]), self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids; special ids are nothing, and half a character is U+FFFD."""
        return self._spell(np.asarray(ids).tolist()).decode(errors="replace")

    def boundary(self, text: str) -> int:
        """A place to cut a text that goes on: ids of both sides together are those of the whole.

        `text` must be longer than the longest word, 16384 characters. The last one before a word, if any.
        """
        spaces = len(text[: text.rfind(" ") + 1].rstrip(" "))
        return spaces or self._cut(text, 0)

    def _learn(self, words: list[str]) -> None:
        plain = [word for word in words if len(word) <= _LONGEST_WORD and not _ODD.search(word)]
        odd = [word for word in words if len(word) > _LONGEST_WORD or _ODD.search(word)]
        encoded = self._pieces.encode(plain) + [self._encode_odd(word) for word in odd]
        for word, ids in zip(plain + odd, encoded, strict=True):
            if self._spell(ids) != word.encode():
                lost = f"turns {word[:40]!r} into {self.decode(ids)[:40]!r}"
                raise DataError(f"{self.name}: {lost}; give another .model")
            self._ids[word] = array(self._code, ids).tobytes()
        self._remembered += sum(map(len, words))

    def _encode_odd(self, word: str) -> list[int]:
        """Ids of a word that is very long or holds characters which go through their bytes."""
        ids: list[int] = []
        for part in self._cuts(word):
            for piece in _ODD.split(part):
                if _ODD.match(piece):
                    ids += [self._byte_ids[bytes([byte])] for byte in piece.encode()]
                else:
                    ids += self._pieces.encode(piece)
        return ids

    def _cuts(self, word: str) -> Iterator[str]:
        start = 0
        while len(word) - start > _LONGEST_WORD:
            stop = self._cut(word, start)
            yield word[start:stop]
            start = stop
        yield word[start:]

    def _cut(self, word: str, start: int) -> int:
        """Where a word too long is cut: where no piece can lie across, or else at the limit all the same."""
        limit = start + _LONGEST_WORD
        for at in range(limit, limit - _LONGEST_WORD // 2, -1):
            if word[at - 1 : at + 1] not in self._joined:
                return at
        return limit

    def _spell(self, ids: list[int]) -> bytes:
        return b"".join(map(self._bytes.__getitem__, ids))

    def _bytes_of(self, id: int) -> bytes:
        piece = self._pieces.id_to_piece(id)
        if self._pieces.is_byte(id):
            return bytes([int(piece[1:-1], 16)])
        if self._pieces.is_control(id) or self._pieces.is_unknown(id):
            return b""
        return piece.replace(_SPACE, " ").encode()


def train(texts: Iterable[str], vocab_size: int) -> bytes:
    """A byte-pair sentencepiece model of `vocab_size` ids for texts like these; the same for the same texts.

    Raises DataError, with the nearest possible size, when the texts do not allow that many or that few ids;
    what `texts` raises comes first.
    """
    model = io.BytesIO()
    raised: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts, raised),
            model_writer=model,
            model_type="bpe",  # trained in seconds, and exact when cut into words
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation in one piece
            max_sentence_length=1 << 20,
            num_threads=1,
            minloglevel=2,  # quiet
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
        )
    except RuntimeError as error:
        if raised:
            raise raised[0] from None
        advice = "there is too little text"
        if most := re.search(r"<= (\d+)", str(error)):
            advice = f"this text allows at most {most[1]}; write that, or give more text"
        elif least := re.search(r"\d+ vs (\d+)", str(error)):
            advice = f"this text's characters alone take {least[1]}; write more than that"
        raise DataError(f"data.tokenizer_vocab_size = {vocab_size}: {advice}") from None
    return model.getvalue()


def _sentences(texts: Iterable[str], raised: list[BaseException]) -> Iterator[str]:
    """What to train on; sentencepiece turns any error into one of its own, so it is put into `raised` too."""
    try:
        for text in texts:
            text = text.replace("\0", "").replace(_SPACE, " ")
            for at in range(0, len(text), 4096):
                yield text[at : at + 4096]
    except (Exception, KeyboardInterrupt) as error:
        raised.append(error)
        raise
