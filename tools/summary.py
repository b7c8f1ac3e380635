"""summary.json: what a sweep found, mode by mode, from its trials."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.timing import bases, by_importance
from tools.trials import AXES, PEAKS, Question, Variant
from training.records import NULL, NUMBER, Fields, has_shape, read_object
from training.run import FAILED, write_json, write_whole
from training.schema import ROOT

if TYPE_CHECKING:
    from tools.measure import Found, Sweep

LIMITS = {"oom": "device", "host_oom": "host"}
ANSWER = {"seq_length": "longest_context", "micro_batch_size": "largest_micro_batch_size"}
# What is read of a summary, of each of its modes, of each of a mode's timings; of a step's memory and its points.
WHOLE, MAYBE_WHOLE, MAYBE_NUMBER, MAYBE_TEXT = (int,), (int, NULL), (*NUMBER, NULL), (str, NULL)
SUMMARY: Fields = {
    **dict.fromkeys(("recipe", "axis", "device", "torch", "deepspeed", "code"), (str,)),
    **dict.fromkeys(("granularity", "seq_length", "micro_batch_size", "world_size", "trials"), WHOLE),
    **{"budget_bytes": MAYBE_WHOLE, "host_budget_bytes": MAYBE_WHOLE, "cuda": MAYBE_TEXT, "seconds": NUMBER},
    **{"not_timed": (list,), "modes": (dict,)},
}
MODE: Fields = {
    **{"mode": (str,), "attention": (str,), "status": (str,), "error": MAYBE_TEXT, "limited_by": MAYBE_TEXT},
    **{"longest_context": WHOLE, "next_tried": MAYBE_WHOLE, "predicted_longest_context": MAYBE_WHOLE},
    **dict.fromkeys(("tokens_per_s", "step_time_s", "overhead", "overhead_at", *PEAKS), MAYBE_NUMBER),
    **{"trials": WHOLE, "timings": (list,)},
}
TIMING: Fields = {
    **{"seq_length": WHOLE, "micro_batch_size": WHOLE, "step_time_s": NUMBER, "step_time_spread_s": (list,)},
    **{"tokens_per_s": NUMBER, "overhead": MAYBE_NUMBER, "memory": MAYBE_TEXT, **PEAKS},
}
MEMORY: Fields = {"peak_device_bytes": NUMBER, "after_forward_device_bytes": NUMBER, "breakdown_bytes": (dict,)}
POINT: Fields = {"operation": WHOLE, "phase": (str,), "module": (str,), "live_device_bytes": NUMBER}


def of(sweep: Sweep) -> dict[str, Any]:
    """The summary of a sweep that has run. Modes are in the recipe's order."""
    recipe, trials = sweep.recipe, sweep.trials
    base = bases(sweep.found)
    wanted = by_importance({v: f.longest for v, f in sweep.found.items()}, sweep.granularity)
    timed = {v: _timings(sweep, v, sorted({t.size for t in wanted if t.variant == v})) for v in sweep.found}
    modes = {}
    for variant, found in sweep.found.items():
        plain = {t[sweep.axis]: t for t in timed[base[variant]]} if variant in base else {}
        for timing in timed[variant]:
            other = plain.get(timing[sweep.axis])
            timing["overhead"] = timing["step_time_s"] / other["step_time_s"] if other else None
        modes[sweep.display.names[variant]] = _mode(sweep, variant, found, timed[variant])
    return {
        "recipe": recipe.name,
        "axis": sweep.axis,
        "granularity": sweep.granularity,
        "maximum": sweep.maximum,
        "seq_length": recipe.seq_length,
        "micro_batch_size": recipe.micro_batch_size,
        "budget_bytes": recipe.budget_bytes,
        "host_budget_bytes": recipe.host_budget_bytes,
        **{name: trials.environment[name] for name in ("device", "world_size", "torch", "deepspeed", "cuda")},
        "code": trials.code,
        "trials": sum(r["code"] == trials.code for r in trials.records),
        "seconds": sum(r["wall_s"] for r in trials.records if r["code"] == trials.code),  # also of interrupted sweeps
        "not_timed": [[sweep.display.names[t.variant], t.size] for t in sweep.left_out],
        "modes": modes,
    }


def _mode(sweep: Sweep, variant: Variant, found: Found, timings: list[dict[str, Any]]) -> dict[str, Any]:
    longest = found.longest
    beyond = found.boundary.next_tried if found.boundary else None
    next_status = found.tried[beyond]["status"] if beyond is not None else None
    last: dict[str, Any] = next((t for t in timings if t[sweep.axis] == longest), {})
    compared: dict[str, Any] = next((t for t in reversed(timings) if t["overhead"]), {})
    fit = found.tried.get(longest, {})
    lengths = sweep.axis == "seq_length"
    return {
        "mode": variant.mode,
        "attention": variant.attention,
        "longest_context": longest if lengths else sweep.recipe.seq_length if longest else 0,
        **({} if lengths else {"largest_micro_batch_size": longest}),
        "limited_by": LIMITS[next_status] if next_status else "max" if found.boundary else None,
        "next_tried": beyond,
        "next_status": next_status,
        "tokens_per_s": last.get("tokens_per_s"),
        "step_time_s": last.get("step_time_s"),
        "peak_device_bytes": last.get("peak_device_bytes") or fit.get("peak_device_bytes"),
        "after_forward_device_bytes": last.get("after_forward_device_bytes") or fit.get("after_forward_device_bytes"),
        "peak_host_bytes": last.get("peak_host_bytes", fit.get("peak_host_bytes")),
        "peak_op": last.get("peak_op") or fit.get("peak_op"),
        "predicted_longest_context": found.predicted,
        "overhead": compared.get("overhead"),
        "overhead_at": compared.get(sweep.axis),
        "trials": len({r["trial"] for r in found.tried.values()} | {n for t in timings for n in t["trials"]}),
        "search_trials": len(found.tried),
        "status": found.problem["status"] if found.problem else "completed",
        "error": found.problem["error"] if found.problem else None,
        "timings": timings,
    }


