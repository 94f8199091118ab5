"""`sgl_kernel.speculative`: what NGRAM speculation needs."""

from __future__ import annotations

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees given only as masks.

    Args:
        tree_mask: [batch, n, n] bool or uint8, row sees column; ancestors have lower numbers than their descendants.
        verified_seq_len: [batch] committed tokens, the root's position.
        positions: [batch * n] out: verified_seq_len + number of ancestors.
        retrive_index, retrive_next_token, retrive_next_sibling: [batch, n] out: flat node number, first child, next
            sibling (-1 for none).
    """
    n = draft_token_num
    below = torch.ones(n, n, dtype=torch.bool).tril(-1)
    ancestors = tree_mask.reshape(batch_size, n, n).bool() & below
    depth = ancestors.sum(-1)
    positions.view(batch_size, n).copy_(depth + verified_seq_len.view(batch_size, 1))
    retrive_index.view(batch_size, n).copy_(torch.arange(batch_size * n).view(batch_size, n))
    # A node's parent is its highest-numbered ancestor; -1 for a node that sees nothing before it.
    numbers = torch.arange(n)
    parent = torch.where(ancestors, numbers, -1).amax(-1)
    retrive_next_token.view(batch_size, n).copy_(_first(parent[:, None, :] == numbers[:, None]))
    later = numbers[None, :] > numbers[:, None]
    brothers = (parent[:, None, :] == parent[:, :, None]) & later & (parent >= 0)[:, :, None]
    retrive_next_sibling.view(batch_size, n).copy_(_first(brothers))


def _first(found: torch.Tensor) -> torch.Tensor:
    """Lowest true column of each row, -1 where there is none."""
    return torch.where(found.any(-1), found.int().argmax(-1), -1)
