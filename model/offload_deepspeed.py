"""DeepSpeed's activation offload (`cpu_checkpointing`): the input of a group of layers waits in host memory.

Its switches belong to the process, and its recompute replays random numbers but not autocast. This file sets the
ones, does the other, and counts the host memory.
"""

from typing import Any

import torch
import torch.distributed

from model import host
from model.replay import Activity, autocast_state, second_run


def checkpoint(function: Any, x: torch.Tensor, activity: Activity) -> torch.Tensor:
    """Runs `function(x)` under DeepSpeed's activation checkpointing, which moves x to host memory.

    x is empty afterwards: whatever else of `function` needs a tensor must hold it by itself. Raises RuntimeError when
    there is no process group, or when DeepSpeed's activation checkpointing was configured otherwise.
    """
    ds = _configured(x.device.type)
    autocast = autocast_state(x.device.type)
    first = True

    def run(x: torch.Tensor) -> torch.Tensor:
        nonlocal first
        if first:
            first = False
            return function(x)
        with second_run(activity), autocast():
            return function(x)

    activity.offloaded_bytes += x.nbytes
    y = ds.non_reentrant_checkpoint(run, x)
    # Where DeepSpeed keeps the copy: with x, or where it copies on a stream, in an engine.
    engine = getattr(ds, "_cpu_offload_engine", None)
    copies = [getattr(x, "saved_data", None), *(copy for copy, *_ in getattr(engine, "_tracker", {}).values())]
    for copy in copies:
        if copy is not None:
            host.register(copy.untyped_storage())
    return y


def _configured(device_type: str) -> Any:
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import checkpointing as ds

    if not deepspeed.comm.is_initialized():
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                "deepspeed_offload needs a process group: call deepspeed.init_distributed() first, or use our own "
                "+offload, which needs none"
            )
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for minutes
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    # On CPU, cpu_checkpointing alone aliases its argument and then empties it; partitioning makes it copy.
    partition = device_type == "cpu"
    if not ds.is_configured():
        ds.configure(None, partition_activations=partition, checkpoint_in_cpu=True)
    if not ds.CPU_CHECKPOINT or (partition and not ds.PARTITION_ACTIVATIONS):
        raise RuntimeError(
            "DeepSpeed's activation checkpointing is configured already, without cpu_checkpointing"
            f"{' and partition_activations' if partition else ''}: deepspeed_offload needs that, or call "
            "deepspeed.checkpointing.configure with it"
        )
    return ds
