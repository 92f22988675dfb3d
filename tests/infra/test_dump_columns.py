"""A document of the flight recorder becomes columns: gloo's, NCCL's, our own, old and new versions."""

import random

import pytest
from helpers_dumps import START_NS, document, entries, entry

from infra.dump_columns import to_columns
from infra.dump_pool import Parsed, share_tables
from validation.flight import Group, Marker, Signature


def dump_of(*made, **changed):
    return to_columns(document(made, **changed), 0).dump


def test_glooss_only_sign_of_an_end_is_retired() -> None:
    """Its state stays "scheduled", its lone group is named by an empty string."""
    found = to_columns(document(entries(3, pending=True)), 1)

    assert (found.dump.rank, found.world_size) == (1, 4)
    assert found.dump.finished.tolist() == [True, True, False]
    assert found.dump.groups == (Group("0", (0, 1, 2, 3), "default_pg"),)
    assert found.dump.signatures == (Signature("all_reduce", ((4,),), ("Float",), ((4,),), ("Float",)),)


@pytest.mark.parametrize(
    ("changed", "finished"),
    [
        ({"state": "completed", "retired": False}, True),
        ({"state": "started", "retired": True}, False),
        ({"state": "scheduled", "retired": False}, False),
        ({"state": "scheduled", "retired": False, "time_discovered_completed_ns": 5}, True),
        ({"state": "scheduled", "retired": None, "left_ns": 7}, True),
        ({"state": "scheduled", "retired": False, "left_ns": 7}, False),
    ],
)
def test_ncclss_states(changed, finished: bool) -> None:
    """A time-out retires what was started and never completed."""
    assert dump_of(entry(0, **changed)).finished.tolist() == [finished]


def test_ranks_of_a_group_may_be_text_and_peers_are_numbered_within_it() -> None:
    """NCCL writes "[4, 6]" and "nccl:send 0->1"."""
    config = {"7": {"name": "7", "desc": "pipeline", "ranks": "[4, 6]"}}
    p2p = {"process_group": ("7", "pipeline"), "is_p2p": True, "collective_seq_id": 9}

    dump = dump_of(
        entry(0, profiling_name="nccl:send 0->1", p2p_seq_id=3, **p2p),
        entry(1, profiling_name="nccl:recv 0<-1", p2p_seq_id=4, **p2p), pg_config=config,
    )  # fmt: skip

    assert dump.groups == (Group("7", (4, 6), "pipeline"),)
    assert [(one.op, one.peer) for one in dump.signatures] == [("send", 6), ("recv", 6)]
    assert dump.seq.tolist() == [3, 4]


def test_what_our_own_recorder_adds_is_used() -> None:
    """Members, reduce operator, root, peer, tag, step, micro-batch, place, and where the program stood."""
    own = {
        "rank": 3, "world_size": 8, "taken_ns": 99, "wrapped": True, "groups": {"1": {"ranks": [1, 3], "description": "pair"}},
        "marker": {"step": 5, "phase": "backward", "micro": 1, "since_ns": 7, "beat_ns": 8, "note": "data exhausted"},
    }  # fmt: skip
    made = entry(
        0, process_group=["1", "pair"], profiling_name="gloo:send", is_p2p=True, p2p_seq_id=2, collective_seq_id=0, reduce_op="sum", root=1,
        peer=1, tag=5, step=5, micro=1, where="train.py:12 step",
    )  # fmt: skip

    found = to_columns(document([made], sea_trial=own), 0)

    dump = found.dump
    assert (dump.rank, found.world_size, dump.taken_ns, dump.wrapped) == (3, 8, 99, True)
    assert dump.groups[0] == Group("1", (1, 3), "pair")
    assert dump.signatures[0][5:] == ("sum", 1, 1, 5)
    assert dump.marker == Marker(5, "backward", 1, 7, 8, "data exhausted")
    assert (dump.step.tolist(), dump.micro.tolist(), dump.places, dump.seq.tolist()) == ([5], [1], ("train.py:12 step",), [2])


def test_entries_stand_in_the_order_of_their_numbers() -> None:
    """Whatever order they were written in."""
    made = entries(20)
    random.Random(0).shuffle(made)

    dump = dump_of(*made)

    assert dump.seq.tolist() == list(range(1, 21))
    assert not dump.wrapped


def test_a_ring_that_does_not_begin_with_the_first_operation_has_wrapped() -> None:
    """By its record numbers, or where they are not there by the operations' own."""
    assert dump_of(*entries(8)[3:]).wrapped
    assert dump_of(*({k: v for k, v in one.items() if k != "record_id"} for one in entries(8)[3:])).wrapped


def test_pending_operations_alone_say_nothing_of_the_others() -> None:
    """A dump of the active ones has gaps in its numbers."""
    found = to_columns(document([entry(2), entry(9)]), 0)

    assert found.dump.wrapped
    assert "pending operations only" in found.notes[0]


def test_the_call_site_is_the_innermost_frame_that_is_not_torchs() -> None:
    """A pickle with stacks has torch's own frames first."""
    frames = [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 3},
        {"name": "step", "filename": "/home/me/train.py", "line": 12},
    ]

    assert dump_of(entry(0, frames=frames)).places == ("train.py:12 step",)


def test_a_newer_version_is_read_and_noted() -> None:
    """Its keys may have changed their meaning."""
    found = to_columns(document(entries(2), version="3.1", brand_new={"a": 1}), 0)

    assert len(found.dump.seq) == 2
    assert "version 3.1" in found.notes[0]


@pytest.mark.parametrize("key", sorted(entry(0)))
@pytest.mark.parametrize("value", ["gone", None, "rubbish", -1, 2**70, [[["x"]]], {"a": 1}], ids=repr)
def test_a_key_that_is_absent_or_wrong_spoils_nothing_else(key: str, value) -> None:
    """Two operations stay two operations."""
    made = [{k: v for k, v in one.items() if k != key} if value == "gone" else one | {key: value} for one in entries(2)]

    dump = dump_of(*made)

    assert len(dump.seq) == len(dump.group) == len(dump.created_ns) == len(dump.finished) == 2


def test_operations_without_numbers_are_counted_in_their_group() -> None:
    """Old versions numbered them otherwise."""
    made = [{k: v for k, v in one.items() if k != "collective_seq_id"} for one in entries(3)]

    assert dump_of(*made).seq.tolist() == [1, 2, 3]


def test_no_entries_are_no_error() -> None:
    """A rank that has done nothing yet is evidence."""
    dump = dump_of()

    assert (len(dump.seq), dump.groups, dump.wrapped) == (0, (Group("0", (0, 1, 2, 3)),), False)


def test_a_document_of_no_known_rank_is_refused() -> None:
    """Neither its name nor itself says whose it is."""
    with pytest.raises(ValueError, match="which rank"):
        to_columns(document(entries(1)), -1)


def test_all_dumps_number_equal_signatures_alike() -> None:
    """So ranks are compared by numbers, whatever they recorded first."""
    broadcast = entry(0, profiling_name="gloo:broadcast", time_created_ns=START_NS - 5)

    one, other = share_tables([Parsed(dump=dump_of(entry(1))), Parsed(dump=dump_of(broadcast, entry(1)))])

    assert one.dump.signatures is other.dump.signatures
    assert one.dump.signature[0] == other.dump.signature[1]
