"""Lanes over ranks, and the one tree in which they are added."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.lanes import Node, TreeFold, aligned_subtrees, check_world_size, rank_lanes, strided_lanes
from validation.errors import ConfigError

EVERY_SPLIT = [(lanes, world_size) for lanes in (1, 2, 4, 8, 16, 32) for world_size in range(1, lanes + 1)]


@pytest.mark.parametrize(("lanes", "world_size"), EVERY_SPLIT)
def test_ranks_share_out_all_lanes(lanes: int, world_size: int) -> None:
    """Each lane has one rank, in order, and no rank has none."""
    shares = [rank_lanes(rank, world_size, lanes) for rank in range(world_size)]

    assert [lane for share in shares for lane in share] == list(range(lanes))
    assert min(map(len, shares)) >= 1


def test_lanes_fall_into_maximal_subtrees() -> None:
    """Lanes 2, 3, 4 are the pair {2, 3} and the single {4}."""
    assert aligned_subtrees(range(2, 5)) == (Node(1, 1), Node(0, 4))
    assert aligned_subtrees(range(8)) == (Node(3, 0),)
    assert aligned_subtrees(range(1, 8)) == (Node(0, 1), Node(1, 1), Node(2, 1))


@pytest.mark.parametrize(("lanes", "world_size"), EVERY_SPLIT)
def test_any_split_ends_in_the_same_tree(lanes: int, world_size: int) -> None:
    """Folding each rank's lanes and then the ranks' nodes writes the same brackets as folding all lanes at once."""
    shares = [rank_lanes(rank, world_size, lanes) for rank in range(world_size)]
    parts = [_fold([(Node(0, lane), str(lane)) for lane in share]) for share in shares]
    [(root, brackets)] = _fold([node for part in parts for node in part]).copy()

    assert root == Node(int(math.log2(lanes)), 0)
    assert [(root, brackets)] == _fold([(Node(0, lane), str(lane)) for lane in range(lanes)])


@pytest.mark.parametrize(("lanes", "world_size"), EVERY_SPLIT)
def test_few_values_are_held(lanes: int, world_size: int) -> None:
    """A rank never holds more than log2(V) + 1 gradients, the lane in work included."""
    for rank in range(world_size):
        fold: TreeFold[None] = TreeFold(add=lambda _left, _right: None)
        for lane in rank_lanes(rank, world_size, lanes):
            assert len(fold.held) + 1 <= math.log2(lanes) + 1
            fold.push(Node(0, lane), None)


@pytest.mark.parametrize(
    ("world_size", "lanes", "advice"),
    [(9, 8, "Ask for 1 to 8 ranks"), (0, 8, "Ask for 1 to 8"), (1, 6, "Use a power of two"), (1, 0, "Use a power of two")],
    ids=["more ranks than lanes", "no rank", "six lanes", "no lane"],
)
def test_impossible_splits_are_refused(world_size: int, lanes: int, advice: str) -> None:
    """A split that cannot work says what would."""
    with pytest.raises(ConfigError, match=advice):
        check_world_size(world_size, lanes)


def _fold(nodes: list[tuple[Node, str]]) -> list[tuple[Node, str]]:
    fold: TreeFold[str] = TreeFold(add=lambda left, right: f"({left}+{right})")
    for node, value in nodes:
        fold.push(node, value)
    return fold.held


def canonical(values: list[np.float32]) -> np.float32:
    """Neighbours added, then neighbouring pairs, and so on."""
    while len(values) > 1:
        values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def folded(nodes: Iterable[tuple[Node, np.float32]]) -> list[tuple[Node, np.float32]]:
    fold: TreeFold[np.float32] = TreeFold(add=lambda left, right: left + right)
    for node, value in nodes:
        fold.push(node, value)
    return fold.held


@given(level=st.integers(0, 6), share=st.floats(0, 1), seed=st.integers(0, 999))
def test_any_split_adds_in_the_canonical_tree(level: int, share: float, seed: int) -> None:
    """For any number of lanes and ranks the ranks' subtrees, pushed in rank order, end in the bits of the tree that one process adds."""
    lanes = 1 << level
    world_size = 1 + int(share * (lanes - 1))
    draw = np.random.default_rng(seed)
    values = (draw.normal(size=lanes) * 10.0 ** draw.integers(-6, 6, lanes)).astype(np.float32)
    held = [folded((Node(0, lane), values[lane]) for lane in rank_lanes(rank, world_size, lanes)) for rank in range(world_size)]
    [(root, total)] = folded(entry for entries in held for entry in entries)

    assert root == Node(level, 0)
    assert total.tobytes() == canonical(list(values)).tobytes()


@given(level=st.integers(0, 6), width=st.integers(0, 6), seed=st.integers(0, 999))
def test_slots_add_in_the_canonical_tree(level: int, width: int, seed: int) -> None:
    """Strided lanes, added over ranks slot by slot and then over slots, end in the same bits: sharded sums are the unsharded ones."""
    lanes, world_size = 1 << level, 1 << min(width, level)
    draw = np.random.default_rng(seed)
    values = (draw.normal(size=lanes) * 10.0 ** draw.integers(-6, 6, lanes)).astype(np.float32)
    own = [list(strided_lanes(rank, world_size, lanes)) for rank in range(world_size)]
    slots = [folded((Node(0, lane), values[lane]) for lane in slot)[0] for slot in zip(*own, strict=True)]
    [(_, total)] = folded(slots)

    assert sorted(lane for lanes_of_rank in own for lane in lanes_of_rank) == list(range(lanes))
    assert total.tobytes() == canonical(list(values)).tobytes()
