"""Every case by name: the program, where it is from, and what has to be said of it.

Ids H.. and N.. are those of a collection of public reports and of its controls; OWN-.. are variants of ours, CALM-.. our controls.
Sources are threads in public repositories; titles are ours. Every program begins with three all_reduces and a barrier, so that number 5 is
the first operation of its own in the group of all ranks.
"""

from dataclasses import dataclass
from typing import Literal

Look = Literal["stall", "midway", "spread", "afterwards"]
ALARMS = ("hang", "straggler", "crash")  # verdicts that are false when nothing is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program and the right answer."""

    id: str
    title: str
    source: str  # "" = ours
    body: str  # "module:function" of this package
    world_size: int
    kinds: tuple[str, ...]  # the right one first, then others that are as true of what was recorded
    ranks: tuple[tuple[int, ...], ...]  # culprit sets, any of which is right: a tie may be told as nobody or as both
    groups: tuple[str, ...]  # names; () = it does not matter
    ops: tuple[str, ...]  # that stand at the first visible place, on some rank; () = it does not matter
    seq: int  # of the first visible place; 0 = it does not matter
    cause: str  # of late ranks
    phases: tuple[str, ...]  # of late ranks and loaders; () = it does not matter
    text: str  # has to be said somewhere: an exception's own words; "" = nothing
    look: Look  # when: at a stall or the end; while all goes well; the same, but rank after rank; after the time-out alone
    entries: int  # of each rank's ring
    timeout_s: float  # of all groups
    is_quick: bool  # in the sample that every test run makes

    @property
    def is_control(self) -> bool:
        """Whether there is nothing wrong with it, or nothing to be seen."""
        return self.kinds[0] in ("healthy", "insufficient_evidence")

    @property
    def is_own(self) -> bool:
        """Whether it is a variant of ours."""
        return not self.source

    @property
    def kind(self) -> str:
        """The right one."""
        return self.kinds[0]


