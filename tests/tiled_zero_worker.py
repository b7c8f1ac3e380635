"""One rank of tests/test_tiling_zero.py: tiled gradients under DeepSpeed's ZeRO against the plain model's.

Arguments: STAGE:MODE, one after the other. Rank and world size come from the environment, as a launcher sets them.
"""

import copy
import os
import sys
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.simplefilter("ignore")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402

from model import recompute, tiling  # noqa: E402
from model.gpt import GPT, GPTConfig  # noqa: E402


def main(runs: list[str]) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for minutes
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=size)
    deepspeed.init_distributed("gloo")
    for run in runs:
        stage, mode = run.split(":")
        train(int(stage), mode, rank, size)
        print("gradients agree", flush=True)
    dist.destroy_process_group()


def train(stage: int, mode: str, rank: int, size: int) -> None:
    torch.manual_seed(0)
    shape = {"num_query_groups": 2, "ffn_hidden_size": 56, "tied_embeddings": True, "init_std": 0.05}
    model = GPT(GPTConfig(2, 32, 4, 53, **shape))
    plain = copy.deepcopy(model)
    tiling.apply(model, 5, 5, 2)
    recompute.apply(model, mode)
    zero = {"stage": stage, "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": zero}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(2):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            tokens, targets = torch.randint(0, 53, (2, 1, 13), generator=generator)
            targets[:, rank::3] = -100
            loss = engine(tokens, targets, denominator=9)
            engine.backward(loss)
            expected = plain(tokens, targets, denominator=9)
            (expected / 2).backward()
            assert abs(loss.item() - expected.item()) < 1e-6 * expected.item(), (loss, expected)
            if stage == 3:  # gathered for the part that uses it, and given back: none is left behind
                gathered = [n for n, p in model.named_parameters() if p.ds_status.name != "NOT_AVAILABLE"]
                assert not gathered, gathered
            if micro == 1:
                compare(engine.module, plain, size)
            engine.step()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
                p.grad = None
            difference = engine(tokens, targets) - plain(tokens, targets)
        assert abs(difference.item()) < 1e-5, difference
    engine.destroy()


def compare(tiled: torch.nn.Module, plain: torch.nn.Module, size: int) -> None:
    for (name, a), (other, b) in zip(tiled.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        dist.all_reduce(b.grad)
        b.grad /= size
        gradient = safe_get_full_grad(a)
        error = (gradient - b.grad).norm() / b.grad.norm()
        assert error < 1e-6, (name, error.item())


main(sys.argv[1:])
