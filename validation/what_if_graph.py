"""What has to be over before an operation may start: the dependencies of one step of a pipeline- and data-parallel job.

Rules (the paper's model; docs/stragglers.md): a stage computes one thing after the other, in the order in which it did; each kind of
pipeline transfer has a queue of its own; a receive comes before the computation that needs it and after the one before; a send comes after
the computation that made it. Collectives over data-parallel ranks start at the last arrival. The order is that of the first complete step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from validation.errors import DataError
from validation.what_if_trace import (
    BACKWARD,
    CLIP,
    EMBEDDING,
    FORWARD,
    GATHER,
    LAYERNORM,
    PIPELINE_TYPES,
    SCATTER,
    SEPARATE,
    Trace,
)

CLOCK_ERROR_S = 5e-5  # starts and ends this close say nothing about their order (the published analysis' own value)
OVER_RANKS = (GATHER, SCATTER, SEPARATE, CLIP)  # collectives over data-parallel ranks; CLIP is over all stages as well
PEERS = {
    "forward-send": "forward-recv", "forward-recv": "forward-send", "backward-send": "backward-recv", "backward-recv": "backward-send",
}  # fmt: skip
TOWARDS = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}  # in chunks of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Operations that end together: one computation, or the members of one communication."""

    members: tuple[int, ...]  # places
    needs: tuple[tuple[int, ...], ...]  # of each member: places that are over before it starts
    over_ranks: bool = False  # waits for all data-parallel ranks
    communicates: bool = False  # its own time starts when the last member has started


@dataclass(slots=True)
class _Stage:
    """Places of one stage by type, each in order of start."""

    number: int
    by_type: dict[str, list[int]] = field(default_factory=dict)
    compute: list[int] = field(default_factory=list)

    def of(self, optype: str) -> list[int]:
        return self.by_type.get(optype, [])


