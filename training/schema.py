"""Every setting of a recipe, declared and documented once; docs and --help come from these texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from training import strict_yaml
from training.values import (
    LARGEST,
    Attentions,
    Count,
    FileName,
    ModeNames,
    Paths,
    PathText,
    Positive,
    Recompute,
    Section,
    Size,
    Tile,
    Width,
    parse_size,
)

ROOT = Path(__file__).resolve().parents[1]


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names file, key, value and what to write instead."""


class Model(Section):
    """The fields of model.gpt.GPTConfig, by the same names and defaults (a test holds the two equal)."""

    num_layers: int = Field(gt=0, le=512, description="Transformer layers.")
    hidden_size: Width = Field(description="Width C of the residual stream.")
    num_attention_heads: Width = Field(description="Query heads H; must divide hidden_size.")
    num_query_groups: Width | None = Field(
        None, description="Key/value heads (GQA); must divide num_attention_heads. null: one per head."
    )
    ffn_hidden_size: int | None = Field(None, gt=0, le=2**22, description="Width F of the MLP. null: 4 * hidden_size.")
    vocab_size: int | None = Field(
        None, gt=0, le=2**24, description="Rows V of the embedding; may exceed the tokenizer's ids. null: just those."
    )
    max_position_embeddings: Positive | None = Field(
        None, description="Rows of the learned position table; unused by rope. null: seq_length."
    )
    normalization: Literal["layernorm", "rmsnorm"] = Field("rmsnorm", description="Norm before each part.")
    position_embedding: Literal["learned", "rope"] = Field("rope", description="How positions enter.")
    activation: Literal["gelu", "swiglu"] = Field("swiglu", description="Of the MLP; swiglu is gated.")
    bias: bool = Field(False, description="Biases in projections and layer norms.")
    tied_embeddings: bool = Field(False, description="The output head is the embedding's own weight.")
    hidden_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on embedding and block outputs.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary frequencies.")
    norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance inside norms.")
    attention: Literal["unfused", "sdpa", "flash_attn"] = Field(
        "sdpa", description="Attention code; flash_attn needs the `flash` extra and a GPU."
    )
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Probability spread over the vocabulary.")
    z_loss: float = Field(0.0, ge=0, description="Weight of the squared log of the softmax denominator.")


class Data(Section):
    sources: Paths = Field(
        ("python-stdlib",),
        min_length=1,
        description="Files, folders or globs of text, .jsonl or .parquet (.gz, .zst too); or the word"
        " python-stdlib: the Python standard library's own sources, found on this machine.",
    )
    text_column: str = Field("text", description="Field (.jsonl) or column (.parquet) that holds the text.")
    tokenizer: PathText | None = Field(
        None, description="A sentencepiece .model file. null: one is trained on a sample of the sources."
    )
    tokenizer_vocab_size: int = Field(
        4096, ge=300, le=2**20, description="Ids of the tokenizer to train; not beside `tokenizer`."
    )
    validation_fraction: float = Field(
        0.05, gt=0, lt=1, description="Share of documents for validation, chosen by a hash of their text."
    )
    max_documents: int | None = Field(
        None, ge=2, le=LARGEST, description="Only the first so many documents. null: all."
    )
    cache_dir: PathText = Field("data", description="Folder of prepared data; relative: in the repository.")
    workers: int | None = Field(
        None, gt=0, le=1024, description="Processes that tokenise; any number gives the same result. null: all cores."
    )


class Optimizer(Section):
    lr: float = Field(3e-4, gt=0, description="Peak learning rate of AdamW.")
    min_lr: float | None = Field(None, ge=0, description="Learning rate at the end. null: a tenth of lr.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay, on matrices only.")
    clip_grad: float | None = Field(1.0, gt=0, description="Largest gradient norm. null: no clipping.")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="After warmup. cosine: down to min_lr; wsd: constant, then linear to min_lr."
    )
    warmup_steps: Count = Field(0, description="Steps of linear warmup; at most steps.")
    decay_steps: Positive | None = Field(
        None, description="Only for wsd: steps of the final decay. null: a tenth of steps."
    )


class Engine(Section):
    name: Literal["deepspeed", "torch"] = Field("deepspeed", description="Who runs the optimizer step.")
    deepspeed_config: PathText | None = Field(
        None, description="Only for deepspeed: a name in ds_configs/ or a .json path. null: ZeRO stage 0."
    )


class Tiles(Section):
    loss_tile_tokens: Tile = Field(None, description="Tokens per tile of head and loss: no [T, V] tensor.")
    mlp_tile_tokens: Tile = Field(None, description="Tokens per tile of the MLP: no [T, F] tensor.")
    attention_head_groups: Tile = Field(None, description="Groups of heads computed one after another.")


