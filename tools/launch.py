"""Start train.py on this machine's devices through DeepSpeed's launcher: what `make train` ends in.

The `deepspeed` command is not used: on one machine it keeps SIGTERM to itself, so that a run could not save,
and ends with 0 when its launcher was killed. This program turns into that launcher, which passes signals on.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.recipe import RecipeError, load

ROOT = Path(__file__).resolve().parents[1]


def devices() -> list[str]:
    """Ids of the GPUs this process may use; empty without one. Imports torch only where a GPU may be."""
    nodes = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"), *Path("/dev").glob("dxg")]
    if not nodes:
        return []
    import torch

    count = torch.cuda.device_count()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[:count] if visible else [str(index) for index in range(count)]


def environment(gpus: Sequence[str], processes: int) -> dict[str, str]:
    """Environment of a run: the accelerator, a folder of its own for compiled code, cores shared out."""
    env = dict(os.environ)
    if not gpus:
        env["DS_ACCELERATOR"] = "cpu"
        # OpenMP's threads wait for each other by spinning, which made a step ten times slower on busy cores.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if processes > 1:
            env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # A lock file left in the shared folder by somebody's killed build would make this run wait for ever.
    env.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    return env


def command(words: Sequence[str], gpus: Sequence[str], processes: int) -> list[str]:
    """DeepSpeed's launcher for `processes` ranks of `train.py *words` on this machine."""
    ids = [int(gpu) if gpu.isdigit() else gpu for gpu in gpus[:processes]] or list(range(processes))
    world = base64.urlsafe_b64encode(json.dumps({"localhost": ids}).encode()).decode()
    launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    # critical: that a rank ended, and with which code, is said by the rank itself.
    launcher += ["--master_addr=127.0.0.1", f"--master_port={free_port()}", "--log_level=critical"]
    return [*launcher, str(ROOT / "train.py"), *words]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE", help="a name in recipes/ or a path")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="recipe settings to change")
    parser.add_argument("--run-dir", metavar="DIR", help="folder of the run; default runs/<recipe name>")
    parser.add_argument("--processes", metavar="N", type=int, help="ranks; default one per GPU, or one on CPU")
    given = parser.parse_intermixed_args(arguments)
    gpus = devices()
    processes = given.processes if given.processes is not None else len(gpus) or 1
    try:
        if processes < 1 or (gpus and processes > len(gpus)):
            raise RecipeError(f"--processes {processes}: write 1{f' to {len(gpus)}' if gpus else ' or more'}")
        load(given.recipe, given.overrides).accumulation_steps(processes)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    words = [given.recipe, *given.overrides, *(["--run-dir", given.run_dir] if given.run_dir else [])]
    sys.stdout.flush()
    # Ranks end with their launcher, which this program turns into (training/run.py).
    env = environment(gpus, processes) | {"WATERLINE_LAUNCHER": str(os.getpid())}
    os.execve(sys.executable, command(words, gpus, processes), env)


if __name__ == "__main__":
    sys.exit(main())
