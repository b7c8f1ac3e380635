"""The tokenizer gives every text back, byte for byte, however it is cut, and assumes no special id."""

from __future__ import annotations

import io
import itertools
import os
import sys
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from training import tokenizer as tokenizer_module
from training.sources import DataError
from training.tokenizer import Tokenizer, train

TEXT = io.open(os.__file__, encoding="utf-8", newline="").read() * 2  # noqa: UP020

AWKWARD = [
    "",
    " ",
    "  two  and   three   ",
    "\ttab\t\t\ttabs \t mixed",
    "line\r\nline\r\n\r\nlone \r and \n\n\n",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 é ﬁ ① Ａ \u00a0\u3000\u200b\ufeff",
    "NUL \0 and \0\0 and \0",
    "<s></s><unk><pad><0x00><0x0A> <s> </s>",
    "\u2581",
    "a\u2581b \u2581 c\u2581\u2581 \u2581",
    "\ufeffwith a byte order mark",
    "\u2585 \ue000 \ufffd \uffff \U0010ffff",
    "日本語のテキスト Ελληνικά русский العربية",
    " " * 5000 + "x" + "\n" * 5000,
]


def trained(text: str = TEXT, **options: Any) -> bytes:
    """A model by sentencepiece's own trainer, with the options of someone else."""
    model = io.BytesIO()
    given: dict[str, Any] = {"vocab_size": 400, "byte_fallback": True, "minloglevel": 2, "model_type": "bpe", **options}
    sentences = iter(text[at : at + 4000] for at in range(0, len(text), 4000))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **given)
    return model.getvalue()


@pytest.fixture(scope="module")
def model() -> bytes:
    return train([TEXT], 600)


@pytest.fixture(scope="module")
def tokenizer(model: bytes) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture(scope="module")
def others() -> dict[str, Tokenizer]:
    """Models trained elsewhere: each rewrites or adds something when sentencepiece itself uses it."""
    options: dict[str, dict[str, Any]] = {
        "llama": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        "t5": {"normalization_rule_name": "nmt_nfkc", "model_type": "unigram"},
        "lower": {"normalization_rule_name": "nfkc_cf", "bos_id": 3, "eos_id": 7, "unk_id": 5, "pad_id": 0},
        "symbols": {"user_defined_symbols": ["<user>", "\n\n"], "split_by_whitespace": False},
        "suffix": {"treat_whitespace_as_suffix": True},
    }
    return {name: Tokenizer(trained(**given), name) for name, given in options.items()}


@pytest.mark.parametrize("text", AWKWARD)
def test_decode_of_encode_is_the_text(tokenizer: Tokenizer, others: dict[str, Tokenizer], text: str) -> None:
    for each in (tokenizer, *others.values()):
        ids = each.encode(text)
        assert each.decode(ids) == text
        assert each.decode(ids.tolist()) == text


def test_every_character_of_unicode_comes_back(tokenizer: Tokenizer, others: dict[str, Tokenizer]) -> None:
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    assert tokenizer.decode(tokenizer.encode("".join(characters))) == "".join(characters)
    for each in others.values():
        some = "".join(characters[:20_000]) + " x".join(characters[:10_000])
        assert each.decode(each.encode(some)) == some


characters = st.sampled_from(list("\t\n\r \0\u2581<s>/unk0xA de:()=éßﬁ日\U0001f469\u200d\u0301\ufeff"))
texts = st.text(st.one_of(characters, st.characters(exclude_categories=["Cs"])), max_size=300)


@settings(max_examples=300, deadline=None)
@given(text=texts)
@example(text="\u2581 \u2581\0 \0\u2581")
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=texts, more=texts)
def test_ids_are_those_of_sentencepiece_for_the_whole_text(tokenizer: Tokenizer, text: str, more: str) -> None:
    text = (text + more).replace("\0", "").replace("\u2581", "")
    whole = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    assert tokenizer.encode(text).tolist() == whole.encode(text)


def test_ids_of_a_long_document_are_those_of_sentencepiece(tokenizer: Tokenizer) -> None:
    whole = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    assert tokenizer.encode(TEXT).tolist() == whole.encode(TEXT)
    dense = "".join(TEXT.split())  # one word of 60,000 characters, cut where no piece lies across
    assert len(dense) > 3 * tokenizer_module._LONGEST_WORD
    assert tokenizer.encode(dense).tolist() == whole.encode(dense)


