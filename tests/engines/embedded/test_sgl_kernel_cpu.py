"""The torch twins of sgl_kernel's CPU functions against their documented meaning, by plain loops and brute force."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from phases.engines.embedded import sgl_kernel
from phases.engines.embedded.sgl_kernel.speculative import reconstruct_indices_from_tree_mask


def random_tree(draw: random.Random, n: int) -> list[int]:
    """Parents of nodes 1..n-1, each lower than its child."""
    return [draw.randrange(node) for node in range(1, n)]


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node and all its ancestors."""
    found = {node}
    while node:
        node = parents[node - 1]
        found.add(node)
    return found


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each node."""
    n = len(parents) + 1
    children = [[c for c in range(1, n) if parents[c - 1] == node] for node in range(n)]
    first = [c[0] if c else -1 for c in children]
    after = [-1] * n
    for family in children:
        for left, right in itertools.pairwise(family):
            after[left] = right
    return first, after


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ragged_assignment_and_its_inverse(dtype):
    table = torch.full((5, 20), -1, dtype=torch.int32)
    requests = torch.tensor([3, 0, 4], dtype=dtype)
    start, end = torch.tensor([2, 0, 7], dtype=dtype), torch.tensor([5, 0, 9], dtype=dtype)
    slots = torch.arange(100, 108, dtype=torch.int64)  # more than the five that are used
    sgl_kernel.assign_req_to_token_pool_cpu(requests, table, start, end, slots, 20)
    assert table[3, 2:5].tolist() == [100, 101, 102]
    assert table[4, 7:9].tolist() == [103, 104]
    assert (table != -1).sum() == 5
    back = torch.zeros(5, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(requests, table, start, end, back, 20)
    assert back.tolist() == [100, 101, 102, 103, 104]


def test_draft_slots_follow_each_request():
    table = torch.arange(60).view(3, 20)
    out = torch.zeros(2, 4, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(torch.tensor([2, 0]), table, torch.tensor([5, 1]), out, 20, 2, 2)
    assert out.tolist() == [[45, 46, 47, 48], [1, 2, 3, 4]]


def test_kv_rows_move_as_if_read_before_written():
    buffers = [torch.arange(40.0).view(10, 4), torch.arange(30, dtype=torch.int64).view(10, 3)]
    before = [buffer.clone() for buffer in buffers]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    strides = torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers])
    target, source = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 9])  # overlapping
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for buffer, old in zip(buffers, before):
        assert torch.equal(buffer[target], old[source])
        untouched = [row for row in range(10) if row not in (1, 2, 3)]
        assert torch.equal(buffer[untouched], old[untouched])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target[:0], source[:0])  # nothing to move


def test_bonus_tokens_and_accepted_slots():
    bonus = torch.zeros(2, dtype=torch.int64)
    sgl_kernel.fill_bonus_tokens_cpu(
        torch.tensor([[5, 6, 0], [7, 0, 0]], dtype=torch.int32), torch.tensor([2, 1]), bonus, 3
    )
    assert bonus.tolist() == [6, 7]
    packed = torch.zeros(6, dtype=torch.int64)
    accepted = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    sgl_kernel.fill_accept_out_cache_loc_cpu(accepted, torch.arange(50, 60), packed)
    assert packed.tolist() == [50, 52, 53, 0, 0, 0]


def test_rotation_shifts_left_and_appends():
    ids = torch.tensor([1, 2, 3, 9, 4, 5])
    sgl_kernel.rotate_input_ids_cpu(ids, torch.tensor([0, 3, 4]), torch.tensor([3, 0, 2]), torch.tensor([70, 71, 72]))
    assert ids.tolist() == [2, 3, 70, 9, 5, 72]
    ids = torch.tensor([1, 2, 3])
    sgl_kernel.rotate_input_ids_cpu(ids, torch.tensor([0]), torch.tensor([3]), torch.tensor([[70]]), torch.tensor([1]))
    assert ids.tolist() == [2, 70, 3]


@pytest.mark.parametrize("mode", [0, 1])
def test_tree_of_selected_candidates(mode):
    """Top-k 2, two steps: candidates 0,1 hang on the root; group g > 0 hangs on the candidate that parent_list names."""
    topk, n = 2, 4
    parent_list = torch.tensor([[-1, 0, 1]])  # groups 1 and 2 hang on candidates 0 and 1
    selected = torch.tensor([[0, 1, 4]])  # candidate 4 is in group 2
    length = 3
    width = n if mode == 1 else n + length
    mask = torch.ones(n * width, dtype=torch.bool)
    positions = torch.zeros(n, dtype=torch.int64)
    index, first, after = (torch.full((1, n), -1) for _ in range(3))
    sgl_kernel.build_tree_kernel_efficient_cpu(
        parent_list, selected, torch.tensor([length]), mask, positions, index, first, after, topk, 3, n, mode
    )
    parents = [0, 0, 2]
    for node in range(n):
        assert set(mask.view(n, width)[node, width - n :].nonzero().flatten().tolist()) == ancestors(parents, node)
    assert mask.view(n, width)[:, : width - n].all()
    assert positions.tolist() == [3, 4, 4, 5]
    assert index.tolist() == [[0, 1, 2, 3]]
    assert (first[0].tolist(), after[0].tolist()) == links(parents)


def test_bit_packed_masks_are_refused():
    with pytest.raises(NotImplementedError, match="mask mode 2"):
        sgl_kernel.build_tree_kernel_efficient_cpu(*[torch.zeros(1, 1)] * 8, 1, 1, 1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_links_recovered_from_masks(seed):
    draw = random.Random(seed)
    batch, n = 3, draw.randrange(2, 12)
    trees = [random_tree(draw, n) for _ in range(batch)]
    mask = torch.zeros(batch, n, n, dtype=torch.bool)
    for b, node in itertools.product(range(batch), range(n)):
        mask[b, node, list(ancestors(trees[b], node))] = True
    lengths = torch.tensor([draw.randrange(50) for _ in range(batch)])
    positions = torch.zeros(batch * n, dtype=torch.int64)
    index, first, after = (torch.zeros(batch, n, dtype=torch.int64) for _ in range(3))
    reconstruct_indices_from_tree_mask(mask.flatten(), lengths, positions, index, first, after, batch, n)
    for b in range(batch):
        assert (first[b].tolist(), after[b].tolist()) == links(trees[b])
        depth = [len(ancestors(trees[b], node)) - 1 for node in range(n)]
        assert positions.view(batch, n)[b].tolist() == [int(lengths[b]) + d for d in depth]
    assert index.flatten().tolist() == list(range(batch * n))


@pytest.mark.parametrize("seed", range(30))
def test_greedy_walk_against_brute_force(seed):
    """The accepted path is the longest chain from the root in which every node carries the target's token at its parent."""
    draw = random.Random(seed)
    batch, n, steps = 3, draw.randrange(2, 10), 5
    trees = [random_tree(draw, n) for _ in range(batch)]
    tokens = [[0] * n for _ in range(batch)]
    for b, (node, parent) in ((b, pair) for b in range(batch) for pair in enumerate(trees[b], 1)):
        used = {tokens[b][other] for other in range(1, node) if trees[b][other - 1] == parent}
        tokens[b][node] = draw.choice([token for token in range(20) if token not in used])  # siblings differ
    wanted = [[draw.choice(tokens[b][1:]) for _ in range(n)] for b in range(batch)]
    index = torch.arange(batch * n).view(batch, n)
    first, after = (torch.tensor(rows) for rows in zip(*(links(tree) for tree in trees)))
    predicts = torch.full((batch * n,), -5, dtype=torch.int32)
    accepted, count = torch.full((batch, steps), -1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int64)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor(tokens),
        retrive_index=index,
        retrive_next_token=first,
        retrive_next_sibling=after,
        target_predict=torch.tensor(wanted),
    )
    for b in range(batch):
        chains = [[0]]
        for node in range(1, n):
            chains += [
                chain + [node]
                for chain in chains
                if chain[-1] == trees[b][node - 1] and tokens[b][node] == wanted[b][chain[-1]]
            ]
        best = max((chain[:steps] for chain in chains), key=len)
        assert [x for x in accepted[b].tolist() if x >= 0] == [b * n + node for node in best]
        assert int(count[b]) == len(best) - 1
        assert [int(predicts[b * n + node]) for node in best] == [wanted[b][node] for node in best]
    assert int((predicts != -5).sum()) == int(count.sum()) + batch