class Dependencies:
    """The graph of one step, built from the order of a trace's first step."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._start, self._end = trace.start[:, 0, 0], trace.end[:, 0, 0]
        self._chunks = 1 + max((place.model_chunk for place in trace.places), default=0)
        self._needs: list[list[int]] = [[] for _ in trace.places]
        self._serves: dict[int, int] = {}  # pipeline transfer -> its computation
        self._real: dict[tuple[int, str], list[int]] = {}  # (stage, type) -> transfers that have a peer
        stages = [self._stage(number) for number in range(trace.stages)]
        for stage in stages:
            self._chains(stage)
            for optype in PIPELINE_TYPES:
                self._match(stage, optype)
            self._first_backward(stage)
            self._parameters(stage)
            self._end_of_step(stage)
        self.units = self._ordered(self._groups(stages))

    def _stage(self, number: int) -> _Stage:
        stage = _Stage(number)
        places = [index for index, place in enumerate(self._trace.places) if place.stage == number]
        for index in sorted(
            places, key=lambda index: (self._start[index], self._trace.places[index].number, self._trace.places[index].optype)
        ):
            stage.by_type.setdefault(self._trace.places[index].optype, []).append(index)
            if self._trace.places[index].optype in (FORWARD, BACKWARD):
                stage.compute.append(index)
        return stage

    def _chain(self, places: Sequence[int], after: Sequence[int] = ()) -> None:
        """Each place needs the one before; the first one `after`."""
        before = list(after)
        for index in places:
            self._needs[index] += before
            before = [index]

    def _chains(self, stage: _Stage) -> None:
        self._chain(stage.compute)
        for optype in PIPELINE_TYPES:
            self._chain(stage.of(optype))
        self._chain(sorted([*stage.of(GATHER), *stage.of(SCATTER)], key=lambda index: self._start[index]))

    def _match(self, stage: _Stage, optype: str) -> None:
        """Give each transfer the computation that it serves. Records of transfers that never took place are kept, but serve nobody."""
        computations = sorted(stage.of(FORWARD if optype.startswith("forward") else BACKWARD), key=lambda i: self._trace.places[i].number)
        receives = optype.endswith("recv")
        if not computations:
            return
        if receives:
            latest = max(self._start[index] for index in computations)
            found = [index for index in stage.of(optype) if self._start[index] <= latest + CLOCK_ERROR_S]
        else:
            earliest = min(self._end[index] for index in computations)
            found = [index for index in stage.of(optype) if self._end[index] >= earliest - CLOCK_ERROR_S]
        served = self._served(stage, optype, computations, len(found), receives=receives)
        for transfer, computation in zip(found, served, strict=True):
            self._serves[transfer] = computation
            if self._has_peer(optype, computation):
                self._real.setdefault((stage.number, optype), []).append(transfer)
            if not receives:
                self._needs[transfer].append(computation)
                continue
            self._needs[computation].append(transfer)
            place = computations.index(computation)
            if place:
                self._needs[transfer].append(computations[place - 1])

    def _served(self, stage: _Stage, optype: str, computations: list[int], count: int, *, receives: bool) -> list[int]:
        """Computations that `count` transfers serve, in order: all, those with a peer, or all but the one at the end of the pipeline."""
        with_peer = [index for index in computations if self._has_peer(optype, index)]
        for candidates in (computations, with_peer, computations[1:] if receives else computations[:-1]):
            if count == len(candidates):
                return candidates
        if count == 0:
            return []
        raise DataError(
            f"stage {stage.number} has {count} {optype} for {len(computations)} computations, {len(with_peer)} of which need one. Which "
            "belongs to which cannot be told. Record whole steps."
        )

    def _has_peer(self, optype: str, computation: int) -> bool:
        return 0 <= self._trace.places[computation].model_chunk + TOWARDS[optype] < self._chunks

    def _first_backward(self, stage: _Stage) -> None:
        """The first backward transfers are issued after the last but one computation before the first backward one."""
        first = next((place for place, index in enumerate(stage.compute) if self._trace.places[index].optype == BACKWARD), 0)
        if first < 2:
            return
        for optype in ("backward-recv", "backward-send"):
            for index in stage.of(optype)[:1]:
                self._needs[index].append(stage.compute[first - 2])

    def _parameters(self, stage: _Stage) -> None:
        """Parameters of a chunk are gathered before its first forward; its gradients leave after its last backward, if they overlap."""
        places = self._trace.places
        for chunk, gather in {places[index].chunk: index for index in stage.of(GATHER)}.items():  # the last one of a chunk
            forward = [index for index in stage.of(FORWARD) if places[index].chunk == chunk]
            if forward:
                self._needs[forward[0]].append(gather)
        if not self._overlaps():
            return
        for chunk, scatter in {places[index].chunk: index for index in reversed(stage.of(SCATTER))}.items():  # the first one
            backward = [index for index in stage.of(BACKWARD) if places[index].chunk == chunk]
            if backward:
                self._needs[scatter].append(max(backward, key=lambda index: self._end[index]))

    def _overlaps(self) -> bool:
        return any(place.optype == SEPARATE for place in self._trace.places)

    def _end_of_step(self, stage: _Stage) -> None:
        """After the last computation: small all-reduces, gradients where they do not overlap, clipping, optimizer."""
        last = [max(stage.compute, key=lambda index: self._end[index])] if stage.compute else []
        self._chain(stage.of("gc"), last)
        after = stage.of("gc")[-1:] or last
        order = [LAYERNORM, EMBEDDING]
        if self._overlaps():
            after = [*after, *stage.of(SCATTER)[-1:]]
            order.append(SEPARATE)
        else:
            order.append(SCATTER)
        tail = [index for optype in (*order, CLIP, "optimizer") for index in stage.of(optype)]
        self._chain(tail, after)

    def _groups(self, stages: Sequence[_Stage]) -> list[Unit]:
        """Who ends together with whom."""
        units, taken = [], set[int]()

        def unite(members: Sequence[int], *, over_ranks: bool = False) -> None:
            if members:
                taken.update(members)
                needs = tuple(tuple(self._needs[index]) for index in members)
                units.append(Unit(members=tuple(members), needs=needs, over_ranks=over_ranks, communicates=True))

        for (stage, optype), sends in self._real.items():
            if optype.endswith("send"):
                for pair in self._pairs(stage, optype, sends):
                    unite(pair)
        for numbers in zip(*(stage.of(CLIP) for stage in stages if stage.of(CLIP)), strict=False):
            unite(numbers, over_ranks=True)
        ends = [stage.of(EMBEDDING) for stage in stages if stage.of(EMBEDDING)]
        for members in zip(*ends, strict=False):
            unite(members)
        for index, place in enumerate(self._trace.places):
            if index not in taken and place.optype in (*PIPELINE_TYPES, *OVER_RANKS):
                unite([index], over_ranks=place.optype in OVER_RANKS)
        alone = [index for index in range(len(self._trace.places)) if index not in taken]
        return [*units, *(Unit(members=(index,), needs=(tuple(self._needs[index]),)) for index in alone)]

    def _pairs(self, stage: int, optype: str, sends: list[int]) -> list[tuple[int, int]]:
        """Sends of one stage with the receives of the next one, first with first."""
        peer = (stage + TOWARDS[optype]) % self._trace.stages
        receives = self._real.get((peer, PEERS[optype]), [])
        if len(sends) != len(receives):
            raise DataError(
                f"stage {stage} sends {len(sends)} times ({optype}) and stage {peer} receives {len(receives)} times. "
                "The trace is not whole. Record whole steps of every stage."
            )
        return list(zip(sends, receives, strict=True))

    def _ordered(self, units: list[Unit]) -> tuple[Unit, ...]:
        """Units so that each comes after all that it needs."""
        unit_of = {index: number for number, unit in enumerate(units) for index in unit.members}
        needed = [{unit_of[index] for needs in unit.needs for index in needs} for unit in units]
        followers: list[list[int]] = [[] for _ in units]
        for number, before in enumerate(needed):
            for other in before:
                followers[other].append(number)
        left = np.array([len(before) for before in needed])
        ready = [number for number in range(len(units)) if left[number] == 0]
        for number in ready:  # grows while it is read
            for follower in followers[number]:
                left[follower] -= 1
                if left[follower] == 0:
                    ready.append(follower)
        if len(ready) < len(units):
            stuck = [self._trace.places[units[number].members[0]] for number in range(len(units)) if left[number] > 0][:3]
            names = ", ".join(f"{place.optype} {place.number} of stage {place.stage}" for place in stuck)
            raise DataError(
                f"operations of the trace need each other in a circle ({names}). Its order of starts cannot be right. Check its clocks."
            )
        return tuple(units[number] for number in ready)
