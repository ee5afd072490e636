"""Attention over one shared latent per position, which is key and value of every head, with a sink per head."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_with_sink(query: Tensor, entries: Tensor, bias: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Σ_p softmax(scale · q · entry_p + bias_p) entry_p, where the softmax's sum counts one more exp(sink) of no value.

    `query` [B, Q, heads, d], `entries` [B, P, d], `bias` [B, 1, 1, P] (0 or -inf), `sink` float32 [heads]; float32
    [B, Q, heads, d]. Products and softmax are float32: the positions are few, and the products cheap.
    """
    batch, length, heads, dim = query.shape
    entries = entries.float()
    scores = torch.bmm(query.float().view(batch, length * heads, dim), entries.transpose(1, 2)) * scale
    scores = scores.view(batch, length, heads, -1) + bias.float()
    # A column of its own for the sink: it takes its share of the softmax and is then left out.
    sinks = sink.view(1, 1, heads, 1).expand(batch, length, heads, 1)
    shares = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    return torch.bmm(shares.reshape(batch, length * heads, -1), entries).view(batch, length, heads, dim)
