"""What each kind of finding needs to be seen, how it looks, and what to do about it: the table of docs/diagnosis.md."""

from typing import NamedTuple

from validation.finding import FindingKind


class Meaning(NamedTuple):
    """One kind, for people."""

    needs: str  # evidence without which it is not said
    signature: str  # what shows it
    action: str  # what to do next


MEANINGS: dict[FindingKind, Meaning] = {
    "missing_participant": Meaning(
        "records of the ranks that wait; of the one that is missing its records, stack or marker",
        "all others wait in a collective which one rank left out: it went on to a later one, or never came",
        "make the decision that skips the call the same on every rank: reduce the flag (any or all) before acting on it, "
        "or run the skipped part on a dummy batch",
    ),
    "extra_collective": Meaning(
        "records of all ranks; ends or stacks of those that are through",
        "few ranks wait in a collective for others that are through or never call it there",
        "call it on every rank, and guard only what one rank does beside it (a file's write, a log line)",
    ),
    "uneven_inputs": Meaning(
        "markers (step, micro-batch, a note that data ended), ends of the ranks, or call sites",
        "one rank ran another number of steps, micro-batches or loop turns than the others",
        "give every rank the same number of batches (drop the last, equal shards, torch's Join), or agree on the count before the loop",
    ),
    "op_type_mismatch": Meaning(
        "records of at least two ranks under one number",
        "under one number of a group, ranks issued different operations",
        "look at the two call sites: let one rank decide and broadcast the decision, or decide by what all ranks have alike (a step count)",
    ),
    "shape_mismatch": Meaning(
        "records of at least two ranks under one number",
        "same operation, other numbers of elements",
        "make the sizes equal on the named rank (pad to the longest, or gather sizes first); until then switch on argument checks",
    ),
    "dtype_mismatch": Meaning(
        "records of at least two ranks under one number",
        "same operation and count, another element type",
        "cast before the call; look at the autocast scope and the parameters' types on that rank",
    ),
    "root_mismatch": Meaning(
        "roots in the records (torch leaves them out on gloo), or a rooted operation that some are through and others stuck in",
        "same operation, another root",
        "pass the same source or destination rank everywhere, as a rank of the whole job",
    ),
    "order_swap_same_group": Meaning(
        "records of all ranks under two numbers that follow each other",
        "one rank issued two operations of a group in the other order",
        "iterate over an ordered container, the same on every rank; compare the ranks' operations each night",
    ),
    "order_swap_cross_group": Meaning(
        "records of the ranks in each group",
        "a circle: some wait in one group for ranks that wait in another group for them",
        "use one order of groups on every rank; move the sync between them",
    ),
    "group_membership_mismatch": Meaning(
        "member lists of groups, or one name under which some are through and others stuck",
        "one group name stands for different members",
        "let every rank create every group, in the same order, also those that it is no member of",
    ),
    "p2p_mismatch": Meaning(
        "records of send and recv with peers, or stacks",
        "a send or receive whose peer sends or waits elsewhere",
        "mend the schedule of sends and receives; log peer and tag with each of them",
    ),
    "p2p_cycle": Meaning(
        "records of send and recv with peers, or stacks",
        "sends (or receives) that wait for each other in a circle",
        "post sends and receives as one batch, or order them by the parity of the rank",
    ),
    "exception_path": Meaning(
        "the exception's text, a stack in cleanup, or step markers",
        "one rank left the step through an exception while the others wait in the next collective",
        "mend the exception; let the rank die at once or agree on skipping before the backward pass, then restart from the checkpoint",
    ),
    "teardown_deadlock": Meaning(
        "the stack of the rank that cleans up, or its pending exception",
        "one rank waits inside its cleanup while the others are in the step's collectives",
        "destroy groups only after success, and print the exception before cleaning up",
    ),
    "dead_process": Meaning(
        "exit codes or process states",
        "one process died first; the others lost their connection to it or wait for it",
        "look at that host's kernel log (out of memory, device errors) and restart; errors of the other ranks are consequences",
    ),
    "frozen_process": Meaning(
        "heartbeats, process states, or a stack that could not be taken",
        "the process lives, but its interpreter does not run: stopped, or inside a call that keeps the interpreter lock",
        "take a native stack of that rank before ending it (py-spy --native, gdb), then restart",
    ),
    "dataloader_deadlock": Meaning(
        "the stack of the missing rank, or its phase",
        "the missing rank waits for its data loader",
        "restart; fewer workers, another start method than fork, and a timeout on the loader",
    ),
    "late_rank": Meaning(
        "a later snapshot or dump in which the rank came, its stack, or its marker's phase",
        "one rank comes long after the others, but it works or came",
        "find what holds that rank up (cause and phase above); spread its work, or give that group a longer time-out",
    ),
    "all_ranks_same_op": Meaning(
        "records or stacks of all ranks of the group",
        "every rank is inside the same operation with equal arguments",
        "not the program's order: restart on other hosts and run a network test; look for a library's known defect",
    ),
    "uniform_slowness": Meaning(
        "a timeline of many steps",
        "every rank is slow alike",
        "look at what the ranks share: host processors, disk, network, clocks",
    ),
    "silent_mismatch": Meaning(
        "records of all ranks of a run that went on",
        "nothing hangs, but ranks disagree on element type, size or reduce operator: the results are wrong",
        "stop trusting results since that operation; make the arguments equal and compare the ranks' operations each night",
    ),
    "insufficient_evidence": Meaning(
        "nothing",
        "records from after a time-out only, or too few",
        "take the records while the job hangs, before the time-out, of every rank, with stacks",
    ),
    "healthy": Meaning(
        "records of the ranks",
        "nobody waits, or all go on",
        "nothing",
    ),
}


def action_of(kind: FindingKind) -> str:
    """What to do next about a finding of this kind."""
    return MEANINGS[kind].action
