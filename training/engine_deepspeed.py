"""The DeepSpeed engine: ZeRO stages 0 to 3 and optimizer offload, configured by ds_configs/ plus the recipe."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import math
import os
import warnings
from typing import Any

import torch
from torch import nn

from model import host
from training.engine import Engine
from training.optimizer import clip_, create_state, make_adamw, parameter_groups, sum_of_squares
from training.recipe import Recipe
from training.world import World

# Keys of DeepSpeed's JSON that a recipe field decides.
OWNED = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size",
    "gradient_clipping": "optimizer.clip_grad",
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
    "bf16": "precision",
    "bfloat16": "precision",
    "fp16": "precision",
    "torch_autocast": "precision",
    "activation_checkpointing": "recompute",
    "steps_per_print": "log.every_steps",
    "tensorboard": "log.every_steps",
    "checkpoint": "checkpoint",
}
# What remains for the JSON. DeepSpeed itself ignores a misspelt key without a word.
ALLOWED = (
    "zero_optimization",
    "communication_data_type",
    "data_types",
    "prescale_gradients",
    "gradient_predivide_factor",
    "aio",
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "memory_breakdown",
)


def merged_config(recipe: Recipe, world_size: int, parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration: the recipe's JSON file and what the recipe itself owns.

    `parameters` (elements) caps the communication buckets, which DeepSpeed allocates whole even for a tiny model.
    Raises RecipeError naming both owners of a key, or an unknown key.
    """
    path = recipe.deepspeed_config_path
    config: dict[str, Any] = {}
    if path is not None:
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise recipe.error("engine.deepspeed_config", f"cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise recipe.error("engine.deepspeed_config", f"{path.name} must hold one JSON object")
    for key in config:
        if key in OWNED:
            problem = (
                f"{path.name if path else ''} has {key!r}, which the recipe's {OWNED[key]} decides; delete it there"
            )
            raise recipe.error("engine.deepspeed_config", problem)
        if key not in ALLOWED:
            problem = f"{path.name if path else ''} has the unknown key {key!r}; allowed: {', '.join(ALLOWED)}"
            raise recipe.error("engine.deepspeed_config", problem)
    zero = config.setdefault("zero_optimization", {"stage": 0})
    config |= {
        "train_micro_batch_size_per_gpu": recipe.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation_steps(world_size),
        # Without a wrapper around the optimizer (fp32, stage 0) DeepSpeed does not tell the norm: we clip there.
        "gradient_clipping": 0.0 if _unwrapped(recipe, zero) else recipe.optimizer.clip_grad or 0.0,
        "bf16": {"enabled": recipe.precision == "bf16", "check_grad_overflow": False},
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own CPU Adam compiles C++ for minutes
        "steps_per_print": None,
    }
    if zero.get("stage", 0) > 0:
        if recipe.precision == "bf16" and config["gradient_accumulation_steps"] > 1:
            # A sum of many bf16 gradients in bf16 would stop growing. Stage 0 has no such choice.
            config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        for key in ("reduce_bucket_size", "allgather_bucket_size"):
            zero[key] = min(int(zero.get(key, 5e8)), _even(parameters))
    return config


def _unwrapped(recipe: Recipe, zero: dict[str, Any]) -> bool:
    return recipe.precision == "fp32" and zero.get("stage", 0) == 0


def _even(number: int) -> int:
    return number + number % 2


def import_deepspeed() -> Any:
    """deepspeed, quiet, and without the C++ builds it would start on a CPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed
    from deepspeed.runtime import bf16_optimizer

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Where it is called, it collects garbage and prints, six times over.
    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _check_zero_keys(recipe: Recipe, zero: dict[str, Any]) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    known = {*fields, *(field.alias for field in fields.values() if field.alias)}
    for key in zero:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise recipe.error("engine.deepspeed_config", f"zero_optimization has the unknown key {key!r}{hint}")


class DeepSpeedEngine(Engine):
    """ZeRO around torch's fused AdamW; DeepSpeed averages, clips and partitions."""

    name = "deepspeed"

    def __init__(self, recipe: Recipe, model: nn.Module, world: World) -> None:
        super().__init__(recipe, model, world)
        config = merged_config(recipe, world.size, sum(p.numel() for p in model.parameters()))
        zero = config["zero_optimization"]
        self.stage = zero.get("stage", 0)
        self.offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        deepspeed = import_deepspeed()
        _check_zero_keys(recipe, zero)
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self.adamw = make_adamw(recipe, parameter_groups(model.parameters(), recipe.optimizer.weight_decay))
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=self.adamw, config=config)
        if self.stage == 0 and world.size == 1:
            self.engine.enable_backward_allreduce = False  # it would copy all gradients to tell them to nobody
        self.zero = self.optimizer = self.engine.optimizer
        # Where the float32 master weights live: ZeRO-3 takes them out of the groups between steps.
        self.masters: list[torch.Tensor] = getattr(self.zero, "fp32_partitioned_groups_flat", None) or [
            p for group in self.adamw.param_groups for p in group["params"]
        ]
        with host.allocation() if self.offloaded else contextlib.nullcontext():
            create_state(self.adamw, self.masters)
        if self.offloaded:
            for master in self.masters:
                host.register(master.untyped_storage())
                if master.grad is not None:
                    host.register(master.grad.untyped_storage())
        self.adamw.register_step_pre_hook(self._before_weights_change)
        self.norm = math.nan

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, denominator: float) -> torch.Tensor:
        return self.engine(tokens, targets, denominator)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        # Not scaled by accumulation: the loss is a part of the global mean already. `* 1`, because at stage 0 DeepSpeed
        # divides the gradient all the same when it is handed the very tensor that its forward returned.
        self.engine.backward(loss * 1, scale_wrt_gas=False)
        if not last:
            self.engine.step()  # only counts the micro-batch

    def update(self, lr: float) -> float:
        for group in self.zero.param_groups:
            group["lr"] = lr
        self.norm = math.nan
        self.engine.step()
        if not self.engine.was_step_applied():  # stages that look for overflow themselves skip the step
            self.check_norm(math.nan)
        return self.norm

    def _before_weights_change(self, adamw: torch.optim.AdamW, args: Any, kwargs: Any) -> None:
        """Runs when gradients are complete and no weight has changed yet, once per parameter group under ZeRO."""
        if self.zero is adamw:
            gradients = [p.grad for p in self.masters if p.grad is not None]
            self.norm = self.check_norm(math.sqrt(sum_of_squares(gradients)))
            clip_(gradients, self.norm, self.recipe.optimizer.clip_grad)
        else:
            self.norm = self.check_norm(float(self.zero._global_grad_norm))

    @torch.no_grad()
    def after_load(self) -> None:
        if self.stage in (1, 2):
            self.zero.update_lp_params()
        elif self.stage == 3:
            for i in range(len(self.masters)):
                self.zero._reassign_or_swap_out_partitioned_parameters(i)
            whole = self.zero.persistent_parameters  # small ones that ZeRO-3 never splits
            if whole:
                whole[0].partition(whole)
                whole[0].all_gather(whole)
        elif self.recipe.precision == "bf16":
            for weights, masters in zip(self.zero.fp16_groups, self.zero.fp32_groups, strict=True):
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master)

    def state(self) -> dict[str, torch.Tensor]:
        state = {f"weight.{i}": master.detach() for i, master in enumerate(self.masters)}
        for i, master in enumerate(self.masters):
            state |= {f"{key}.{i}": value for key, value in self.adamw.state[master].items()}
        return state

    def release(self) -> None:
        super().release()
        self.engine.destroy()

    def layout(self) -> dict[str, Any]:
        return super().layout() | {"zero_stage": self.stage}
