"""A mode is one value: every name has one mode, every mode one name, and no other mode can be built."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.modes import KEEPABLE, NAMED, RECOMPUTABLE, Mode, parse, parse_layers


def in_order(choices, min_size=0):
    some = st.sets(st.sampled_from(choices), min_size=min_size)
    return some.map(lambda names: tuple(choice for choice in choices if choice in names))


GROUPINGS = st.one_of(st.tuples(st.sampled_from(["uniform", "block"]), st.integers(1, 200)), st.just(("sqrt", 1))).map(
    lambda pair: {"grouping": pair[0], "group": pair[1]}
)
FULL = st.one_of(st.tuples(in_order(KEEPABLE), st.sampled_from([None, "async"])), st.just(((), "deepspeed"))).flatmap(
    lambda pair: GROUPINGS.map(lambda group: Mode("full", keep=pair[0], offload=pair[1], **group))
)
PARTLY = st.builds(
    Mode, st.just("selective"), in_order(RECOMPUTABLE, min_size=1), offload=st.sampled_from([None, "async"])
)
NONE = st.builds(Mode, offload=st.sampled_from([None, "async"]))
MODES = st.one_of(FULL, PARTLY, NONE)
WORDS = ("none", "selective", "full", "sqrt", "uniform2", "block3", "offload", "deepspeed_offload")


@given(MODES)
def test_every_mode_has_a_name_that_reads_back_as_the_mode(mode):
    assert parse(str(mode)) == mode
    assert hash(parse(str(mode))) == hash(mode)


@given(MODES.flatmap(lambda mode: st.permutations(str(mode).split("+")[1:]).map(lambda rest: (mode, rest))))
def test_words_after_the_first_may_come_in_any_order(mode_and_rest):
    mode, rest = mode_and_rest
    assert parse("+".join([str(mode).split("+")[0], *rest])) == mode


@given(st.lists(st.sampled_from([*WORDS, *RECOMPUTABLE, *KEEPABLE]), max_size=4).map("+".join) | st.text(max_size=30))
def test_a_name_is_a_mode_with_a_settled_spelling_or_a_clear_error(name):
    try:
        mode = parse(name)
    except ValueError as error:
        assert repr(name) in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert parse(str(mode)) == mode


def test_no_two_modes_share_a_name():
    modes = []
    for recompute, grouping, group, offload in itertools.product(
        ("none", "selective", "full"), ("uniform", "block", "sqrt"), (1, 2), (None, "async", "deepspeed")
    ):
        for modules, keep in itertools.product(
            ((), ("core_attn",), ("norm", "mlp")), ((), ("attention",), ("qkv", "mlp_up"))
        ):
            try:
                modes.append(Mode(recompute, modules, keep, grouping, group, offload))
            except ValueError:
                continue
    assert len({str(mode) for mode in modes}) == len(modes) > 30


def test_the_named_modes_are_spelled_as_they_read_back_and_each_once():
    assert [str(parse(name)) for name in NAMED] == list(NAMED)
    assert len({parse(name) for name in NAMED}) == len(NAMED)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("none", Mode()),
        ("selective", Mode("selective", ("core_attn",))),
        ("core_attn", Mode("selective", ("core_attn",))),
        ("norm+activation", Mode("selective", ("norm", "activation"))),
        ("selective+activation+norm", Mode("selective", ("core_attn", "norm", "activation"))),
        ("full+uniform1", Mode("full")),
        ("full+block3", Mode("full", grouping="block", group=3)),
        ("full+offload+attention+sqrt", Mode("full", keep=("attention",), grouping="sqrt", offload="async")),
        ("full+deepspeed_offload", Mode("full", offload="deepspeed")),
    ],
)
def test_a_name_means_its_mode(name, mode):
    assert parse(name) == mode


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "starts with ''"),
        ("ful", "Did you mean 'full'?"),
        ("selective+nrom", "Did you mean 'selective+norm'?"),
        ("offload", "starts with 'offload'"),
        ("none+norm", "'none' does not take 'norm'; it takes offload"),
        ("selective+attention", "does not take 'attention'"),
        ("full+norm", "does not take 'norm'"),
        ("selective+deepspeed_offload", "does not take 'deepspeed_offload'"),
        ("selective+selective", "does not take 'selective'"),
        ("selective+core_attn", "'core_attn' is named twice"),
        ("norm+norm", "'norm' is named twice"),
        ("full+attention+attention", "'attention' is named twice"),
        ("full+offload+deepspeed_offload", "offload is named twice"),
        ("full+sqrt+block2", "one grouping only"),
        ("full+uniformK", "does not take 'uniformK'"),
        ("full+uniform0", "does not take 'uniform0'"),
        ("full+block-1", "does not take 'block-1'"),
        ("full+block", "does not take 'block'"),
        ("full+block\u0663", "does not take"),
        ("full+attention+deepspeed_offload", "DeepSpeed's offload keeps layer inputs only"),
        ("none ", "starts with 'none '"),
        ("None", "Did you mean 'none'?"),
    ],
)
def test_a_wrong_name_is_an_error_that_says_what_is_wrong(name, says):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is what is tested
        parse(name)
    assert says in str(error.value)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "half"},
        {"recompute": "selective"},
        {"modules": ("norm",)},
        {"recompute": "full", "modules": ("norm",)},
        {"recompute": "selective", "modules": ("nrom",)},
        {"recompute": "selective", "modules": ("norm", "core_attn")},
        {"recompute": "selective", "modules": ("norm", "norm")},
        {"recompute": "selective", "modules": ["norm"]},
        {"keep": ("attention",)},
        {"recompute": "selective", "modules": ("norm",), "keep": ("attention",)},
        {"recompute": "full", "keep": ("attn",)},
        {"recompute": "full", "keep": ("qkv", "attention")},
        {"group": 2},
        {"grouping": "sqrt"},
        {"recompute": "full", "grouping": "every"},
        {"recompute": "full", "group": 0},
        {"recompute": "full", "group": -1},
        {"recompute": "full", "group": 2.0},
        {"recompute": "full", "group": True},
        {"recompute": "full", "grouping": "sqrt", "group": 2},
        {"recompute": "full", "offload": "cpu"},
        {"recompute": "full", "offload": "deepspeed", "keep": ("attention",)},
        {"recompute": "selective", "modules": ("norm",), "offload": "deepspeed"},
    ],
    ids=str,
)
def test_a_mode_that_contradicts_itself_cannot_be_built(fields):
    with pytest.raises(ValueError, match=r"^Mode\(.*\): "):
        Mode(**fields)
    with pytest.raises(ValueError, match=r"^Mode\(.*\): "):
        dataclasses.replace(Mode(), **fields)


def test_one_mode_serves_all_layers_or_each_has_its_own():
    assert parse_layers("full", 2) == parse_layers(Mode("full"), 2) == [Mode("full")] * 2
    assert parse_layers(["none", Mode("full")], 2) == [Mode(), Mode("full")]
    for wrong in (["none"], ("none",) * 3, []):
        with pytest.raises(ValueError, match=f"{len(wrong)} modes for 2 layers"):
            parse_layers(wrong, 2)
    with pytest.raises(ValueError, match="starts with 'nothing'"):
        parse_layers(["none", "nothing"], 2)


def test_a_name_is_checked_without_torch(repo_root):
    code = "import sys, model.modes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo_root, check=False).returncode == 0
