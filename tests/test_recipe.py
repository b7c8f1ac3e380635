"""Recipes: strict in, frozen object out, and errors that say what to write instead."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import typing

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from training import recipe as recipes
from training import strict_yaml
from training.recipe import RecipeError, check_runs_on, documentation, load, names, parse_size
from training.schema import Model

TINY = """\
seq_length: 32
global_batch_size: 2
steps: 2
model:
  num_layers: 2
  hidden_size: 16
  num_attention_heads: 2
"""


# Settings that become the size of a tensor, a loop or a wait; the others have the same bounds.
BOUNDED = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "steps",
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.ffn_hidden_size",
    "model.vocab_size",
    "data.workers",
    "data.max_documents",
    "evaluation.every_steps",
    "checkpoint.keep",
    "sweep.seq_max",
)


@pytest.fixture
def tiny(tmp_path):
    """Writes a small recipe, with more lines or something replaced, and gives its path."""

    def write(more: str = "", **replaced: str) -> str:
        text = TINY + more
        for old, new in replaced.items():
            text = "\n".join(new if line.strip().startswith(f"{old}:") else line for line in text.split("\n"))
        (tmp_path / "tiny.yaml").write_text(text)
        return str(tmp_path / "tiny.yaml")

    return write


def error(path, *overrides) -> str:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    return str(caught.value)


# --- what is shipped


@pytest.mark.parametrize("name", names())
def test_a_shipped_recipe_is_short_and_comes_back_from_its_own_yaml(name, repo_root, tmp_path):
    assert len((repo_root / "recipes" / f"{name}.yaml").read_text().splitlines()) <= 30
    recipe = load(name)
    assert recipe.name == name
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert load(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize(
    ("name", "overrides", "parameters"),
    [
        ("gpt-125m", ["seq_length=1024"], 124_439_808),  # GPT-2 small: the same but for 1024 positions
        ("gpt-125m", [], 124_439_808 + 1024 * 768),
        ("gpt-1.3b", [], 1_315_723_264),
        ("llama-1b", [], 1_235_814_400),
        ("llama-8b", [], 8_030_261_248),
    ],
)
def test_published_models_have_their_published_number_of_parameters(name, overrides, parameters):
    from model.gpt import GPTConfig, num_parameters

    config = GPTConfig(**load(name, overrides).gpt_fields(128))
    assert num_parameters(config) == parameters


def test_the_quickstart_has_a_few_million_parameters():
    from model.gpt import GPTConfig, num_parameters

    assert 2e6 < num_parameters(GPTConfig(**load("quickstart").gpt_fields())) < 1e7


def test_the_model_section_is_gptconfig_field_by_field():
    from model.gpt import GPTConfig

    declared = {field.name: field for field in dataclasses.fields(GPTConfig)}
    hints, ours = typing.get_type_hints(GPTConfig), typing.get_type_hints(Model)
    assert set(declared) == set(Model.model_fields)
    for name, field in declared.items():
        mine = Model.model_fields[name]
        if name == "vocab_size":  # null in a recipe: the tokenizer's
            assert mine.default is None
            continue
        assert ours[name] == hints[name], name
        assert mine.is_required() == (field.default is dataclasses.MISSING), name
        assert mine.is_required() or mine.default == field.default, name


def test_the_page_of_settings_is_the_one_its_command_writes(repo_root):
    page = (repo_root / "docs" / "recipes.md").read_text()
    written = subprocess.run(
        [sys.executable, "-m", "training.recipe"], cwd=repo_root, capture_output=True, text=True, check=True
    )
    assert page == written.stdout, "run: python -m training.recipe > docs/recipes.md"


def test_every_setting_has_a_text_a_type_and_a_default():
    rows = documentation()
    assert ("seq_length", "whole number", "required", "Tokens per sample, T.") in rows
    assert len({key for key, *_ in rows}) == len(rows)
    assert all(kind and default and text.endswith(".") for _, kind, default, text in rows)


def test_loading_a_recipe_imports_no_torch():
    code = (
        "import sys; from training.recipe import load; load('llama-8b');"
        "assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=recipes.ROOT)


# --- the object


def test_a_recipe_is_frozen_and_hashable(tiny):
    recipe = load(tiny())
    assert hash(recipe) == hash(load(tiny()))
    with pytest.raises(ValueError, match="frozen"):
        recipe.steps = 3


def test_overrides_win_and_the_last_of_two_counts(tiny):
    recipe = load(tiny(), ["seq_length=8", "model.num_layers=4", "seq_length=16", "optimizer.lr=1"])
    assert (recipe.seq_length, recipe.model.num_layers, recipe.optimizer.lr) == (16, 4, 1.0)


def test_overrides_are_yaml(tiny):
    recipe = load(tiny(), ["recompute=[none, full]", "data.sources=[a, b c]", "budget=1.5GiB", "steps=1_000"])
    assert recipe.recompute == ("none", "full")
    assert recipe.data.sources == ("a", "b c")
    assert (recipe.budget_bytes, recipe.host_budget_bytes, recipe.steps) == (3 * 2**29, None, 1000)
    assert load(tiny(), ["data.tokenizer=a=b.model"]).data.tokenizer == "a=b.model"


def test_a_plan_file_may_stand_for_the_mode(tiny, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    assert load(tiny(), [f"recompute={{plan: {plan}}}"]) == load(tiny(), [f"recompute.plan={plan}"])


def test_accumulation_follows_from_the_batch_sizes(tiny):
    recipe = load(tiny(), ["global_batch_size=12", "micro_batch_size=2"])
    assert [recipe.accumulation_steps(ranks) for ranks in (1, 2, 3)] == [6, 3, 2]
    with pytest.raises(RecipeError, match=r"global_batch_size = 12.*2 \* 4; write 16"):
        recipe.accumulation_steps(4)


def test_vocabulary_and_positions_are_filled_in(tiny):
    fields = load(tiny(), ["model.position_embedding=learned"]).gpt_fields(777)
    assert (fields["vocab_size"], fields["max_position_embeddings"]) == (777, 32)
    assert load(tiny(), ["model.vocab_size=5000"]).gpt_fields(777)["vocab_size"] == 5000
    with pytest.raises(RecipeError, match="5000: is below the tokenizer's 6000 ids"):
        load(tiny(), ["model.vocab_size=5000"]).gpt_fields(6000)
    with pytest.raises(RecipeError, match="which is not read here"):
        load(tiny(), ["data.tokenizer=x.model"]).gpt_fields()


def test_a_given_tokenizer_survives_the_round_trip(tiny, tmp_path):
    recipe = load(tiny(), ["data.tokenizer=x.model"])
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert load(tmp_path / "again.yaml") == recipe


# --- errors


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.num_layer=4", "did you mean model.num_layers?"),
        ("model.heads=4", "unknown key"),
        ("lr=1e-3", "did you mean optimizer.lr?"),
        ("num_layers=3", "did you mean model.num_layers?"),
        ("modell.num_layers=4", "did you mean model?"),
        ("optimizer.betas=0.9", "did you mean optimizer.beta"),
        ('model.num_layers="8"', "must be a whole number without quotes"),
        ("model.num_layers=true", "must be a whole number"),
        ("seq_length=512.0", "must be a whole number"),
        ("seq_length=512.5", "must be a whole number"),
        ("seq_length=", "seq_length = null: must be a whole number"),
        ("steps=0", "must be above 0"),
        ("seed=-1", "must be 0 or more"),
        ("model.hidden_dropout=1", "must be below 1"),
        ("data.tokenizer_vocab_size=4194304", "must be 1048576 or less"),
        ("optimizer.lr=fast", "must be a number"),
        ('optimizer.lr="1e-3"', "must be a number without quotes"),
        ("optimizer.lr=true", "must be a number"),
        ("optimizer.lr=.inf", "must be a finite number"),
        ("optimizer.lr=.nan", "must be a finite number"),
        ("model.bias=no", "bias = no: must be true or false (on, off, yes and no are plain words"),
        ("model.bias=1", "must be true or false"),
        ("precision=fp16", "must be one of bf16 | fp32"),
        ("model.attention=flash", "did you mean flash_attn?"),
        ("name=010", "must be text"),
        ("data.sources=corpus.txt", "must be a list; write [corpus.txt]"),
        ("data.sources=a, b", "must be a list; write [a, b]"),
        ("data.sources='x]'", "must be a list; write ['x]']"),
        ("data.sources=''", "must be a list; write [a, b]"),
        ("data.sources=['']", "data.sources.0 = '': is empty; write a path"),
        ('data.sources=["a\\0b"]', "holds a NUL; write a path"),
        ('data.sources=["\\ud800"]', "half of a surrogate pair"),
        ("data.sources=[" + 300 * "x" + "]", "is too long for a path"),
        ("data.cache_dir=''", "is empty; write a path"),
        ('data.cache_dir="a\\0b"', 'data.cache_dir = "a\\0b": holds a NUL; write a path'),
        ("data.cache_dir=" + 3000 * "x/", "is too long for a path"),
        ("engine.deepspeed_config=" + 5000 * "x", "is too long for a path"),
        ("name=../../x", "must name a folder: up to 200 bytes of text, without /"),
        ("name=a/b", "must name a folder"),
        ("name=..", "must name a folder"),
        ("name=.", "must name a folder"),
        ('name="a\\0b"', "must name a folder"),
        ('name="a\\nb"', 'name = "a\\nb": must name a folder'),
        ("name=" + 67 * "\u20ac", "must name a folder"),
        ("name=0", "must be text"),
        ("name=!!bool maybe", "line 1, column 1: not a valid recipe: a tag (!!bool) has no place here"),
        ("seed=!!float ''", "a tag (!!float) has no place here"),
        ("model=!!map [a]", "a tag (!!map) has no place here"),
        *((f"{key}={29 * '9'}", " or less") for key in BOUNDED),
        ("tiles.mlp_tile_tokens=" + 29 * "9", "at most 2147483647"),
        ("optimizer.lr=" + 400 * "9", "must be"),
        ("budget=" + 400 * "9" + "GiB", "below 1073741824GiB"),
        ("sweep.trial_timeout_s=1e300", "must be 10000000.0 or less"),
        ("recompute=full+uniform" + 5000 * "9", "is longer than any mode"),
        ("recompute=full+uniform9999999", "does not take 'uniform9999999'"),
        (2000 * "a." + "b=1", "write dotted.key=value"),
        ("data={a.b: 1}", "data.a.b = 1: unknown key; known here: name seq_length"),
        ("data.sources=[]", "must have at least one entry"),
        ("data.sources=[1]", "data.sources.0 = 1: must be text"),
        ("evaluation.every_steps=none", "`nothing` is written null"),
        ("tiles.loss_tile_tokens=0", "must be a whole number above 0, auto, or null"),
        ("tiles.loss_tile_tokens=true", "must be a whole number above 0, auto, or null"),
        ("model=4", "must be a section of settings: num_layers"),
        ("model={num_layers: 2}", "model.hidden_size: is missing; write it: Width"),
        ("model.num_layers.x=1", "model.num_layers is 2 here, which has no settings"),
        ("recompute=ful", "recompute = ful: "),
        ("recompute=full+atention", "full+attention"),
        ("recompute=[none, ful]", "recompute = [none, ful]: "),
        ("recompute=[auto, none]", "write recompute: auto"),
        ("recompute={plam: x}", "{plan: FILE}"),
        ("recompute=null", "must be the name of a mode"),
        ("sweep.modes=[none, ful]", "sweep.modes.1 = ful: "),
        ("budget=24", "has no unit; write 24GiB"),
        ("budget=24gb", "one of GiB GB MiB MB KiB KB B"),
        ("budget=0GiB", "at least 1 byte"),
        ("budget=-1GiB", "is not a size"),
        ("host_budget=true", "is not a size"),
        ("steps", "write dotted.key=value"),
        ("model.=3", "write dotted.key=value"),
        ("=3", "write dotted.key=value"),
        ("data.sources=[", "not a valid recipe"),
        ("steps=" + 5000 * "9", "not a valid recipe"),
        ("data={text_column: a, text_column: b}", "key 'text_column' is there twice"),
    ],
)
def test_a_wrong_override_is_named_with_what_to_write(tiny, override, says):
    message = error(tiny(), override)
    assert (f"override {override!r}: " if len(override) < 100 else f"override {override!r:.100}...") in message
    assert says in message
    assert "pydantic" not in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.num_attention_heads=3"], "num_attention_heads = 3: does not divide model.hidden_size = 16"),
        (["model.num_attention_heads=16"], "odd width"),
        (["model.num_query_groups=3"], "num_query_groups = 3: does not divide model.num_attention_heads = 2"),
        (["model.num_query_groups=4"], "does not divide"),
        (["micro_batch_size=3"], "global_batch_size = 2: is no multiple of micro_batch_size = 3; write 3"),
        (["optimizer.warmup_steps=3"], "warmup_steps = 3: is above steps = 2"),
        (["optimizer.min_lr=1"], "min_lr = 1: is above optimizer.lr = 0.0003"),
        (["optimizer.decay_steps=1"], "has no effect with optimizer.schedule cosine"),
        (
            ["optimizer.decay_steps=2", "optimizer.schedule=wsd", "optimizer.warmup_steps=1"],
            "decay_steps = 2: ends after steps = 2; write at most 1",
        ),
        (["model.vocab_size=300"], "vocab_size = 300: is below data.tokenizer_vocab_size = 4096"),
        (["data.tokenizer=x", "data.tokenizer_vocab_size=400"], "has no effect beside data.tokenizer"),
        (["model.max_position_embeddings=64"], "has no effect with position_embedding rope"),
        (
            ["model.position_embedding=learned", "model.max_position_embeddings=16"],
            "max_position_embeddings = 16: is below seq_length = 32; write 32 or null",
        ),
        (["recompute=[none]"], "names 1 modes for model.num_layers = 2; name one per layer"),
        (["precision=fp32", "model.attention=flash_attn"], "flash_attn has no fp32"),
        (["engine.name=torch", "engine.deepspeed_config=zero1"], "has no effect with engine.name torch"),
        (["engine.deepspeed_config=zerro1"], "there is no ds_configs/zerro1.json; did you mean zero1?"),
        (["engine.deepspeed_config=nowhere/x.json"], "there is no nowhere/x.json"),
        (["engine.deepspeed_config=/dev/zero"], "is a device or a pipe, not a file; ds_configs/ has"),
        (["recompute.plan=/tmp"], "recompute.plan = /tmp: is a folder, not a file"),
        (['recompute.plan="a\\0b"'], "holds a NUL; write a path"),
        (["model.attention=unfused", "seq_length=2147483647"], "makes tensors of over 2**56 numbers; write less"),
        (["recompute.plan=nowhere.json"], "recompute.plan = nowhere.json: there is no such file"),
    ],
)
def test_a_contradiction_names_both_sides(tiny, overrides, says, monkeypatch):
    monkeypatch.chdir(recipes.ROOT)
    assert says in error(tiny(), *overrides)


def test_a_wrong_line_of_the_file_is_named_with_the_file(tiny):
    path = tiny(hidden_size="  hiden_size: 16")
    message = error(path)
    assert f"{path}: model.hiden_size = 16: unknown key; did you mean model.hidden_size?" in message
    assert f"{path}: model.hidden_size: is missing" in message


def test_all_problems_are_told_at_once(tiny):
    assert error(tiny(), "steps=0", "sed=1").count("\n") == 1


def test_a_key_written_twice_is_an_error(tiny):
    assert "line 8, column 1: not a valid recipe: key 'steps' is there twice, first on line 3" in error(
        tiny("steps: 3\n")
    )


@pytest.mark.parametrize("text", ["", "- a\n", "just words\n", "3\n"])
def test_a_file_without_settings_is_an_error(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    assert "must be a mapping of settings" in error(tmp_path / "x.yaml")


def test_a_file_that_is_not_text_is_an_error(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"name: \xff\xfe\n")
    assert "not UTF-8 text at byte 6" in error(tmp_path / "x.yaml")
    (tmp_path / "x.yaml").write_bytes(b"name: a\0b\n")
    assert "x.yaml" in error(tmp_path / "x.yaml")


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.getcwd []", "a: &x [*x]", "? [a]\n: 1", "<<: {a: 1}"])
def test_a_strange_document_is_an_error_and_runs_nothing(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    assert "x.yaml" in error(tmp_path / "x.yaml")


def test_a_missing_recipe_names_the_nearest_and_all():
    message = error("quikstart")
    assert "did you mean quickstart?" in message
    assert "llama-8b" in message
    assert "there is no nowhere/x.yaml" in error("nowhere/x.yaml")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("model.num_layers: 3", "model.num_layers = 3: a dot in a key is for the command line; write it nested: "),
        ("model.num_layers: 3", "nested: model: {num_layers: 3}"),
        ("model.num_layer: 3", "model.num_layer = 3: unknown key; did you mean model.num_layers?"),
        ("a.b: {c.d: 1}", "a.b = {c.d: 1}: unknown key"),
        ("name: !!bool maybe", "line 8, column 7: not a valid recipe: a tag (!!bool) has no place here"),
        ("'': 3", "unknown key"),
        ("x: " + 400 * "[" + 400 * "]", "not a valid recipe"),
    ],
)
def test_a_dotted_key_or_a_tag_in_the_file_is_an_error_that_says_what_to_write(tiny, line, says):
    path = tiny(line + "\n")
    assert f"{path}: " in error(path) and says in error(path)
    if "." in line:
        assert f"{path}: " in error(path, "model.num_layers=4")  # the override is not to blame


def test_a_recipe_that_is_no_file_is_called_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.yaml")
    os.symlink("loop.yaml", "loop.yaml")
    assert f"recipe {tmp_path}: is a folder, not a file; write the path of a .yaml file" in error(tmp_path)
    assert "is a device or a pipe, not a file" in error("./pipe.yaml")
    assert "is a device or a pipe, not a file" in error("/dev/zero")
    assert "there is no " in error("./loop.yaml")
    assert error("").startswith("no recipe is named; write a path or one of the shipped recipes: ")
    for name in (5000 * "x", "a/" + 5000 * "x", "a\0b", "a/b\0", "\udcff"):
        assert ": there is no " in error(name) and len(error(name)) < 1000 and "\0" not in error(name)


def test_of_very_many_problems_some_are_told(tiny):
    message = error(tiny(), f"data.sources=[{'1,' * 1000}]")
    assert message.count("\n") == 20 and message.endswith("there are more")


def test_attention_without_a_kernel_on_the_device_is_an_error_before_anything_is_made(tiny):
    dropout = load(tiny(), ["model.attention_dropout=0.1"])
    check_runs_on(dropout, "cuda")
    with pytest.raises(RecipeError, match=r"model.attention_dropout = 0.1: has no fused kernel on a CPU; write 0, or"):
        check_runs_on(dropout, "cpu")
    check_runs_on(load(tiny(), ["model.attention_dropout=0.1", "model.attention=unfused"]), "cpu")
    with pytest.raises(RecipeError, match=r"model.attention = flash_attn: needs a GPU; write sdpa"):
        check_runs_on(load(tiny(), ["model.attention=flash_attn"]), "cpu")


# --- YAML and sizes


def test_yaml_has_no_traps():
    read = strict_yaml.read
    assert read("[1e-4, 1E5, .5, 1., 1.5e3, -2e+2]") == [1e-4, 1e5, 0.5, 1.0, 1500.0, -200.0]
    assert read("[on, off, yes, no, y, n]") == ["on", "off", "yes", "no", "y", "n"]
    assert read("[010, 65_536, 1:30, 2024-01-01, 0x10]") == [10, 65536, "1:30", "2024-01-01", "0x10"]
    assert read("[true, false, null, ~]") == [True, False, None, None]
    with pytest.raises(yaml.YAMLError, match="twice"):
        read("{a: 1, a: 1}")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@settings(deadline=None)
@given(st.dictionaries(st.text(), scalars | st.lists(scalars)))
def test_what_is_written_is_read_back(value):
    assert strict_yaml.read(strict_yaml.write(value)) == value


def test_sizes_have_units():
    assert parse_size("24GiB") == 24 * 2**30
    assert parse_size("1.5 GB") == 1_500_000_000
    assert [parse_size(f"2{unit}") for unit in ("MiB", "MB", "KiB", "KB", "B")] == [
        2**21,
        2 * 10**6,
        2048,
        2000,
        2,
    ]
    for wrong in ("24", 24, "", "GiB", "1e3GiB", "24Gib", "24 GiB x", "0B", "0.5B", None):
        with pytest.raises(ValueError, match=r"unit|size|byte"):
            parse_size(wrong)
