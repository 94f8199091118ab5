"""Draft trees on the CPU: build them from top-k drafting, verify them greedily.

A tree of one request has n nodes; node 0 is the last committed token. Links are first child (`retrive_next_token`) and
next sibling (`retrive_next_sibling`), -1 for none.
"""

from __future__ import annotations

import torch

FULL_MASK, QLEN_ONLY = 0, 1  # SGLang's TreeMaskMode


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Mask, positions and links of the trees that top-k drafting selected.

    Args:
        parent_list: [requests, ...] candidate number of each parent group (entry 0 stands for the root).
        selected_index: [requests, n-1] candidate numbers of the nodes kept; candidate c has parent group c // topk.
        verified_seq_len: [requests] committed tokens, which is the root's position.
        tree_mask: bool or uint8, flat: QLEN_ONLY [requests, n, n], or FULL_MASK where request b's rows have
            verified_seq_len[b] + n columns (the prefix columns are left as they are).
        positions, retrive_index, retrive_next_token, retrive_next_sibling: [requests * n] outputs.
    Raises:
        NotImplementedError: for the bit-packed mask mode, which no CPU backend asks for.
    """
    mode = int(tree_mask_mode)
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {mode} has no CPU implementation")
    n = draft_token_num
    flat_mask, flat_positions = tree_mask.view(-1), positions.view(-1)
    index, first_child, sibling = (t.view(-1) for t in (retrive_index, retrive_next_token, retrive_next_sibling))
    index.copy_(torch.arange(index.numel(), dtype=index.dtype))
    start = 0
    for row, length in enumerate(verified_seq_len.tolist()):
        parents = _parents(parent_list[row].tolist(), selected_index[row].tolist(), topk, n)
        nodes = slice(row * n, (row + 1) * n)
        first_child[nodes], sibling[nodes] = _links(parents, first_child.dtype)
        ancestors, depths = _ancestors(parents, depth)
        flat_positions[nodes] = (length + depths).to(flat_positions.dtype)
        width = n if mode == QLEN_ONLY else length + n
        block = flat_mask[start : start + n * width].view(n, width)
        block[:, width - n :] = ancestors.to(flat_mask.dtype)
        start += n * width


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root along the children that carry the target's own greedy token.

    Args:
        predicts: [requests * n] out: the target's token at every visited node.
        accept_index: [requests, steps] out: flat index of each visited node, in order; the rest is left as it is.
        accept_token_num: [requests] out: visited nodes without the root.
        candidates: [requests, n] draft token of each node.
        retrive_index, retrive_next_token, retrive_next_sibling: [requests, n] the tree.
        target_predict: [requests, n] greedy token of the target after each node.
    """
    tokens, flat = candidates.tolist(), retrive_index.tolist()
    first_child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    wanted = target_predict.reshape(-1).tolist()
    steps = accept_index.shape[1]
    for row in range(candidates.shape[0]):
        path, node = [flat[row][0]], 0
        while len(path) < steps:
            node = first_child[row][node]
            while node != -1 and tokens[row][node] != wanted[path[-1]]:
                node = sibling[row][node]
            if node == -1:
                break
            path.append(flat[row][node])
        accept_index[row, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[row] = len(path) - 1
        for place in path:
            predicts[place] = wanted[place]


def _parents(groups: list[int], selected: list[int], topk: int, n: int) -> list[int | None]:
    """Parent node of nodes 1..n-1 (0 is the root); None where the parent was not selected."""
    node_of = {}
    for place, candidate in enumerate(selected):
        node_of.setdefault(candidate, place + 1)
    parents: list[int | None] = []
    for candidate in selected[: n - 1]:
        group = candidate // topk
        parents.append(0 if group == 0 else node_of.get(groups[group]))
    return parents


def _links(parents: list[int | None], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    first_child, sibling = [-1] * (len(parents) + 1), [-1] * (len(parents) + 1)
    for node in range(len(parents), 0, -1):  # backwards, so that children end up in ascending order
        parent = parents[node - 1]
        if parent is not None:
            sibling[node], first_child[parent] = first_child[parent], node
    return torch.tensor(first_child, dtype=dtype), torch.tensor(sibling, dtype=dtype)


def _ancestors(parents: list[int | None], depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, n] whether column is the row itself, an ancestor of it or the root, and [n] the depths."""
    n = len(parents) + 1
    mask, depths = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    mask[:, 0] = True
    for row in range(1, n):
        node, steps = row, 0
        while node and steps < depth:
            mask[row, node] = True
            node, steps = parents[node - 1] or 0, steps + 1
        depths[row] = steps
    return mask, depths
