"""What DeepSpeed holds at ZeRO stage 3, event by event (training/engine_memory.py)."""

from __future__ import annotations

from training.engine_memory import STEP_BYTES, Mark
from training.kinds import GRADIENTS, OPTIMIZER, PARAMETERS
from training.zero_memory import DeepSpeedMemory


class Zero3Memory(DeepSpeedMemory):
    """First approximation: all that may be gathered is."""

    def start(self) -> None:
        shard = -(-self.total // self.world_size)
        live = min(self.total, int(self.zero.get("stage3_max_live_parameters", 1e9)))
        self.hold(PARAMETERS, (shard + live) * self.itemsize)
        self.hold_offloaded(OPTIMIZER, shard * 12 + STEP_BYTES) if self.offload else self.hold(OPTIMIZER, shard * 12)
        buckets = int(self.zero["reduce_bucket_size"]) * 2
        self.hold(GRADIENTS, (shard + buckets) * self.itemsize)

    def at(self, mark: Mark) -> None:
        pass
