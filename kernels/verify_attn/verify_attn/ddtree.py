"""DDTree: a draft tree from per-position marginals, its mask, its positions, and the greedy walk.

Method: "Accelerating Speculative Decoding with Block Diffusion Draft Trees", arXiv:2604.12989. A block-diffusion drafter
gives one distribution a position, independent of the others, so a path's probability is the product of its tokens'. Under
a budget of nodes, the tree that maximises the expected number of accepted tokens consists of the most probable paths'
ends; a heap yields them in order, because a child is never more probable than its parent, nor a token than the one
ranked before it at the same place.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_attn import masks
from verify_attn.errors import InputError


@dataclass(frozen=True)
class Tree:
    """A draft tree. Node 0 is the root (the last accepted token); a parent comes before its children.

    Attributes:
        tokens: token of each node.
        parents: index of each node's parent, -1 for the root.
        depths: edges from the root.
        log_probs: natural log of the drafter's probability of the path to each node; 0 for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    log_probs: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def mask(self) -> Tensor:
        """Bool [nodes, nodes]: each node sees itself and its ancestors."""
        return ancestor_mask(self.parents)

    def bits(self) -> Tensor:
        """The same as int32 words [nodes, ceil(nodes / 32)] (see masks.pack_bits)."""
        return masks.pack_bits([self.mask()])

    def positions(self, prefix: int) -> Tensor:
        """int64 [nodes]: position of each node in the sequence; the root follows `prefix` committed tokens."""
        return prefix + torch.tensor(self.depths, dtype=torch.int64)

    def expected_accepted(self) -> float:
        """Expected number of accepted draft tokens if the target follows the drafter's marginals."""
        return math.fsum(math.exp(p) for p in self.log_probs[1:])


def build_tree(root: int, marginals: Tensor, budget: int) -> Tree:
    """The best tree of `budget` draft nodes besides the root.

    Args:
        root: token of the root.
        marginals: [positions, vocabulary], natural log-probabilities of each position after the root; need not be
            normalised, -inf for impossible.
        budget: draft nodes; the tree has fewer when fewer paths are possible.

    Returns:
        The tree, nodes in order of falling probability. Ties go to the earlier-found path, and between tokens of one
        place to the smaller token, so equal inputs give equal trees.

    Raises:
        InputError: marginals is not 2-D floating point or holds NaN or +inf, or the budget is negative.
    """
    _check(marginals, budget)
    ranked, tokens_by_rank = _ranked(marginals, budget)
    tokens, parents, depths, log_probs = [root], [-1], [0], [0.0]
    found = 0  # breaks ties in the order of finding
    heap: list[tuple[float, int, int, int]] = []  # (-log prob, order, parent, rank)

    def offer(parent: int, rank: int) -> None:
        nonlocal found
        position = depths[parent]
        if position < len(ranked) and rank < len(ranked[position]):
            log_prob = log_probs[parent] + ranked[position][rank]
            if log_prob > -math.inf:
                heapq.heappush(heap, (-log_prob, found, parent, rank))
                found += 1

    offer(0, 0)
    while heap and len(tokens) <= budget:
        cost, _, parent, rank = heapq.heappop(heap)
        tokens.append(tokens_by_rank[depths[parent]][rank])
        parents.append(parent)
        depths.append(depths[parent] + 1)
        log_probs.append(-cost)
        if len(tokens) <= budget:
            offer(parent, rank + 1)
            offer(len(tokens) - 1, 0)
    return Tree(tuple(tokens), tuple(parents), tuple(depths), tuple(log_probs))


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Bool [nodes, nodes]: entry i, j says whether j is i or an ancestor of i.

    Raises:
        InputError: a parent does not come before its child, or node 0 is not a root (-1).
    """
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if not (-1 <= parent < node) or (node == 0) != (parent == -1):
            raise InputError(f"parents[{node}] is {parent}; node 0 must have -1 and every other node an earlier node")
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def greedy_walk(tree: Tree, target: Sequence[int] | Tensor) -> tuple[list[int], int]:
    """The accepted path when decoding greedily.

    Args:
        target: for each node, the token the target model puts after it (its argmax).

    Returns:
        (nodes accepted after the root in order, the bonus token that follows them).

    Raises:
        InputError: `target` does not have one token a node.
    """
    wanted = target.tolist() if isinstance(target, Tensor) else list(target)
    if len(wanted) != len(tree):
        raise InputError(f"target has {len(wanted)} tokens for a tree of {len(tree)} nodes; give one a node")
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens)) if parent >= 0}
    path: list[int] = []
    node = 0
    while (step := children.get((node, wanted[node]))) is not None:
        node = step
        path.append(node)
    return path, wanted[node]


def _check(marginals: Tensor, budget: int) -> None:
    if marginals.dim() != 2 or not marginals.is_floating_point():
        raise InputError(f"marginals is {marginals.dtype} {tuple(marginals.shape)}; give floating-point [positions, vocabulary]")
    if bool((marginals.isnan() | (marginals == math.inf)).any()):
        raise InputError("marginals holds NaN or +inf; give log-probabilities")
    if budget < 0:
        raise InputError(f"budget is {budget}; give the number of draft nodes, 0 or more")


def _ranked(marginals: Tensor, budget: int) -> tuple[list[list[float]], list[list[int]]]:
    """Each position's best log-probabilities and their tokens; a tree of `budget` nodes needs no more than `budget` of them."""
    keep = min(budget, marginals.shape[1])
    if keep == 0:
        return [], []
    values, tokens = torch.sort(marginals.double().cpu(), dim=1, descending=True, stable=True)
    return values[:, :keep].tolist(), tokens[:, :keep].tolist()
