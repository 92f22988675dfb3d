"""Lanes: the fixed pieces of a global batch, which rank runs which, and the one tree in which they are added. Torch-free.

The global batch is cut into V lanes. What is in a lane and in which order lanes are added never depends on the world size W; only
who runs a lane does. The tree's node (level, place) covers lanes [place << level, (place + 1) << level) and is the sum of its two
halves, left plus right. Addition of floats is not associative, so it is this tree that makes every W give the same bits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from validation.errors import ConfigError


def check_world_size(world_size: int, lanes: int) -> None:
    """Refuse a number of ranks or lanes that cannot work. Raises ConfigError."""
    if lanes < 1 or lanes & (lanes - 1):
        raise ConfigError(f"training.lanes is {lanes}; lanes are added in a binary tree. Use a power of two, for example 8.")
    if not 1 <= world_size <= lanes:
        raise ConfigError(
            f"world size {world_size} does not fit {lanes} lanes: a rank runs at least one lane. Ask for 1 to {lanes} ranks, or raise "
            "training.lanes in the recipe (this changes the run's numbers once, for every world size)."
        )


def rank_lanes(rank: int, world_size: int, lanes: int) -> range:
    """Lanes of one rank, contiguous: [rank * V // W, (rank + 1) * V // W); never empty while W <= V."""
    return range(rank * lanes // world_size, (rank + 1) * lanes // world_size)


def strided_lanes(rank: int, world_size: int, lanes: int) -> range:
    """Lanes of one rank whose gradients are added over ranks slot by slot: rank, W + rank, 2 W + rank, ...; W a power of two.

    Slot j of all ranks holds lanes [j W, (j + 1) W): a node of the tree, so that a reduce-scatter a slot is a part of the canonical sum.
    """
    return range(rank, lanes, world_size)


class Node(NamedTuple):
    """A node of the tree over lanes."""

    level: int  # covers 2**level lanes
    place: int  # covers lanes [place << level, (place + 1) << level)


Sum = TypeVar("Sum")


@dataclass(slots=True)
class TreeFold(Generic[Sum]):
    """Adds nodes that arrive in lane order, always two halves of one parent: a binary counter.

    At any time the held nodes are the maximal aligned subtrees of the lanes seen so far. With `rank_lanes`, and for V up to 64, a rank
    holds at most log2(V) + 1 values, the lane in work included (two or three more at V = 1024).
    """

    add: Callable[[Sum, Sum], Sum]  # may write into the first and must let go of the second
    held: list[tuple[Node, Sum]] = field(default_factory=list)

    def push(self, node: Node, value: Sum) -> None:
        """Take the next node; adds halves as soon as both are there."""
        while self.held and node.place & 1 and self.held[-1][0] == Node(node.level, node.place - 1):
            _, left = self.held.pop()
            node, value = Node(node.level + 1, node.place >> 1), self.add(left, value)
        self.held.append((node, value))


def aligned_subtrees(lanes: Iterable[int]) -> tuple[Node, ...]:
    """Maximal subtrees that cover contiguous lanes exactly: 2, 3, 4 -> {2, 3}, {4}."""
    fold: TreeFold[None] = TreeFold(add=lambda _left, _right: None)
    for lane in lanes:
        fold.push(Node(0, lane), None)
    return tuple(node for node, _ in fold.held)
