"""Measure what the product claims of its own speed: `make bench ARGS="loop modes"`, or all of it.

Each section is a program of its own, tools/bench_<section>.py, run in a fresh process so that none warms up or
fragments the next. All figures are ratios of medians of runs taken in turn: a shared machine's drift cancels out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def sections() -> dict[str, Path]:
    return {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}


def main(arguments: Sequence[str] | None = None) -> int:
    known = sections()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(known)}; default: all")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.sections if name not in known]:
        print(f"no section {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    codes = []
    for name in given.sections or known:
        print(f"== {name}", flush=True)
        codes.append(subprocess.run([sys.executable, str(known[name])], check=False).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
