"""Saved state: whole or absent, checked before use, never run as code, and safe when the disk is full."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import small_disk

from training import checkpoint
from training.run import USAGE, RunError
from training.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))
LAYOUT = {"engine": "torch", "ranks": 1, "precision": "fp32"}


def payload(step: int, elements: int = 1000) -> dict[str, Any]:
    return {"step": step, "state": {"weight": torch.full((elements,), float(step))}}


def save(folder: Path, step: int, keep: int = 2, **changes: Any) -> Path:
    return checkpoint.save(folder, step, payload(step, **changes), world=ALONE, layout=LAYOUT, keep=keep)


def load(folder: Path, **layout: Any) -> tuple[dict[str, Any] | None, list[str]]:
    notes: list[str] = []
    found = checkpoint.load_latest(folder, world=ALONE, layout=LAYOUT | layout, warn=notes.append)
    return found, notes


def test_the_newest_is_loaded_and_only_the_newest_few_are_kept(tmp_path: Path) -> None:
    assert load(tmp_path) == (None, [])
    for step in (3, 20, 100):
        save(tmp_path, step)
    assert checkpoint.steps_in(tmp_path) == [100, 20]
    found, notes = load(tmp_path)
    assert found is not None
    assert found["step"] == 100
    assert torch.equal(found["state"]["weight"], torch.full((1000,), 100.0))
    assert not notes


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "rank-0.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "rank-0.pt").write_bytes(data)


def cut_short(path: Path) -> None:
    os.truncate(path / "rank-0.pt", 100)


def lose_a_file(path: Path) -> None:
    (path / "rank-0.pt").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def spoil_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 1, "step": 20, "layout": {}')


def make_the_manifest_another_thing(path: Path) -> None:
    (path / "manifest.json").write_text("[1]")


DAMAGES = [
    flip_a_bit,
    cut_short,
    lose_a_file,
    lose_the_manifest,
    spoil_the_manifest,
    make_the_manifest_another_thing,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, damage: Any) -> None:
    save(tmp_path, 10)
    damage(save(tmp_path, 20))
    found, notes = load(tmp_path)
    assert found is not None
    assert found["step"] == 10
    assert len(notes) == 1
    assert "step-00000020 is damaged" in notes[0]
    save(tmp_path, 15)  # the damaged one does not count as kept
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000015"]
    save(tmp_path, 20)
    assert load(tmp_path)[0]["step"] == 20  # type: ignore[index]


def test_when_all_are_damaged_that_is_said(tmp_path: Path) -> None:
    for step in (10, 20):
        flip_a_bit(save(tmp_path, step))
    for _ in range(2):  # and again, when the program is started once more
        with pytest.raises(RunError, match=r"every checkpoint in .* is damaged; remove"):
            load(tmp_path)


def test_a_checkpoint_of_another_layout_is_refused_with_both_layouts(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(RunError, match=r"ranks 1 \(this run: 2\), precision fp32 \(this run: bf16\)") as caught:
        load(tmp_path, ranks=2, precision="bf16")
    assert caught.value.exit_code == USAGE


def test_what_a_killed_save_leaves_is_not_a_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    save(tmp_path, 10)
    leftover = tmp_path / ".saving-step-00000020"
    leftover.mkdir()
    (leftover / "rank-0.pt").write_bytes(b"half")
    assert load(tmp_path)[0]["step"] == 10  # type: ignore[index]
    save(tmp_path, 20)
    assert not leftover.exists()
    assert checkpoint.steps_in(tmp_path) == [20, 10]


class _Malice:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-here",)


def test_loading_never_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = checkpoint.save(tmp_path, 1, {"step": 1, "bad": _Malice()}, world=ALONE, layout=LAYOUT, keep=1)
    assert where.exists()
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path)
    assert not (tmp_path / "was-here").exists()


def test_tensors_stay_on_disk_until_they_are_copied(tmp_path: Path) -> None:
    """Resuming needs no second copy of the state: what is loaded is a map of the file."""
    path = save(tmp_path, 1, elements=1 << 20)
    found, _ = load(tmp_path)
    assert found is not None
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(path / "rank-0.pt") in maps.read_text()


def check_full(folder: Path) -> None:
    with pytest.raises(RunError, match=r"step 20 could not be saved: .*; the checkpoint of step 10 is intact"):
        save(folder, 20, elements=1 << 20)
    assert os.listdir(folder) == ["step-00000010"]
    assert load(folder)[0]["step"] == 10  # type: ignore[index]


def test_a_full_disk_is_an_error_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2):
        save(tmp_path / "disk", 10)
        check_full(tmp_path / "disk")


def test_a_write_that_fails_is_an_error_and_the_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)

    def full(writer: Any, data: Any) -> int:
        writer.error = OSError(28, "No space left on device")
        raise writer.error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint._Writer, "write", full)
        check_full(tmp_path)


def test_random_numbers_go_on_where_they_were() -> None:
    state = checkpoint.random_state(ALONE.device)
    expected = torch.rand(4)
    checkpoint.set_random_state(state, ALONE.device)
    assert torch.equal(torch.rand(4), expected)
