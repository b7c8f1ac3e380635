"""Every setting of a recipe, declared and documented once; docs and --help come from these texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from training import strict_yaml

ROOT = Path(__file__).resolve().parents[1]
UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1}


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names file, key, value and what to write instead."""


def parse_size(text: object) -> int:
    """Bytes of a size such as `24GiB` or `1.5GB`; ValueError for a number without a unit."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", str(text).strip())
    if match and not match[2]:
        raise ValueError(f"has no unit; write {match[1]}GiB, {match[1]}GB or {match[1]}MiB")
    if not match or match[2] not in UNITS:
        raise ValueError(
            "is not a size; write a number and one of " + " ".join(UNITS) + ", for example 24GiB"
        )
    size_bytes = int(float(match[1]) * UNITS[match[2]])
    if size_bytes < 1:
        raise ValueError("must be more than 0 bytes")
    return size_bytes


def _size(value: object) -> object:
    if value is not None and not isinstance(value, bool):
        parse_size(value)
        return str(value).strip()
    return value


def _mode(value: str) -> str:
    if value != "auto":
        from model.modes import parse  # torch-free, and only needed once a recipe is really read

        parse(value)
    return value


def _recompute(value: object) -> object:
    """What `recompute` may be, told in one sentence instead of one error per alternative."""
    if isinstance(value, str):
        return _mode(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(mode, str) for mode in value):
        if "auto" in value:
            raise ValueError("auto decides for all layers: write recompute: auto, or name every layer's mode")
        return tuple(_mode(mode) for mode in value)
    if isinstance(value, Plan) or (isinstance(value, Mapping) and set(value) == {"plan"}):
        return value
    raise ValueError("must be the name of a mode, a list of one mode per layer, {plan: FILE}, or auto")


def _tile(value: object) -> object:
    if value == "auto" or value is None or (type(value) is int and value > 0):
        return value
    raise ValueError("must be a whole number above 0, auto, or null for no tiles")


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class _Section(BaseModel):
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=False,
        protected_namespaces=(),
    )


Size = Annotated[str, BeforeValidator(_size), "size such as 24GiB"]
Tile = Annotated[int | str | None, BeforeValidator(_tile), "whole number | auto | null"]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
ModeNames = Annotated[tuple[Annotated[str, AfterValidator(_mode)], ...], BeforeValidator(_as_tuple)]


class Plan(_Section):
    plan: str = Field(description="A plan file, as `recompute: auto` writes it into the run folder.")


Recompute = Annotated[
    str | tuple[str, ...] | Plan, BeforeValidator(_recompute), "mode | list of modes | {plan: FILE} | auto"
]


class Model(_Section):
    """The fields of model.gpt.GPTConfig, by the same names (a test holds the two equal)."""

    num_layers: int = Field(gt=0, description="Transformer layers.")
    hidden_size: int = Field(gt=0, description="Width C of the residual stream.")
    num_attention_heads: int = Field(gt=0, description="Query heads H; must divide hidden_size.")
    num_query_groups: int | None = Field(
        None,
        gt=0,
        description="Key/value heads (GQA); must divide num_attention_heads. null: one per query head.",
    )
    ffn_hidden_size: int | None = Field(None, gt=0, description="Width F of the MLP. null: 4 * hidden_size.")
    vocab_size: int | None = Field(
        None,
        gt=0,
        description="Rows V of the embedding; may exceed the tokenizer's ids. null: the tokenizer's.",
    )
    max_position_embeddings: int | None = Field(
        None, gt=0, description="Rows of the learned position table; unused by rope. null: seq_length."
    )
    normalization: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="Norm of every block.")
    position_embedding: Literal["learned", "rope"] = Field("learned", description="How positions enter.")
    activation: Literal["gelu", "swiglu"] = Field("gelu", description="MLP activation; swiglu is gated.")
    bias: bool = Field(True, description="Biases in projections and layer norms.")
    tied_embeddings: bool = Field(True, description="The output head is the embedding's own weight.")
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on embedding and block outputs.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary frequencies.")
    norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance inside norms.")
    attention: Literal["unfused", "sdpa", "flash_attn"] = Field(
        "sdpa", description="Attention code; flash_attn needs the `flash` extra and a GPU."
    )
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Probability spread evenly over the vocabulary."
    )
    z_loss: float = Field(0.0, ge=0, description="Weight of the squared log of the softmax denominator.")


class Data(_Section):
    sources: Names = Field(
        ("python-stdlib",),
        min_length=1,
        description="Files, folders or globs of text, .jsonl (.gz, .zst) or .parquet; or the word python-stdlib:"
        " the Python standard library's own sources, found on this machine.",
    )
    text_column: str = Field("text", description="Column of .jsonl and .parquet files that holds the text.")
    tokenizer: str | None = Field(
        None, description="A sentencepiece .model file. null: train one on the sources."
    )
    tokenizer_vocab_size: int = Field(8192, ge=300, le=2**20, description="Ids of the tokenizer to train.")
    validation_fraction: float = Field(
        0.02, gt=0, lt=1, description="Share of documents kept for validation."
    )
    max_documents: int | None = Field(None, ge=2, description="Use only so many documents. null: all.")
    cache_dir: str = Field(".cache/data", description="Folder of prepared tokenizers and token files.")


class Optimizer(_Section):
    lr: float = Field(3e-4, gt=0, description="Peak learning rate of AdamW.")
    min_lr: float | None = Field(None, ge=0, description="Learning rate at the end. null: a tenth of lr.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay, on matrices only.")
    clip_grad: float | None = Field(1.0, gt=0, description="Largest gradient norm. null: no clipping.")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="After warmup: cosine to min_lr; wsd: constant, then linear to min_lr; constant.",
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warmup; not more than steps.")
    decay_steps: int | None = Field(
        None, gt=0, description="Only for wsd: length of the final decay. null: a tenth of steps."
    )


class Engine(_Section):
    name: Literal["deepspeed", "torch"] = Field("deepspeed", description="Who runs the optimizer step.")
    deepspeed_config: str | None = Field(
        None, description="Only for deepspeed: a name in ds_configs/ or a .json path. null: ZeRO stage 0."
    )


class Tiles(_Section):
    loss_tile_tokens: Tile = Field(
        None, description="Tokens per tile of head and loss; no [T, V] tensor then."
    )
    mlp_tile_tokens: Tile = Field(None, description="Tokens per tile of the MLP; no [T, F] tensor then.")
    attention_head_groups: Tile = Field(None, description="Groups of heads computed one after another.")


class Evaluation(_Section):
    every_steps: int | None = Field(
        None, gt=0, description="Validate every so many steps. null: only at the end."
    )
    batches: int = Field(8, gt=0, description="Micro-batches per validation.")


class Checkpoint(_Section):
    every_steps: int | None = Field(
        None, gt=0, description="Save every so many steps. null: only at the end."
    )
    keep: int = Field(2, gt=0, description="Newest checkpoints kept on disk.")


class Log(_Section):
    every_steps: int = Field(1, gt=0, description="Write metrics every so many steps.")


class Sweep(_Section):
    modes: ModeNames = Field(
        ("none", "selective", "full", "full+offload"), min_length=1, description="Modes to compare."
    )
    granularity: int = Field(256, gt=0, description="Lengths tried are multiples of it, in tokens.")
    seq_max: int = Field(1048576, gt=0, description="Longest length tried, in tokens.")
    steps: int = Field(2, ge=2, description="Optimizer steps a length must survive.")


class Targets(_Section):
    longest_context_tokens: int | None = Field(None, gt=0, description="At least this longest context.")
    tokens_per_s: float | None = Field(None, gt=0, description="At least this speed.")
    peak_device_gib: float | None = Field(
        None, gt=0, description="At most this peak of device memory, in GiB."
    )
    overhead: float | None = Field(None, gt=0, description="At most this step time over mode none's.")
    val_loss: float | None = Field(None, gt=0, description="At most this validation loss.")


class Recipe(_Section):
    name: str = Field("", description="Names the run folder. Empty: the file's name.")
    seq_length: int = Field(gt=0, description="Tokens per sample, T.")
    micro_batch_size: int = Field(1, gt=0, description="Sequences per forward pass and rank, B.")
    global_batch_size: int = Field(
        gt=0,
        description="Sequences per optimizer step over all ranks; a multiple of micro_batch_size * ranks.",
    )
    steps: int = Field(gt=0, description="Optimizer steps of the run.")
    seed: int = Field(1234, ge=0, lt=2**63, description="Seed of weights, data order and dropout.")
    precision: Literal["bf16", "fp32"] = Field(
        "bf16",
        description="bf16: bf16 weights with fp32 master weights and optimizer state; or fp32 throughout.",
    )
    recompute: Recompute = Field("none", description="What is recomputed or offloaded; see docs/modes.md.")
    budget: Size | None = Field(None, description="Device memory the run may use. null: what the device has.")
    host_budget: Size | None = Field(
        None, description="Host memory offload may use. null: what the host has."
    )
    tiles: Tiles = Field(Tiles(), description="Computing along the sequence tile by tile.")
    model: Model = Field(description="The model.")
    data: Data = Field(Data(), description="Text and tokenizer.")
    optimizer: Optimizer = Field(Optimizer(), description="AdamW and its schedule.")
    engine: Engine = Field(Engine(), description="DeepSpeed or plain torch.")
    evaluation: Evaluation = Field(Evaluation(), description="Validation loss.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="Saved training state.")
    log: Log = Field(Log(), description="Metrics.")
    sweep: Sweep = Field(Sweep(), description="What `make sweep` measures.")
    targets: Targets = Field(Targets(), description="What `make gate` demands.")

    @model_validator(mode="after")
    def _no_contradiction(self) -> Recipe:
        for key, problem in _contradictions(self):
            raise PydanticCustomError("contradiction", "{problem}", {"key": key, "problem": problem})
        return self

    @property
    def budget_bytes(self) -> int | None:
        """`budget` in bytes."""
        return None if self.budget is None else parse_size(self.budget)

    @property
    def host_budget_bytes(self) -> int | None:
        """`host_budget` in bytes."""
        return None if self.host_budget is None else parse_size(self.host_budget)

    def deepspeed_config_path(self) -> Path | None:
        """The JSON file of `engine.deepspeed_config`, None when there is none."""
        config = self.engine.deepspeed_config
        if config is None:
            return None
        return (
            Path(config)
            if "/" in config or config.endswith(".json")
            else ROOT / "ds_configs" / f"{config}.json"
        )

    def error(self, key: str, problem: str) -> RecipeError:
        """A RecipeError about `key` for what only shows after loading (ranks, files, the tokenizer)."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return RecipeError(f"recipe {self.name}: {key} = {show(value)}: {problem}")

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches each of `world_size` ranks adds up per optimizer step."""
        per_pass = self.micro_batch_size * world_size
        if self.global_batch_size % per_pass:
            raise self.error(
                "global_batch_size",
                f"is no multiple of micro_batch_size * ranks = {self.micro_batch_size} * {world_size}"
                f"; write {_nearest_multiple(self.global_batch_size, per_pass)}",
            )
        return self.global_batch_size // per_pass

    def gpt_fields(self, tokenizer_vocab_size: int | None = None) -> dict[str, Any]:
        """Arguments of GPTConfig: the `model` section, with the vocabulary and learned positions filled in."""
        fields = self.model.model_dump()
        ids = tokenizer_vocab_size or self.data.tokenizer_vocab_size
        fields["vocab_size"] = fields["vocab_size"] or ids
        if tokenizer_vocab_size and fields["vocab_size"] < tokenizer_vocab_size:
            raise self.error(
                "model.vocab_size", f"is below the tokenizer's {ids} ids; write {ids} or more, or null"
            )
        fields["max_position_embeddings"] = fields["max_position_embeddings"] or self.seq_length
        return fields

    def to_yaml(self) -> str:
        """The whole recipe, defaults included, as YAML that `load` reads back into an equal object."""
        return strict_yaml.write(self.model_dump(mode="json"))


def show(value: object) -> str:
    """A value as a recipe would spell it, on one line."""
    text = (
        strict_yaml.write(value).removesuffix("...\n")
        if not isinstance(value, (dict, list, tuple))
        else repr(value)
    )
    return text.strip() if len(text) < 80 else text[:77] + "..."


def _nearest_multiple(number: int, of: int) -> int:
    return max(of, round(number / of) * of)


def _contradictions(r: Recipe) -> Iterable[tuple[str, str]]:
    m, o = r.model, r.optimizer
    groups = m.num_query_groups or m.num_attention_heads
    if m.hidden_size % m.num_attention_heads:
        yield "model.num_attention_heads", f"does not divide model.hidden_size = {m.hidden_size}"
    elif m.position_embedding == "rope" and m.hidden_size // m.num_attention_heads % 2:
        yield "model.num_attention_heads", "gives an odd head width; rope turns pairs: choose an even one"
    if m.num_attention_heads % groups:
        yield "model.num_query_groups", f"does not divide model.num_attention_heads = {m.num_attention_heads}"
    if m.position_embedding == "learned" and (m.max_position_embeddings or r.seq_length) < r.seq_length:
        yield (
            "model.max_position_embeddings",
            f"is below seq_length = {r.seq_length}; write {r.seq_length} or null",
        )
    if m.vocab_size and r.data.tokenizer is None and m.vocab_size < r.data.tokenizer_vocab_size:
        yield (
            "model.vocab_size",
            f"is below data.tokenizer_vocab_size = {r.data.tokenizer_vocab_size}; raise it, write null, or train a"
            " smaller tokenizer",
        )
    if r.global_batch_size % r.micro_batch_size:
        multiple = _nearest_multiple(r.global_batch_size, r.micro_batch_size)
        yield (
            "global_batch_size",
            f"is no multiple of micro_batch_size = {r.micro_batch_size}; write {multiple}",
        )
    if o.warmup_steps > r.steps:
        yield "optimizer.warmup_steps", f"is above steps = {r.steps}; write at most {r.steps}"
    if o.min_lr is not None and o.min_lr > o.lr:
        yield "optimizer.min_lr", f"is above optimizer.lr = {o.lr}"
    if o.decay_steps is not None and o.schedule != "wsd":
        yield (
            "optimizer.decay_steps",
            f"has no effect with optimizer.schedule = {o.schedule}; write null, or use wsd",
        )
    elif o.decay_steps is not None and o.warmup_steps + o.decay_steps > r.steps:
        yield (
            "optimizer.decay_steps",
            f"and warmup_steps = {o.warmup_steps} together are above steps = {r.steps}",
        )
    if r.engine.deepspeed_config is not None and r.engine.name != "deepspeed":
        yield "engine.deepspeed_config", f"has no effect with engine.name = {r.engine.name}; write null"
    if isinstance(r.recompute, tuple) and len(r.recompute) != m.num_layers:
        yield (
            "recompute",
            f"names {len(r.recompute)} modes for model.num_layers = {m.num_layers}; name one per layer",
        )