# id, * in the quick sample | W | kinds | culprits, or by / | group.. op.. @ seq; late ranks: cause, phases | program | source | title
_TABLE = """
H01 | 4 | extra_collective | 0 | 0 barrier @6 | leaving:h01 | alan-turing-institute/autocast#381 | a save with a barrier on rank 0 alone
H02 | 4 | op_type_mismatch | 0 | 0 all_gather all_reduce @6 | leaving:h02 | pytorch/pytorch#77562 | the best loss known to rank 0 only
H03 | 4 | missing_participant | 2 | 0 barrier all_reduce @8 | leaving:h03 | Lightning-AI/pytorch-lightning#379 | early stop on one rank
H05 | 2 | op_type_mismatch | - / 0 1 | 0 broadcast all_reduce | leaving:h05 | speechbrain/speechbrain#2401 | checkpoints by the wall clock
H08 | 4 | missing_participant | 2 | 0 barrier all_reduce @12 | leaving:h08 | NVIDIA-NeMo/Automodel#2468 | a micro-batch is skipped
H10 | 4 | uneven_inputs | 1 | 0 all_reduce | leaving:h10 | pytorch/pytorch#141069 | an iterable data set of unequal length
H12 | 4 | uneven_inputs | 0 | 0 all_reduce @6 | leaving:h12 | verl-project/verl#5591 | micro-batches by local token lengths
H13 | 4 | uneven_inputs shape_mismatch | 2 | 0 all_gather @7 | leaving:h13 | deepspeedai/DeepSpeed#8262 | decoding of different lengths
H14 | 4 | missing_participant | 3 | 0 all_reduce barrier @6 | leaving:h14 | NVIDIA/Megatron-LM#4851 | no tokens for this rank's experts
H16 | 4 | shape_mismatch extra_collective | 1 | 0 broadcast @5 | leaving:h16 | modelscope/ms-swift#10183 | samples with and without audio
H17 | 4 | shape_mismatch | - | 0 all_gather @5 | arguments:h17 | Lightning-AI/pytorch-lightning#7773 | an all_gather of four lengths
H18* | 4 | shape_mismatch | 1 | 0 all_reduce @5 | arguments:h18 | NVIDIA/nccl#1417 | an all_reduce of two sizes
H19 | 4 | dtype_mismatch | 1 | 0 all_reduce @5 | arguments:h19 | pytorch/pytorch#150433 | float32 against bfloat16
H21 | 4 | order_swap_same_group silent_mismatch | 2 | 0 all_reduce @5 | arguments:h21 | NVIDIA/apex#19 | buckets from an unordered dict
H23 | 4 | group_membership_mismatch | - / 0 1 2 3 | 1 | groups:h23 | pytorch/pytorch#25390 | each process makes only its own group
H24* | 4 | order_swap_cross_group | 3 | 1 2 all_reduce @1 | groups:h24 | meta-pytorch/torchrec#4149 | two groups, a cycle
H26 | 2 | p2p_cycle | 0 1 / - | 0 send | peers:h26 | NVIDIA/nccl#479 | both send first
H29 | 4 | p2p_mismatch | 1 | 0 send recv | peers:h29 | pytorch/pytorch#172668 | a receive from the wrong peer
H30 | 4 | exception_path | 1 | 0 all_reduce @9 | ending:h30 | pytorch/pytorch#44353 | out of memory caught, batch skipped
H32 | 4 | exception_path | 3 | 0 all_reduce @7 | ending:h32 | ai2cm/ace#850 | a check raises on one rank, then a long clean-up
H33* | 4 | teardown_deadlock | 2 | 0 barrier all_reduce @6 | ending:h33 | pytorch/torchtitan#1342 | clean-up in finally waits for the others
H36 | 4 | dead_process | 2 | 0 all_reduce @5 | ending:h36 | pytorch/pytorch#17113 | a crash leaves the others waiting
H37 | 2 | frozen_process | 0 | 0 all_reduce @5 | ending:h37 | pytorch/pytorch#122694 | a C call keeps the interpreter's lock
H38 | 4 | dataloader_deadlock | 0 | 0 all_reduce @7 ; data | waiting:h38 | pytorch/pytorch#87995 | a loader's queue that nobody feeds
H40 | 4 | late_rank | 0 | checkpoint_io checkpoint | late:h40 | EleutherAI/bergson#444 | rank 0 writes alone for six seconds
H40-short | 4 | late_rank | 0 | checkpoint_io checkpoint | late:h40 | EleutherAI/bergson#444 | the same, longer than the time-out
H42 | 4 | late_rank | - / 0 1 2 3 | gc | late:h42 | marin-community/marin#9205 | staggered garbage collection
H43* | 4 | late_rank | 1 | compute backward | late:h43 | traceopt-ai/traceml#252 | a slow backward that hides
H44 | 4 | late_rank | 3 | compute forward backward | late:h44 | mlfoundations/open_clip#136 | one device computes 1.6 times as long
H47 | 4 | all_ranks_same_op | - | 0 all_reduce @5 | waiting:h47 | marin-community/marin#7344 | everyone in the same operation
H49 | 4 | uniform_slowness | - | . | late:h49 | rwth-i6/returnn#1485 | steps 20 to 39 slow on all ranks
OWN-01 | 3 | missing_participant | 1 | 0 reduce_scatter barrier @10 | leaving:fewer_scatters | | one reduce_scatter fewer
OWN-02 | 5 | missing_participant op_type_mismatch | 3 | 0 gather all_reduce @5 | leaving:no_gather | | a gather left out
OWN-03 | 5 | missing_participant | 4 | 0 all_to_all barrier @6 | leaving:fewer_exchanges | | an all_to_all left out
OWN-04 | 4 | extra_collective | 2 | 0 all_reduce barrier @9 | leaving:one_more | | one all_reduce more, of the same size
OWN-05 | 5 | uneven_inputs | 0 2 | 0 all_reduce @7 | leaving:two_run_dry | | two ranks run out of data
OWN-06 | 2 | missing_participant uneven_inputs | 1 / - / 0 1 | 0 all_reduce @7 | leaving:one_of_two_stops | | one of two stops early
OWN-07 | 5 | missing_participant shape_mismatch | 4 | 0 all_reduce @8 | leaving:dropped_layer | | a bucket left out
OWN-08 | 4 | extra_collective shape_mismatch | 0 | 0 all_reduce @7 | leaving:evaluates_alone | | rank 0 evaluates alone
OWN-09 | 8 | root_mismatch silent_mismatch | 5 | 0 broadcast @5 | arguments:other_root | | another source of a broadcast, and nothing stops
OWN-38 | 4 | root_mismatch silent_mismatch | 2 | 0 broadcast @7 | arguments:other_root_of_four | | a rank broadcasts itself
OWN-10 | 4 | root_mismatch | 2 | 0 gather @5 | arguments:other_gather_root | | gathered for itself
OWN-11 | 3 | silent_mismatch | 2 | 0 all_reduce @6 | arguments:other_operator | | the maximum where others add
OWN-12 | 5 | dtype_mismatch silent_mismatch | 3 | 0 all_reduce @5 | arguments:other_type | | as many bytes, another type
OWN-13 | 4 | order_swap_same_group op_type_mismatch | 1 | 0 broadcast all_reduce @5 | arguments:swapped | | a reduction before the broadcast
OWN-14 | 5 | shape_mismatch | 3 | 0 all_gather @7 | arguments:wrong_length | | a batch that was not padded
OWN-15 | 8 | missing_participant | 6 | 6 all_reduce @3 | groups:pair_left_out | | nested groups, one pair's reduction left out
OWN-16 | 3 | order_swap_cross_group | - / 0 1 2 | 1 2 3 all_reduce @1 | groups:three_groups | | a cycle over three groups
OWN-17 | 4 | order_swap_cross_group | 1 / - | 0 1 all_reduce | groups:half_swapped | | the world before the half
OWN-18 | 8 | group_membership_mismatch missing_participant | 7 / - | | groups:one_makes_no_group | | a rank leaves out a new_group
OWN-19 | 3 | p2p_cycle | 0 1 2 / - | 0 send | peers:ring | | a ring of three that all send first
OWN-20 | 5 | p2p_mismatch | 0 3 / - / 3 / 0 | 0 send recv | peers:other_tag | | the peers' tags differ
OWN-21 | 5 | p2p_cycle | 0 1 2 3 / - | 0 recv | peers:receive_ring | | a ring of four that all receive first
OWN-22* | 4 | frozen_process | 2 | 0 all_reduce @6 | ending:stopped | | stopped by a signal
OWN-23 | 5 | dead_process | 4 | 0 all_reduce @6 | ending:bad_address | | a segmentation fault
OWN-24 | 2 | dead_process | 1 | 0 all_reduce @5 | ending:leaves_without_a_word | | exit code 3 without a word
OWN-25 | 4 | exception_path missing_participant | 0 | 0 all_reduce barrier @8 | ending:swallowed | | an error caught, a batch skipped
OWN-26 | 4 | exception_path | 2 | 0 all_reduce @6 | ending:raises | | an exception ends one rank at once
OWN-27 | 3 | teardown_deadlock | 1 | 0 all_gather all_reduce @7 | ending:cleans_up_together | | a last checkpoint on the way out
OWN-28 | 8 | dead_process | 0 | 0 reduce @7 | ending:killed_in_collective | | the root is killed
OWN-29 | 4 | missing_participant frozen_process late_rank | 1 | 0 all_reduce @7 | waiting:dead_lock | | a lock taken twice in forward
OWN-30 | 3 | dataloader_deadlock | 2 | 0 reduce_scatter @6 ; data | waiting:loader_of_last | | a loader waits for workers that are gone
OWN-31 | 5 | all_ranks_same_op | - | 0 all_gather @6 | waiting:dropped_in_gather | | an all_gather whose packets do not arrive
OWN-32 | 3 | late_rank | 1 | data data | late:slow_loader | | batches 25 ms late on one rank
OWN-33 | 4 | late_rank | 2 | compute forward | late:slow_forward | | a forward that is 12 ms longer from step 8 on
OWN-34 | 4 | late_rank | 3 | gc | late:long_collection | | one collection of four seconds
OWN-35 | 5 | late_rank | 4 | checkpoint_io checkpoint | late:slow_writes | | one rank writes alone every fourth step
OWN-36 | 8 | late_rank | 6 | compute backward | late:slow_backward_of_eight | | a backward that is 30 ms longer, eight ranks
OWN-37 | 3 | uniform_slowness | - | . | late:all_slower | | a shared disk is slow from step 12 to 23
OWN-39 | 3 | uneven_inputs missing_participant | 2 | 0 all_reduce | leaving:wrapped_model | | DDP, one batch short, and no word
OWN-40* | 8 | missing_participant | 3 | 0 barrier all_reduce @7 | leaving:one_of_eight_stops | | one of eight stops early
N1 | 4 | healthy | - | . | quiet:n1 | ours, published with the cases | the rings wrapped, two ranks busy in a group of their own
N2 | 4 | healthy | - | . | quiet:n2 | ours, published with the cases | scatter and gather
N4 | 4 | healthy | - | . | quiet:n4 | ours, published with the cases | 4 x 4 against 2 x 8
N5 | 4 | healthy | - | . | quiet:training | ours, published with the cases | snapshots 50 ms apart
N8 | 4 | insufficient_evidence | - | . | quiet:n8 | ours, published with the cases | dumps of after the time-out alone
N9* | 4 | healthy | - | . | quiet:n9 | ours, published with the cases | ordinary jitter
CALM-01 | 2 | healthy | - | . | quiet:ping_pong | | two ranks that send to and fro
CALM-02 | 4 | healthy | - | . | quiet:pipeline | | pipeline stages, each elsewhere by nature
CALM-03 | 3 | healthy | - | . | quiet:turning_root | | a source that turns
CALM-04 | 5 | healthy | - | . | quiet:uneven_objects | | objects of five sizes
CALM-05 | 4 | healthy | - | . | quiet:slow_start | | a slow first step
CALM-06 | 4 | healthy | - | . | quiet:saving_together | | a checkpoint of all ranks
CALM-07 | 4 | healthy | - | . | quiet:shadowing | | empty batches until the last rank is done
CALM-08 | 4 | healthy | - | . | quiet:asynchronous | | three reductions in flight
CALM-09 | 6 | healthy | - | . | quiet:odd_groups | | tensor and data groups over six ranks
CALM-10 | 8 | healthy | - | . | quiet:training | | eight ranks on few cores
"""
_LOOKS: dict[str, Look] = {"N5": "spread", "N8": "afterwards"}
_ENTRIES = {"N1": 64}
_TIMEOUTS_S = {"H40-short": 4.0, "N8": 2.0}
_TEXTS = {"H32": "loss is nan", "H33": "label 11 is out of range", "OWN-26": "division by zero", "OWN-27": "speaker_id"}
ENTRIES, TIMEOUT_S = 4096, 8.0


