"""The head and its cross entropy, a tile of tokens at a time: no [T, V] tensor at any moment.

The gradient of a sum of cross entropies needs nothing from later in the network but a factor. So a tile's logits are
turned into their own gradient at once, and that into its share of the gradients of hidden [T, C] and of the weight
[V, C]; backward only multiplies these by the factor.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from model.gpt import IGNORED, LossHead, loss_denominator
from model.rowwise import tiles
from model.tile_parts import add_product, slices


def tiled_loss(
    head: LossHead,
    tile_tokens: int,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    denominator: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """What `head(hidden, targets, denominator)` gives, from `tile_tokens` rows of logits at a time."""
    device = hidden.device
    divisor = torch.as_tensor(loss_denominator(targets, denominator), dtype=torch.float32, device=device)
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else head.weight.dtype
    with torch.autocast(device.type, enabled=False):
        setting = (tile_tokens, head.label_smoothing, head.z_loss, dtype, torch.is_grad_enabled())
        return _TiledLoss.apply(hidden, head.weight, targets, divisor, setting)


@torch.library.custom_op("waterline::cross_entropy_rows", mutates_args=("logits",))
def cross_entropy_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    divisor: torch.Tensor,
    label_smoothing: float,
    z_loss: float,
    with_gradient: bool,
) -> torch.Tensor:
    """The sum of the losses of logits [t, V], float32; with_gradient: logits become their gradient / divisor.

    Loss of a row, as torch's cross entropy plus the z-loss of PaLM (arXiv:2204.02311, section 5), with e the label
    smoothing: -(1 - e) log p[target] - e mean(log p) + z_loss * logsumexp(logits)^2.
    """
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    vocabulary = logits.shape[-1]
    for tile in tiles(len(logits), vocabulary, logits.device):
        kept = targets[tile] != IGNORED
        index = torch.where(kept, targets[tile], 0).unsqueeze(1)
        target_logits = logits[tile].gather(1, index).float()  # (t, 1)
        log_p = F.log_softmax(logits[tile], dim=-1, dtype=torch.float32)  # (t, V)
        target_log_p = log_p.gather(1, index)
        losses = target_log_p * (label_smoothing - 1)
        if label_smoothing:
            losses -= label_smoothing * log_p.mean(-1, keepdim=True)
        logsumexp = target_logits - target_log_p
        if z_loss:
            losses += z_loss * logsumexp.square()
        total += torch.where(kept, losses.squeeze(1), 0).sum(dtype=torch.float64)
        if with_gradient:
            weight = kept.unsqueeze(1) / divisor  # (t, 1)
            gradient = log_p.exp_()
            gradient *= weight * (1 + 2 * z_loss * logsumexp) if z_loss else weight
            if label_smoothing:
                gradient -= weight * (label_smoothing / vocabulary)
            gradient.scatter_add_(1, index, weight * (label_smoothing - 1))
            logits[tile] = gradient
    return total.float()


@cross_entropy_rows.register_fake
def _(
    logits: torch.Tensor,
    targets: torch.Tensor,
    divisor: torch.Tensor,
    label_smoothing: float,
    z_loss: float,
    with_gradient: bool,
) -> torch.Tensor:
    return logits.new_empty((), dtype=torch.float32)


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        divisor: torch.Tensor,
        setting: tuple[int, float, float, torch.dtype, bool],
    ) -> torch.Tensor:
        tile_tokens, label_smoothing, z_loss, dtype, training = setting
        rows, targets, w = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weight.to(dtype)
        wanted = (training and hidden.requires_grad, training and weight.requires_grad)
        dhidden = torch.empty_like(rows) if wanted[0] else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for tile in slices(rows, tile_tokens):
            x = rows[tile].to(dtype)
            logits = F.linear(x, w)  # (t, V)
            total += cross_entropy_rows(logits, targets[tile], divisor, label_smoothing, z_loss, any(wanted))
            if dhidden is not None:
                dhidden[tile] = logits @ w
            if dweight is not None:
                add_product(dweight, logits.t(), x)
            del logits
        ctx.gradients, ctx.shape, ctx.weight_dtype = (dhidden, dweight), hidden.shape, weight.dtype
        return (total / divisor).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("backward through a tiled loss a second time: give the first retain_graph=True")
        gradients = ctx.gradients
        if torch._C._autograd._get_current_graph_task_keep_graph():
            gradients = [None if g is None else g * grad for g in gradients]
        else:
            ctx.gradients = None
            for g in gradients:
                if g is not None:
                    g.mul_(grad)
        dhidden, dweight = gradients
        return (
            None if dhidden is None else dhidden.view(ctx.shape),
            None if dweight is None else dweight.to(ctx.weight_dtype),
            None,
            None,
            None,
        )
