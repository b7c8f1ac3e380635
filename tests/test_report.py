"""What a person gets from a sweep: every picture, table and sentence says what was measured."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fake_trials import FakeTrials, longest, plain, recipe, sweep

from tools import figures, publish, recommend, report, summary, tensorboard_sweep, trials
from tools.launch import free_port
from training.run import USAGE

MODES = "[none, selective, full, full+attention]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of four modes under two attentions, one of which failed, with its report."""
    path = tmp_path_factory.mktemp("sweep")
    broken = lambda mode, tokens, steps: "failed" if mode == "selective" else plain(mode, tokens, steps)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials.processes, "run", FakeTrials(broken))
        settings = recipe("sweep.attention=[unfused, sdpa]", modes=MODES)
        running = sweep(path, settings, lambda v: longest(v.mode, 64))
        running.run()
        summary.write(path, summary.of(running))
    report.write(path)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return summary.read(folder)


def test_the_report_has_table_pictures_recipe_environment_and_what_failed(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    pictures = re.findall(r"!\[[^]]+\]\((\w+\.png)\)", text)
    assert pictures == ["longest_context.png", "speed.png", "overhead.png", "memory.png", "timeline.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert "| unfused/none | 960 | device | 960 = |" in text
    assert "| unfused/selective | failed |" in text
    assert "`unfused/selective` was stopped, failed:" in text
    assert re.search(r"\| `full` \| sdpa \| 4,992 \| oom \|", text)  # rows that did not complete stay in
    assert '| `device` | `"a test"` |' in text
    assert "```yaml\nname: quickstart\n" in text
    assert "| `sdpa/full` | `sdpa/full+attention` | x1.51 | longer |" in text  # the expected order, by how much
    assert "Shown: `unfused/none`, `unfused/full`, `unfused/full+attention`; of the modes followed" in text


def test_a_table_in_the_terminal_and_errors_for_people(folder: Path, tmp_path: Path, capsys) -> None:
    assert report.main([str(folder)]) == 0
    said = capsys.readouterr().out
    for words in ("sdpa/full+attention", "3,264", "x1.05", "exit code 1: failed: an error", "For up to 960 tokens use"):
        assert words in said
    assert report.main([str(tmp_path)]) == USAGE
    assert "no finished sweep here; make one with `make sweep RECIPE=NAME`" in capsys.readouterr().err
    assert report.main([str(tmp_path / "quickstart")]) == USAGE
    assert "make one with `make sweep RECIPE=quickstart`" in capsys.readouterr().err
    (tmp_path / "trials.jsonl").touch()
    assert report.main([str(tmp_path)]) == USAGE
    assert "run it again, it goes on" in capsys.readouterr().err


def test_every_axis_names_its_unit_and_every_curve_has_a_look_of_its_own(folder: Path, found: dict[str, Any]) -> None:
    drawn = figures.draw(found, summary.read_memory(folder, found))
    assert list(drawn) == ["longest_context", "speed", "overhead", "memory", "timeline"]
    for name, figure in drawn.items():
        axes = figure.axes
        assert re.search(r"tokens|iB|operation", axes[-1].get_xlabel()), name
        if name in ("speed", "overhead", "timeline"):
            assert re.search(r"tokens/s|step time|[KMG]iB", axes[0].get_ylabel()), name
        for panel in axes:
            looks = [
                (line.get_marker(), line.get_linestyle())
                for line in panel.lines
                if line.get_marker() in figures.MARKERS
            ]
            assert len(set(looks)) == len(looks), name
        hatches = [(patch.get_hatch(), patch.get_label()) for patch in axes[0].patches if patch.get_label()[0] != "_"]
        assert len({hatch for hatch, _ in hatches}) == len(hatches), name
    figures.save(drawn, folder)


def test_modes_of_a_failed_sweep_do_not_break_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status in ("oom", "failed"):
        folder = tmp_path / status
        monkeypatch.setattr(trials.processes, "run", FakeTrials(lambda *ignored: status))  # noqa: B023
        running = sweep(folder, recipe())
        running.run()
        summary.write(folder, summary.of(running))
        report.write(folder)
        text = (folder / "report.md").read_text()
        assert "Nothing can be recommended" in text
        assert ("nothing fits" in text) == (status == "oom")


# -- what to use -------------------------------------------------------------------------------------------------


def test_for_a_wanted_context_the_fastest_mode_that_fits(found: dict[str, Any]) -> None:
    chosen = [(c.mode, c.begin, c.end) for c in recommend.choices(found)]
    assert chosen == [("unfused/none", 1, 960), ("unfused/full+attention", 961, 3264), ("unfused/full", 3265, 4928)]
    lines = list(recommend.lines(found))
    assert lines[:2] == [
        "For up to 960 tokens use `unfused/none`: 1,000 tokens/s at 960, among the fastest there; about the same:"
        " `sdpa/none`.",
        "For 961 to 3,264 tokens use `unfused/full+attention`: 952 tokens/s at 3,264, among the fastest there; about"
        " the same: `sdpa/full+attention`; a step takes x1.05 the time of `none` at 960.",
    ]
    assert lines[3] == "If you need at least 1,000 tokens/s: up to 960 tokens with `unfused/none` (peak 94.7 KiB)."
    assert lines[4].startswith("If you need at least 952 tokens/s: up to 3,264 tokens with `unfused/full+attention`")


def test_the_reason_says_whether_there_was_a_choice(found: dict[str, Any]) -> None:
    one = {**found, "modes": {name: mode for name, mode in found["modes"].items() if mode["attention"] == "sdpa"}}
    first, second, third, *_ = recommend.lines(one)
    assert first == "For up to 960 tokens use `sdpa/none`: 1,000 tokens/s at 960, the fastest mode that fits there."
    assert "the fastest mode that fits there; a step takes" in second
    assert "the only mode that reaches 4,928" in third
    fewer = json.loads(json.dumps(one))
    timings = fewer["modes"]["sdpa/full"]["timings"]
    fewer["modes"]["sdpa/full"]["timings"] = [t for t in timings if not 960 < t["seq_length"] <= 3264]
    assert "952 tokens/s at 3,264, the fastest at 960 of the modes that fit;" in list(recommend.lines(fewer))[1]
    fewer["modes"]["sdpa/full"]["timings"] = [t for t in timings if t["seq_length"] == 4928]
    assert "Other lengths: not enough timings at a common length to compare; run the" in list(recommend.lines(fewer))[1]


def test_modes_that_are_about_as_fast_are_named_and_the_simplest_is_taken(found: dict[str, Any]) -> None:
    first = recommend.choices(found)[0]
    assert first.alike == ("sdpa/none",)
    noisy = json.loads(json.dumps(found))
    for timing in noisy["modes"]["sdpa/none"]["timings"]:
        timing["step_time_s"] *= 0.98  # within what is called alike
    assert recommend.choices(noisy)[0].mode == "unfused/none"


def test_nothing_is_recommended_from_the_speeds_of_a_busy_machine(found: dict[str, Any]) -> None:
    assert recommend.doubt(found) is None
    faster, unsteady = json.loads(json.dumps(found)), json.loads(json.dumps(found))
    faster["modes"]["sdpa/full"]["timings"][0]["overhead"] = 0.76
    for mode in unsteady["modes"].values():
        for timing in mode["timings"]:
            timing["step_time_spread_s"] = [timing["step_time_s"], 2 * timing["step_time_s"]]
    for noisy in (faster, unsteady):
        first, second = recommend.lines(noisy)
        assert "too busy to compare speeds" in first
        assert second.startswith("From the longest to the shortest: `unfused/full` 4,928, `sdpa/full` 4,928")
        assert "tokens/s" not in first + second


def test_the_expected_order_is_told_of_neighbours_that_were_measured(found: dict[str, Any]) -> None:
    chain = {("none", "full+attention"), ("full+attention", "full")}  # selective failed
    pairs = {(a, b) for a, b, _ in recommend.order(found)}
    assert pairs == {(f"{attention}/{a}", f"{attention}/{b}") for attention in ("sdpa", "unfused") for a, b in chain}
    whole = json.loads(json.dumps(found))
    for mode in whole["modes"].values():
        mode["status"], mode["longest_context"] = "completed", mode["longest_context"] or 1600
    pairs = {(a, b) for a, b, _ in recommend.order(whole)}
    assert ("sdpa/none", "sdpa/selective") in pairs
    assert ("sdpa/selective", "sdpa/full+attention") in pairs
    assert ("sdpa/none", "sdpa/full+attention") not in pairs  # selective stands between
    assert ("unfused/selective", "unfused/full+attention") not in pairs  # its scores are kept
    assert ("unfused/none", "unfused/full+attention") in pairs


def test_a_timeline_names_every_micro_batch() -> None:
    one = ["", "forward", "loss", "forward", "backward", ""]
    assert figures.phases([*one, "optimizer"]) == [(1, "forward"), (4, "backward"), (6, "optimizer")]
    assert [name for _, name in figures.phases([*one, *one, "optimizer"])] == [
        *("forward 1", "backward 1", "forward 2", "backward 2", "optimizer"),
    ]


def test_publishing_makes_a_dated_folder_and_a_decision_once(folder: Path, tmp_path: Path) -> None:
    target = publish.publish(folder, tmp_path)
    again = publish.publish(folder, tmp_path)
    assert target == again == tmp_path / "2026-01-02-quickstart-cpu"
    names = {file.name for file in target.iterdir()}
    assert names == {*publish.RECORDS, *(f"{name}.png" for name in report.PICTURES)}
    text = (tmp_path / "DECISIONS.md").read_text()
    assert text.count("## 2026-01-02: quickstart within") == 1
    for words in ("For up to 960 tokens use", "Evidence: [2026-01-02-quickstart-cpu]", "What would change it:"):
        assert words in text
    (tmp_path / "DECISIONS.md").write_text(text + "\n## 2026-01-03: by hand\n\nKept.\n")
    publish.publish(folder, tmp_path)
    assert "Kept." in (tmp_path / "DECISIONS.md").read_text()
    for name in publish.RECORDS:
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", (target / name).read_text()), name


# -- TensorBoard -------------------------------------------------------------------------------------------------


def test_tensorboard_has_a_run_per_mode_over_the_context(folder: Path, found: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.hparams import plugin_data_pb2

    for name, entry in found["modes"].items():
        events = EventAccumulator(str(folder / "tb" / name))
        events.Reload()
        tags = events.Tags()["scalars"]
        if entry["status"] == "failed":
            assert "sweep/tokens_per_s" not in tags
            continue
        assert set(tags) == {*tensorboard_sweep.TAGS, tensorboard_sweep.LONGEST}
        speeds = {e.step: e.value for e in events.Scalars("sweep/tokens_per_s")}
        assert speeds == pytest.approx({t["seq_length"]: t["tokens_per_s"] for t in entry["timings"]})
        assert [(e.step, e.value) for e in events.Scalars("sweep/longest_context")] == [(entry["longest_context"],) * 2]
        peaks = [e.value for e in events.Scalars("sweep/peak_device_gib")]
        assert peaks == pytest.approx([t["peak_device_bytes"] / 2**30 for t in entry["timings"]])
        content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
        assert start.hparams["mode"].string_value == entry["mode"]
        assert start.hparams["attention"].string_value == entry["attention"]
    events = EventAccumulator(str(folder / "tb" / "report"))
    events.Reload()
    assert set(events.Tags()["images"]) == {f"report/{name}" for name in report.PICTURES}
    text = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    (category,) = layout_pb2.Layout.FromString(text).category
    assert [chart.multiline.tag[0] for chart in category.chart] == [
        *(c[1][0] for c in tensorboard_sweep.LAYOUT["All modes"].values())
    ]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--window-size=1500,1100", "--virtual-time-budget=30000"),
)
# Colours that TensorBoard gives to the first runs.
RUN_COLOURS = ((255, 112, 67), (0, 119, 187), (204, 51, 17), (51, 187, 238), (238, 51, 119), (0, 153, 136))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to look at TensorBoard with (apt install chromium)")
def test_a_real_browser_shows_all_modes_in_one_chart(folder: Path, tmp_path: Path) -> None:
    import numpy as np
    from matplotlib.image import imread

    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder / "tb"), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://localhost:{port}/"
        _wait_for(f"{address}data/plugin/custom_scalars/layout", server)
        shot = tmp_path / "screenshot.png"
        words = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}"]
        subprocess.run(
            [str(CHROMIUM), *words, f"{address}#custom_scalars"], check=True, timeout=180, capture_output=True
        )
    finally:
        server.kill()
        server.wait()
    image = (imread(shot)[:, :, :3] * 255).round().astype(int)
    charts = image[120:420, 380:720].reshape(-1, 3)  # the first chart: speed against context, all modes
    seen = [colour for colour in RUN_COLOURS if (np.abs(charts - colour).max(axis=1) < 12).sum() > 30]
    assert len(seen) >= 2  # modes are as fast under both attentions here, so that half of the curves are covered


def _wait_for(address: str, server: subprocess.Popen[bytes], limit_s: float = 120) -> None:
    give_up_s = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if "Multiline" in answer.read().decode() or answer.status == 200:
                    return
        except OSError:
            pass
        assert server.poll() is None
        assert time.monotonic() < give_up_s
        time.sleep(0.2)
