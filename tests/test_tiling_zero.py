"""Under DeepSpeed's ZeRO a tiled model gets the plain model's gradients, each parameter's once."""

import os
import subprocess
import sys

import pytest

WORKER = "tests/tiled_zero_worker.py"


MODES = ("none", "full", "full+attention", "none+offload", "full+deepspeed_offload")


def run(tmp_path, repo_root, ranks: int, *runs: str) -> None:
    environment = os.environ | {"WORLD_SIZE": str(ranks), "MEETING": f"file://{tmp_path / 'meeting'}"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(repo_root), "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, *runs],
            cwd=repo_root,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.count("gradients agree") == len(runs)


def test_every_stage_on_one_rank(tmp_path, repo_root):
    run(tmp_path, repo_root, 1, "0:none", "1:full", "2:full+attention+offload", "3:none", "3:full+deepspeed_offload")


def test_zero_3_on_two_ranks(tmp_path, repo_root):
    run(tmp_path, repo_root, 2, "3:full")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_and_mode_on_two_ranks(tmp_path, repo_root, stage):
    run(tmp_path, repo_root, 2, *(f"{stage}:{mode}" for mode in MODES))