def _case(line: str) -> Case:
    name, size, kinds, ranks, place, body, source, title = (word.strip() for word in line.split("|"))
    key, found = name.rstrip("*"), kinds.split()
    is_late, is_control = found[0] == "late_rank", found[0] in ("healthy", "insufficient_evidence")
    before, _, phase = place.partition(";")
    words = before.split()
    where = [] if is_late or place == "." else [word for word in words if not word.startswith("@")]
    return Case(
        id=key, title=title, source=source, body=body, world_size=int(size), kinds=tuple(found),
        ranks=tuple(tuple(int(rank) for rank in one.split() if rank != "-") for one in ranks.split("/")),
        groups=tuple(word for word in where if word.isdigit()), ops=tuple(word for word in where if not word.isdigit()),
        seq=next((int(word[1:]) for word in words if word.startswith("@")), 0), cause=words[0] if is_late else "",
        phases=tuple(words[1:]) if is_late else tuple(phase.split()), text=_TEXTS.get(key, ""),
        look=_LOOKS.get(key, "midway" if is_control else "stall"), entries=_ENTRIES.get(key, ENTRIES),
        timeout_s=_TIMEOUTS_S.get(key, TIMEOUT_S), is_quick=name.endswith("*"),
    )  # fmt: skip


CASES = tuple(_case(line) for line in _TABLE.strip().splitlines())
CONTROLS = tuple(case for case in CASES if case.is_control)
FAULTS = tuple(case for case in CASES if not case.is_control)


def case_of(name: str) -> Case:
    """By id. Raises KeyError."""
    return {case.id: case for case in CASES}[name]
