"""Compare the fast paths of training with their plain references, on whatever device is there.

On a CPU the two Triton kernels run in Triton's interpreter (set TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention import (
    BlockDraftMask,
    Compiled,
    DocumentMask,
    PackedMask,
    attend,
    decode_attention_reference,
    decode_attention_triton,
)
from losses import LossWeights, row_losses_reference, row_losses_triton


def relative(out: Tensor, reference: Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in fp32."""
    out, reference = out.detach().float(), reference.detach().float()
    return float((out - reference).norm() / reference.norm())


def check_decode(device: torch.device, dtype: torch.dtype) -> float:
    """The decoding kernel against a dense mask."""
    rows, kv, group, length, d = 5, 3, 3, 200, 64
    k, v = torch.randn(2, rows, kv, length, d, device=device, dtype=dtype)
    q = torch.randn(rows, kv * group, d, device=device, dtype=dtype)
    step = torch.tensor([150], device=device)
    first = torch.tensor([0, 1, 64, 149, 150], device=device)
    return relative(decode_attention_triton(q, k, v, first, step), decode_attention_reference(q, k, v, first, step))


def check_losses(device: torch.device, dtype: torch.dtype) -> float:
    """The loss kernel against the formulas, and the formulas against autograd."""
    rows, vocab, loss = 6, 5000, LossWeights(0.1, 0.9, 1.0, 4.0)
    logits = (3 * torch.randn(rows, vocab, device=device)).to(dtype)
    teacher = (logits + torch.randn(rows, vocab, device=device)).to(dtype)
    tokens = torch.randint(vocab, (rows,), device=device)
    tokens[:3] = logits[:3].argmax(-1)
    weight = torch.rand(rows, device=device)
    reference, gradient = row_losses_reference(logits, teacher, tokens, weight, loss)
    leaf = logits.float().requires_grad_()
    q = teacher.float().softmax(-1)
    total = loss.cross_entropy * torch.nn.functional.cross_entropy(leaf, tokens, reduction="none")
    total = total + loss.distribution * (leaf.softmax(-1) - q).abs().sum(-1)
    (total * weight).sum().backward()
    assert leaf.grad is not None
    out, fast = row_losses_triton(logits.clone(), teacher, tokens, weight, loss)
    assert torch.equal(out.agrees, reference.agrees)
    return max(
        relative(gradient, leaf.grad),
        relative(fast, leaf.grad),
        relative(out.cross_entropy, reference.cross_entropy),
        relative(out.distribution, reference.distribution),
    )


def check_sparse(device: torch.device, dtype: torch.dtype) -> float:
    """Flex attention, forward and backward, against the dense mask, for documents and for draft blocks."""
    rows, length, anchors, size = 2, 512, 128, 7
    first = torch.zeros(rows, length, dtype=torch.int64, device=device)
    first[:, 100:], first[1, 300:] = 100, 300
    anchor = torch.rand(rows, length, device=device).topk(anchors, dim=1).indices.sort(dim=1).values
    documents = DocumentMask(rows, length, device).set(first)
    blocks = BlockDraftMask(rows, length, anchors, size, device).set(anchor, first.gather(1, anchor))
    return max(_compare(documents, rows, dtype), _compare(blocks, rows, dtype))


def _compare(mask: PackedMask, rows: int, dtype: torch.dtype) -> float:
    device = mask.positions.device
    made = []
    q = torch.randn(rows, mask.queries, 9, 64, device=device, dtype=dtype)
    k, v = torch.randn(2, rows, mask.keys, 3, 64, device=device, dtype=dtype)
    g = torch.randn_like(q)
    for enabled in (True, False):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, mask, Compiled(enabled))
        out.backward(g)
        made.append([out.detach(), *(x.grad for x in leaves)])
    return max(relative(a, b) for a, b in zip(*made, strict=True))


def main() -> None:
    """Print the relative error of each, and fail on a large one."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    checks = {"decode attention": check_decode, "losses": check_losses, "block-sparse attention": check_sparse}
    for name, check in checks.items():
        error = check(device, dtype)
        print(f"{name}: relative error {error:.1e}", flush=True)
        assert error < (2e-2 if dtype == torch.bfloat16 else 1e-4), name


if __name__ == "__main__":
    main()