class Evaluation(Section):
    every_steps: Positive | None = Field(None, description="Validate so often. null: only at the end.")
    batches: Count = Field(8, description="Micro-batches per validation, over all ranks. 0: no validation.")


class Checkpoint(Section):
    every_steps: Positive | None = Field(None, description="Save so often. null: only at the end.")
    keep: Count = Field(2, description="Newest checkpoints kept on disk. 0: none is saved.")


class Log(Section):
    every_steps: Positive = Field(1, description="Write metrics so often.")
    memory: bool = Field(
        False, description="Write memory.json: live memory over the last step. On a GPU such a step is slow."
    )
    advice: bool = Field(True, description="Out of memory: plan, for some seconds, what would have fitted.")


class Sweep(Section):
    modes: ModeNames = Field(
        ("none", "selective", "selective+norm+activation", "full", "full+attention", "full+offload", "auto"),
        min_length=1,
        description="Compared.",
    )
    attention: Attentions = Field((), description="Each with all modes. Empty: model.attention.")
    granularity: Positive = Field(256, description="Lengths tried are multiples of it, in tokens.")
    seq_max: Positive = Field(1048576, description="Longest length tried, in tokens.")
    steps: int = Field(2, ge=2, le=LARGEST, description="Optimizer steps a length must survive.")
    timing_steps: int = Field(5, ge=5, le=LARGEST, description="Optimizer steps of a trial that is timed.")
    timing_rounds: Positive = Field(1, description="How often each mode is timed at each length, in turn.")
    minutes: float | None = Field(
        None, gt=0, le=10**6, description="No more speeds are measured after it. null: all are."
    )
    trial_timeout_s: float = Field(3600.0, gt=0, le=10**7, description="A trial that takes longer is ended.")


class Targets(Section):
    longest_context_tokens: Positive | None = Field(None, description="At least this longest context.")
    tokens_per_s: float | None = Field(None, gt=0, description="At least this speed.")
    peak_device_gib: float | None = Field(None, gt=0, description="At most this peak of device memory, GiB.")
    overhead: float | None = Field(None, gt=0, description="At most this step time relative to mode none.")
    val_loss: float | None = Field(None, gt=0, description="At most this validation loss.")


class Recipe(Section):
    name: FileName = Field("", description="Names the run folder. Empty: the file's name.")
    seq_length: Positive = Field(description="Tokens per sample, T.")
    micro_batch_size: Positive = Field(1, description="Sequences per forward pass and rank, B.")
    global_batch_size: Positive = Field(
        description="Sequences per optimizer step: a multiple of micro_batch_size * ranks.",
    )
    steps: Positive = Field(description="Optimizer steps of the run.")
    seed: int = Field(1234, ge=0, lt=2**63, description="Seed of weights, data order and dropout.")
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="bf16: bf16 weights, fp32 master weights and optimizer state; or fp32 throughout."
    )
    recompute: Recompute = Field("none", description="What is recomputed or offloaded; see docs/modes.md.")
    budget: Size | None = Field(None, description="Device memory the run may use. null: all there is.")
    host_budget: Size | None = Field(None, description="Host memory offload may use. null: all there is.")
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

    @property
    def deepspeed_config_path(self) -> Path | None:
        """The JSON file of `engine.deepspeed_config`; None when there is none."""
        config = self.engine.deepspeed_config
        if config is None:
            return None
        is_path = "/" in config or config.endswith(".json")
        return Path(config) if is_path else ROOT / "ds_configs" / f"{config}.json"

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches each of `world_size` ranks adds up per optimizer step; RecipeError if not whole."""
        per_pass = self.micro_batch_size * world_size
        if self.global_batch_size % per_pass:
            raise self.error(
                "global_batch_size",
                f"is no multiple of micro_batch_size * ranks = {self.micro_batch_size} * {world_size}"
                f"; write {_nearest_multiple(self.global_batch_size, per_pass)}",
            )
        return self.global_batch_size // per_pass

    def gpt_fields(self, tokenizer_vocab_size: int | None = None) -> dict[str, Any]:
        """Arguments of GPTConfig: `model` with vocabulary and learned positions filled in.

        Without a tokenizer at hand (the planner) its wished size stands in; RecipeError if V is too small.
        """
        fields = self.model.model_dump()
        if self.data.tokenizer and not tokenizer_vocab_size and not self.model.vocab_size:
            raise self.error("model.vocab_size", "is in data.tokenizer, which is not read here; write a number")
        ids = tokenizer_vocab_size or self.data.tokenizer_vocab_size
        fields["vocab_size"] = fields["vocab_size"] or ids
        if tokenizer_vocab_size and fields["vocab_size"] < ids:
            raise self.error("model.vocab_size", f"is below the tokenizer's {ids} ids; write {ids} or null")
        if self.model.position_embedding == "learned":
            fields["max_position_embeddings"] = fields["max_position_embeddings"] or self.seq_length
        return fields

    def error(self, key: str, problem: str) -> RecipeError:
        """A RecipeError about `key`, for what only shows after loading (ranks, files, the tokenizer)."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return RecipeError(f"recipe {self.name}: {key} = {strict_yaml.show(value)}: {problem}")

    def to_yaml(self) -> str:
        """The whole recipe, defaults included, as YAML that `load` reads back into an equal object."""
        fields = self.model_dump(mode="json")
        if self.data.tokenizer is not None:
            del fields["data"]["tokenizer_vocab_size"]  # written beside `tokenizer` it would be an error
        return strict_yaml.write(fields)


