"""Mode `budget`: compiled layers keep the share that is asked for, train like mode none, and never peak needlessly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._functorch.config as functorch

from model import recompute, tiling
from model.gpt import GPT, GPTConfig
from model.modes import Mode, parse
from tests import tiny
from training import run
from training.choosing import compile_budget
from training.choosing.calibration import Shape
from training.memory import Meter

CONFIG = GPTConfig(num_layers=3, hidden_size=64, num_attention_heads=4, vocab_size=100)
TOKENS = torch.randint(0, 100, (1, 256), generator=torch.Generator().manual_seed(3))


def make_model(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(replace(CONFIG, **changes))  # type: ignore[arg-type]


def step(model: GPT) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss, gradients, and bytes that layers keep."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with Meter(model=model) as meter:
        before = meter.live_bytes
        with meter.phase("forward"):
            loss = model(TOKENS, TOKENS)
        with meter.phase("backward"):
            loss.backward()
        kept = meter.after_forward_bytes - before
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None], kept


def test_its_name_has_a_share_and_nothing_else() -> None:
    for name in ("budget0", "budget0.5", "budget1", "budget.25"):
        assert parse(str(parse(name))) == parse(name)
    assert parse("budget0.5") == Mode("budget", fraction=0.5)
    assert str(parse("budget0.50")) == "budget0.5"
    for wrong in ("budget", "budget2", "budget1.5", "budget-0.1", "budget0.5+offload", "budget50%"):
        with pytest.raises(ValueError, match="such as budget0.5"):
            parse(wrong)
    for fields in ({"recompute": "none", "fraction": 0.5}, {"recompute": "budget", "offload": "async"}):
        with pytest.raises(ValueError, match="budget"):
            Mode(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["sdpa", "unfused"])
def test_a_smaller_share_keeps_less_and_gradients_are_those_of_none_to_rounding(attention: str) -> None:
    model = make_model(attention=attention)
    loss, gradients, kept_before = step(model)
    for share in ("1", "0.3", "0"):
        recompute.apply(model, f"budget{share}")
        found, others, kept = step(model)
        recompute.require_active(model, f"budget{share}")
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-6)
        assert functorch.activation_memory_budget == 1.0
        if share != "1":  # unfused, the partitioner keeps more at 1 than eager autograd does
            assert kept < kept_before
            kept_before = kept
    recompute.apply(model, "none")
    again = step(model)[1]
    assert all(torch.equal(a, b) for a, b in zip(again, gradients))


def test_one_graph_serves_all_layers_and_shares_do_not_mix() -> None:
    model = make_model(num_layers=3)
    kept = []
    for share in ("0", "1", "0"):
        activity = recompute.apply(model, f"budget{share}")
        assert not activity.compiled
        kept.append(step(model)[2])
        assert activity.compiled
    assert kept[0] == kept[2] < kept[1]


def test_evaluation_runs_as_it_is() -> None:
    model = make_model()
    recompute.apply(model, "budget0.5")
    step(model)
    model.eval()
    with torch.no_grad():
        compiled = model(TOKENS, TOKENS)
        recompute.apply(model, "none")
        assert torch.equal(compiled, model(TOKENS, TOKENS))


@pytest.mark.parametrize("dropout", ["hidden_dropout", "attention_dropout"])
def test_dropout_that_would_be_drawn_anew_in_backward_is_refused(dropout: str) -> None:
    """Measured with finite differences: the gradient of a share below 1 belongs to another mask."""
    model = make_model(attention="unfused", **{dropout: 0.2})
    with pytest.raises(ValueError, match="gradients would be wrong"):
        recompute.apply(model, "budget0.5")
    recompute.apply(model, "budget1")


def test_what_it_cannot_be_combined_with_is_said() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="is for all layers"):
        recompute.apply(model, ["budget0.5", "none", "none"])
    recompute.apply(model, "none")
    tiling.apply(model, mlp_tile_tokens=64)
    with pytest.raises(ValueError, match="cannot see into tiles"):
        recompute.apply(model, "budget0.5")


def test_a_share_that_peaks_higher_gives_way_to_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(CONFIG, tiling.Tiles(), torch.float32, 1, 256)
    peaks = {0.05: (10, 500), 0.1: (20, 300), 0.15: (30, 200), 0.2: (60, 100)}  # kept by a layer, and above that
    monkeypatch.setattr(compile_budget, "layer_bytes", lambda shape, mode, device: peaks[mode.fraction])
    device = torch.device("cpu")
    better, why = compile_budget.guarded(parse("budget0.05"), shape, 3, device)
    assert str(better) == "budget0.2"  # 3 * 60 + 100 is the least
    assert "budget0.05 would peak above budget0.2" in why
    better, why = compile_budget.guarded(parse("budget0.05"), shape, 100, device)
    assert (str(better), why) == ("budget0.05", "")


def test_it_trains_and_is_named_as_it_was_asked_for(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = tiny.little_data(tmp_path_factory)
    torch_engine = ("engine.name=torch", "engine.deepspeed_config=null", "steps=2", "evaluation.every_steps=null")
    assert tiny.start(tmp_path / "budget", data, *torch_engine, "recompute=budget0.5") == 0
    assert '"mode": "budget0.5"' in (tmp_path / "budget" / "result.json").read_text()
    zero3 = ("engine.name=deepspeed", "engine.deepspeed_config=zero3")
    assert tiny.start(tmp_path / "zero3", data, *zero3, "recompute=budget0.5") == run.USAGE