def _timings(sweep: Sweep, variant: Variant, sizes: list[int]) -> list[dict[str, Any]]:
    """What was timed of a variant, a row per size; over all rounds the median step."""
    rows = []
    steps, rounds = sweep.recipe.sweep.timing_steps, sweep.recipe.sweep.timing_rounds
    for size in sizes:
        point = sweep.point(variant, size)
        known = [sweep.trials.known(Question(point, "timing", steps, n)) for n in range(rounds)]
        records = [r for r in known if r and r["status"] == "completed"]
        times_s = [s for r in records for s in r["step_times_s"]]
        if not times_s:
            continue
        step_s = statistics.median(times_s)
        tokens = records[0]["tokens_per_s"] * records[0]["step_time_s"]
        followed = [r["run"] for r in sweep.trials.records if r["key"] == sweep.trials.key(point) and r["memory"]]
        rows.append(
            {
                "seq_length": point.seq_length,
                "micro_batch_size": point.micro_batch_size,
                "step_time_s": step_s,
                "step_time_spread_s": [min(times_s), max(times_s)],
                "tokens_per_s": tokens / step_s,
                **{
                    name: max(r[name] for r in records)
                    for name in ("peak_device_bytes", "after_forward_device_bytes", "peak_host_bytes")
                },
                "peak_op": records[0]["peak_op"],
                "predicted_peak_device_bytes": records[0]["predicted_peak_device_bytes"],
                "trials": [r["trial"] for r in records],
                "memory": f"{followed[-1]}/memory.json" if followed else None,
            }
        )
    return rows


def write(folder: Path, summary: dict[str, Any]) -> None:
    """summary.json, and memory.json: where the memory of a step went, per mode, at the size most were followed at."""
    memory = _memory(folder, summary)
    if memory["modes"]:
        write_whole(folder / "memory.json", json.dumps(memory) + "\n")
    write_json(folder / "summary.json", summary)


def _memory(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    axis, modes = summary["axis"], summary["modes"]
    followed = [t[axis] for mode in modes.values() for t in mode["timings"] if t["memory"]]
    at = max(followed, key=lambda size: (followed.count(size), size), default=0)  # of equals the longest
    rows = {n: t for n, mode in modes.items() for t in mode["timings"] if t["memory"] and t[axis] == at}
    contents = {}
    for name, row in rows.items():
        content = read_object(folder / row["memory"])
        points = content.get("timeline")
        if has_shape(content, {**MEMORY, "timeline": (list,)}) and points and all(has_shape(p, POINT) for p in points):
            contents[name] = content | {"timeline": {key: [p[key] for p in points] for key in POINT}}
        else:
            print(f"{folder / row['memory']}: missing or damaged; the pictures of memory lack {name}", file=sys.stderr)
    return {"axis": axis, "size": at, "modes": contents}


def read_memory(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """memory.json of a sweep, for the modes of its summary; empty when nothing was followed, or it is damaged."""
    memory = read_object(folder / "memory.json")
    if not has_shape(memory, {"size": WHOLE, "modes": (dict,)}):
        return {}
    lists = dict.fromkeys(POINT, (list,))
    good = {n: m for n, m in memory["modes"].items() if has_shape(m, MEMORY) and has_shape(m.get("timeline"), lists)}
    return memory | {"modes": {name: content for name, content in good.items() if name in summary["modes"]}}


def read(folder: Path) -> dict[str, Any]:
    """The summary of the sweep in `folder`. Raises ValueError with what to do when there is none."""
    file = folder / "summary.json"
    if not file.is_file():
        if (folder / "trials.jsonl").exists():
            hint = "the sweep has not ended: run it again, it goes on"
        else:
            known = (ROOT / "recipes" / f"{folder.name}.yaml").exists()
            hint = f"make one with `make sweep RECIPE={folder.name if known else 'NAME'}`"
        raise ValueError(f"{folder}: there is no finished sweep here; {hint}")
    found = read_object(file)
    if not _is_summary(found):
        raise ValueError(f"{file}: is damaged; run the sweep again, finished trials are not repeated")
    return found


def _is_summary(found: dict[str, Any]) -> bool:
    if not has_shape(found, SUMMARY) or found["axis"] not in AXES:
        return False
    shape = {**MODE, ANSWER[found["axis"]]: WHOLE}
    modes = found["modes"].values()
    return all(has_shape(m, shape) and all(has_shape(t, TIMING) for t in m["timings"]) for m in modes)


def exit_code(summary: dict[str, Any]) -> int:
    """0, or 1 when a mode was stopped by a failure or a time limit."""
    return FAILED if any(mode["status"] != "completed" for mode in summary["modes"].values()) else 0
