"""Programs of PyTorch that save tensors in every way that moving them must not change.

Each takes a leaf `x`, a matrix, and a model of two layers, and returns a loss.
"""

import torch
from gpumem.integrations.torch._offload.plan import Planner
from torch.utils.checkpoint import checkpoint


class MovesAll(Planner):
    """Lets every storage leave; with `frees`, each block is freed before the next point."""

    frees = False

    def save(self, *given):
        super().save(*given)
        return True

    def room(self, live):
        return -(1 << 40) if self.frees else super().room(live)


def several_views(x, model):
    y = model(x).exp()
    parts = [y[1:3], y.t(), y[:, 2:5], y[:1].expand(x.shape)]
    return sum((each * each).sum() for each in parts)


def view_of_an_unsaved_base(x, model):
    return (model(x) + 1)[2:4].square().sum()


def chunks(x, model):
    a, b, c = model(x)[: len(x) // 3 * 3].chunk(3)
    return (c * a.exp() * b.exp()).sum()


def filled_part_by_part(x, model):
    buffer = x.new_zeros(2, *x.shape)
    total = 0
    for part, y in zip(buffer, (model(x), model(2 * x)), strict=True):
        part.data.copy_(y.detach())  # counts no version
        total = total + (y * part).sum() + (part * x).sum()
    return total


def address_used_again(x, model):
    for _ in range(8):
        x = torch.tanh(model(x) * 1.5)
    return x.sum()


def changed_between_saves(x, model):
    y = model(x)
    scale = torch.ones_like(x)
    first = (y * scale.clone()).sum()
    scale.mul_(3)
    return first + (y * scale).sum()


def recomputed(x, model):
    return checkpoint(model, checkpoint(model, x, use_reentrant=False), use_reentrant=False).sum()


def recomputed_reentrant(x, model):
    return checkpoint(model, x * 2, use_reentrant=True).sum()


def recomputed_with_keywords(x, model):
    """Keeps each layer's input alone: no other tensor can move."""

    def layer(scale, *, hidden, factor):
        return model(hidden * factor).tanh() * scale

    for _ in range(3):
        x = checkpoint(layer, 1.5, use_reentrant=False, factor=0.5, hidden=x * 1.5)
    return x.sum()


def nested(x, model):
    def inner(y):
        return checkpoint(model, y, use_reentrant=False).relu()

    return checkpoint(inner, x * 2, use_reentrant=False).sum()


def cast(x, model):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return model(model(x)).float().sum()


def lora(x, model):
    for each in model[0].parameters():
        each.requires_grad_(False)
    width = x.shape[1]
    down, up = (x.new_full(each, 0.1) for each in ((width, 2), (2, width)))
    down.requires_grad_()
    up.requires_grad_()
    return (model(x) + x @ down @ up).square().sum()


def unused_branch(x, model):
    model(x * 3).exp()
    return model(x).sum()


def complex_and_sparse(x, model):
    y = torch.complex(model(x), x)
    diagonal = torch.eye(len(x), device=x.device).to_sparse()
    return (y.conj() * y).real.sum() + (diagonal @ model(x)).sum()


PROGRAMS = [
    several_views, view_of_an_unsaved_base, chunks, filled_part_by_part, address_used_again,
    changed_between_saves, recomputed, recomputed_reentrant,
    recomputed_with_keywords, nested, cast, lora, unused_branch,
    complex_and_sparse,
]  # fmt: skip