def _nearest_multiple(number: int, of: int) -> int:
    return max(of, round(number / of) * of)


def _contradictions(r: Recipe) -> Iterator[tuple[str, str]]:
    m, o = r.model, r.optimizer
    groups = m.num_query_groups or m.num_attention_heads
    if m.hidden_size % m.num_attention_heads:
        yield "model.num_attention_heads", f"does not divide model.hidden_size = {m.hidden_size}"
    elif m.position_embedding == "rope" and m.hidden_size // m.num_attention_heads % 2:
        yield "model.num_attention_heads", "gives heads of odd width, and rope turns pairs; choose another"
    if m.num_attention_heads % groups:
        yield "model.num_query_groups", f"does not divide model.num_attention_heads = {m.num_attention_heads}"
    if m.max_position_embeddings is not None:
        if m.position_embedding == "rope":
            yield "model.max_position_embeddings", "has no effect with position_embedding rope; write null"
        elif m.max_position_embeddings < r.seq_length:
            problem = f"is below seq_length = {r.seq_length}; write {r.seq_length} or null"
            yield "model.max_position_embeddings", problem
    ids = r.data.tokenizer_vocab_size
    if r.data.tokenizer is not None and "tokenizer_vocab_size" in r.data.model_fields_set:
        yield "data.tokenizer_vocab_size", "has no effect beside data.tokenizer; leave it out"
    if m.vocab_size is not None and r.data.tokenizer is None and m.vocab_size < ids:
        yield "model.vocab_size", f"is below data.tokenizer_vocab_size = {ids}; write {ids} or more, or null"
    if r.global_batch_size % r.micro_batch_size:
        multiple = _nearest_multiple(r.global_batch_size, r.micro_batch_size)
        problem = f"is no multiple of micro_batch_size = {r.micro_batch_size}; write {multiple}"
        yield "global_batch_size", problem
    if o.warmup_steps > r.steps:
        yield "optimizer.warmup_steps", f"is above steps = {r.steps}; write at most that"
    if o.min_lr is not None and o.min_lr > o.lr:
        yield "optimizer.min_lr", f"is above optimizer.lr = {o.lr}; write at most that, or null"
    if o.decay_steps is not None and o.schedule != "wsd":
        yield "optimizer.decay_steps", f"has no effect with optimizer.schedule {o.schedule}; write null"
    elif o.decay_steps is not None and o.warmup_steps + o.decay_steps > r.steps:
        left = r.steps - o.warmup_steps
        yield "optimizer.decay_steps", f"ends after steps = {r.steps}; write at most {left} (steps - warmup)"
    if m.attention == "flash_attn" and r.precision == "fp32":
        yield "model.attention", "flash_attn has no fp32; write sdpa, or precision: bf16"
    if r.engine.deepspeed_config is not None and r.engine.name != "deepspeed":
        yield "engine.deepspeed_config", f"has no effect with engine.name {r.engine.name}; write null"
    # Its bytes, and the sum of many such, still have to be numbers that torch can hold.
    widest = max(m.hidden_size, m.ffn_hidden_size or 4 * m.hidden_size, m.vocab_size or ids)
    if m.attention == "unfused":
        widest = max(widest, m.num_attention_heads * r.seq_length)
    if r.micro_batch_size * r.seq_length * widest > 2**56:
        yield "seq_length", f"times {r.micro_batch_size} sequences makes tensors of over 2**56 numbers; write less"
    if isinstance(r.recompute, tuple) and len(r.recompute) != m.num_layers:
        problem = f"names {len(r.recompute)} modes for model.num_layers = {m.num_layers}; name one per layer"
        yield "recompute", problem