@settings(max_examples=200, deadline=None)
@given(text=texts, times=st.integers(1, 20), block=st.integers(9, 200), longest=st.integers(1, 8))
def test_ids_do_not_depend_on_where_a_document_is_cut(
    model: bytes, text: str, times: int, block: int, longest: int
) -> None:
    """Also where words are so long that they are cut: the places depend on the word alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_LONGEST_WORD", longest)
        tokenizer = Tokenizer(model)
        rest, parts = text * times, []
        while len(rest) > block:
            stop = tokenizer.boundary(rest[:block])
            assert 0 < stop <= block
            parts.append(rest[:stop])
            rest = rest[stop:]
        ids = np.concatenate([tokenizer.encode(part) for part in [*parts, rest]])
        assert ids.tolist() == tokenizer.encode(text * times).tolist()
        assert tokenizer.decode(ids) == text * times


def test_what_was_encoded_before_does_not_matter(model: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Tokenizer(model).encode(TEXT)
    monkeypatch.setattr(tokenizer_module, "_REMEMBERED", 100)
    forgetful = Tokenizer(model)
    for text in ("something else", TEXT[::-1], TEXT):
        ids = forgetful.encode(text)
    assert (ids == fresh).all()
    assert len(forgetful._ids) < len(Tokenizer(model).encode(TEXT))


def test_text_never_spells_a_special_id(tokenizer: Tokenizer, others: dict[str, Tokenizer]) -> None:
    for each in (tokenizer, *others.values()):
        pieces = each._pieces
        special = [id for id in range(each.vocab_size) if pieces.is_control(id) or pieces.is_unknown(id)]
        assert each.eod in special
        text = "".join(pieces.id_to_piece(id) for id in special) * 2
        assert not set(each.encode(text).tolist()) & set(special)
        assert each.decode(special) == ""


def test_the_end_of_document_is_the_models_own(tokenizer: Tokenizer, others: dict[str, Tokenizer]) -> None:
    assert others["lower"].eod == 7
    assert others["llama"].eod == 2
    whole = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    assert tokenizer.eod == whole.eos_id() >= 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"eos_id": -1}, "no end-of-sequence id"),
        ({"byte_fallback": False, "vocab_size": 200}, "0 of the 256 byte pieces"),
    ],
)
def test_a_model_that_cannot_serve_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"given.model: has {problem}"):
        Tokenizer(trained(**options), "given.model")


def test_a_file_that_is_no_whole_model_is_named(tmp_path, model: bytes) -> None:
    path = tmp_path / "given.model"
    for content in (b"", b"\0", b"some text\n" * 100, model[: len(model) // 2], model[:-3]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="given.model: not a whole sentencepiece"):
            Tokenizer.load(path)
    with pytest.raises(DataError, match="missing.model: there is no such file; name a sentencepiece"):
        Tokenizer.load(tmp_path / "missing.model")
    with pytest.raises(DataError, match="/dev/zero: is a device or a pipe, not a file"):
        Tokenizer.load("/dev/zero")


def test_a_model_that_loses_text_is_an_error_not_a_loss(model: bytes) -> None:
    tokenizer = Tokenizer(model, "lossy.model")
    tokenizer._bytes[tokenizer.encode("x")[0]] = b"y"
    with pytest.raises(DataError, match=r"lossy.model: turns ' xyz' into ' yyz'"):
        tokenizer.encode("some xyz")


def test_ids_take_two_bytes_up_to_65536_and_four_beyond(model: bytes) -> None:
    tokenizer = Tokenizer(model)
    unused = b"\x0a\x09\x0a\x05%05d\x18\x05"  # pieces { piece: "00000" type: UNUSED }
    largest = model + b"".join(unused % n for n in range((1 << 16) - tokenizer.vocab_size))
    assert Tokenizer(largest).vocab_size == 1 << 16
    assert Tokenizer(largest).encode("text").dtype == np.uint16
    larger = Tokenizer(largest + unused % 99999)
    assert larger.encode("text").dtype == np.uint32
    assert larger.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_training_gives_the_same_model_for_the_same_text_and_is_quiet(capfd: pytest.CaptureFixture) -> None:
    pieces = ["\0\u2581" + TEXT[at : at + 999] for at in range(0, len(TEXT), 999)]
    assert train(pieces, 500) == train(iter(pieces), 500)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("texts", "size", "advice"),
    [
        ([TEXT], 100_000, r"= 100000: this text allows at most \d{4}; write that"),
        (["a few words"], 400, r"= 400: this text allows at most \d{3}; write that"),
        ([TEXT, *map(chr, range(0x4E00, 0x5000))], 400, r"= 400: this text's characters alone take \d{3};"),
        ([], 400, "there is too little text"),
        (["", "\0\0", "\n"], 400, "there is too little text"),
    ],
)
def test_a_size_the_text_does_not_allow_is_an_error_that_says_which_would(texts, size, advice) -> None:
    with pytest.raises(DataError, match=advice):
        train(texts, size)


@pytest.mark.parametrize("error", [DataError("damaged"), OSError("gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [[], [TEXT]])
def test_what_the_texts_raise_comes_before_what_the_trainer_makes_of_it(error, before) -> None:
    def texts():
        yield from before
        raise error

    with pytest.raises(type(error)) as caught:
        train(texts(), 400)
    assert caught.value is error


def test_indentation_is_few_tokens(tokenizer: Tokenizer) -> None:
    assert [len(tokenizer.encode(" " * n)) for n in (1, 4, 8)] == [1, 1, 1]
    lines = itertools.islice((line for line in TEXT.splitlines(keepends=True) if line.strip()), 500)
    text = "".join(lines)
    assert len(text) / len(tokenizer.encode(text)) > 2.2
