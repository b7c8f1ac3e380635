"""Who takes part in a run: this process's rank, its device, and the few collectives the loop needs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_TEXT_BYTES = 2048  # of a problem that one rank tells the others


@dataclass(frozen=True)
class World:
    """One process's place among all of them."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """The sums of `values` over all ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        """The maxima of `values` over all ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: tuple[float, ...], operation: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        # On the CPU: gloo beside nccl, so that a few numbers never wait for the device's queue.
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, op=operation)
        return numbers.tolist()

    def barrier(self) -> None:
        self.max(0.0)

    def agree(self, problem: str | None) -> str | None:
        """The lowest rank's problem, the same on every rank; None when no rank has one."""
        if self.size == 1 or not any(self.max(problem is not None)):
            return problem
        text = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        if problem is not None:
            data = (problem or "unknown").encode()[:_TEXT_BYTES]
            text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [torch.empty_like(text) for _ in range(self.size)]
        dist.all_gather(texts, text)
        rank, first = next((i, t) for i, t in enumerate(texts) if t.any())
        return f"rank {rank}: " + bytes(first.tolist()).rstrip(b"\0").decode(errors="replace")

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self.size == 1:
            return text
        one = [text]
        dist.broadcast_object_list(one, src=0, device=torch.device("cpu"))
        return one[0]


def place() -> tuple[int, int, int]:
    """(rank, world size, local rank) as the launcher's environment gives them; (0, 1, 0) without a launcher."""
    rank, size, local_rank = (int(os.environ.get(key, value)) for key, value in _ALONE.items())
    return rank, size, local_rank


_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def join() -> World:
    """Meet the other ranks: nccl and gloo on GPUs, gloo on CPU. A single process meets nobody and needs no network.

    A single process gets a process group and the launcher's variables all the same: DeepSpeed asks for both.
    """
    rank, size, local_rank = place()
    for key, value in _ALONE.items():
        os.environ.setdefault(key, value)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost") and sys.platform == "linux":
                # Else gloo looks for the address of this machine's name, which may not exist.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(backend)
    return World(rank, size, local_rank, device)


def leave() -> None:
    """Part from the other ranks, when all do; DeepSpeed cannot be used in this process afterwards."""
    if dist.is_initialized():
        dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Exit with `code`; with an error at once, because other ranks may never come to part."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code and dist.is_initialized():
        os._exit(code)
    leave()
    sys.exit(code)
