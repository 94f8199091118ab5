"""DDTree against brute force on small cases."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from verify_attn import InputError, ddtree, masks


def _all_paths(marginals: torch.Tensor) -> list[tuple[float, tuple[int, ...]]]:
    positions, vocabulary = marginals.shape
    paths = [p for n in range(1, positions + 1) for p in itertools.product(range(vocabulary), repeat=n)]
    return sorted(((math.fsum(float(marginals[i, t]) for i, t in enumerate(path)), path) for path in paths), reverse=True)


def _path(tree: ddtree.Tree, node: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while node > 0:
        path, node = (tree.tokens[node], *path), tree.parents[node]
    return path


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 40), st.integers(0, 10_000))
def test_the_tree_holds_the_most_probable_paths(positions, vocabulary, budget, seed):
    marginals = torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(-1)
    tree = ddtree.build_tree(99, marginals, budget)
    best = _all_paths(marginals)[:budget]
    assert len(tree) == 1 + len(best)
    assert {_path(tree, node) for node in range(1, len(tree))} == {path for _, path in best}
    assert tree.expected_accepted() == pytest.approx(math.fsum(math.exp(p) for p, _ in best))
    for node in range(1, len(tree)):
        assert tree.log_probs[node] <= tree.log_probs[node - 1] + 1e-12
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1 == len(_path(tree, node))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_mask_is_the_ancestors_and_oneself(choices):
    parents = [-1] + [c % (i + 1) for i, c in enumerate(choices)]
    mask = ddtree.ancestor_mask(parents)
    for node in range(len(parents)):
        ancestors, at = set(), node
        while at >= 0:
            ancestors.add(at)
            at = parents[at]
        assert set(mask[node].nonzero().flatten().tolist()) == ancestors


def test_bits_and_positions():
    marginals = torch.randn(5, 9, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    tree = ddtree.build_tree(1, marginals, 40)
    assert torch.equal(masks.unpack_bits(tree.bits(), len(tree)), tree.mask())
    assert tree.positions(100).tolist() == [100 + d for d in tree.depths]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 30))
def test_greedy_walk_follows_the_target(seed, budget):
    """Against a target that is a function of the path: the walk accepts the longest prefix of its text that is in the tree."""
    random = torch.Generator().manual_seed(seed)
    marginals = torch.randn(4, 3, generator=random).log_softmax(-1)
    tree = ddtree.build_tree(0, marginals, budget)

    def next_token(path: tuple[int, ...]) -> int:
        return hash((seed, path)) % 3

    target = [next_token(_path(tree, node)) for node in range(len(tree))]
    accepted, bonus = ddtree.greedy_walk(tree, torch.tensor(target))
    in_tree = {_path(tree, node) for node in range(1, len(tree))}
    text: tuple[int, ...] = ()
    while (*text, next_token(text)) in in_tree:
        text = (*text, next_token(text))
    assert tuple(tree.tokens[node] for node in accepted) == text and bonus == next_token(text)


def test_impossible_tokens_ties_and_empty_trees():
    marginals = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf] * 3])
    tree = ddtree.build_tree(7, marginals, 10)
    assert tree.tokens == (7, 0, 2) and tree.parents == (-1, 0, 0)
    assert ddtree.build_tree(7, torch.zeros(0, 3), 5).tokens == (7,)
    assert ddtree.build_tree(7, torch.zeros(2, 3), 0).tokens == (7,)


def test_bad_arguments_say_what_to_give():
    with pytest.raises(InputError, match="holds NaN or"):
        ddtree.build_tree(0, torch.tensor([[math.nan]]), 1)
    with pytest.raises(InputError, match=r"give floating-point \[positions, vocabulary\]"):
        ddtree.build_tree(0, torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(InputError, match="budget is -1"):
        ddtree.build_tree(0, torch.zeros(1, 1), -1)
    with pytest.raises(InputError, match=r"parents\[1\] is 1"):
        ddtree.ancestor_mask([-1, 1])
    with pytest.raises(InputError, match="target has 1 tokens for a tree of 2 nodes"):
        ddtree.greedy_walk(ddtree.build_tree(0, torch.zeros(1, 1), 1), [0])
