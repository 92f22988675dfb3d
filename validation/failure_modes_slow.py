"""Failure modes of slowness: one rank that all others wait for, or everybody slower than before."""

from validation.records import FailureMode, Page

OWNER = "the recipe's owner"
MACHINES = "whoever runs the machines"

SLOW = (
    FailureMode(
        name="straggler", title="One rank is late and all others wait for it",
        sees=("steps take longer, no error", "idle devices on all ranks but one", "efficiency below its floor",
              "a rotating burst every few steps"),
        detector="validation.straggling: by arrival at the collectives, per step and over a window, late_rank with its cause; scaling: "
                 "each rank's busy time and its wait",
        kinds=("late_rank",), owner=OWNER,
        mitigation="nothing is ended; the finding names rank, phase and cause: move the rank off its machine, or train at the largest "
                   "world size above the efficiency floor",
        is_automatic=False, command="seatrial diagnose FOLDER",
        stop_condition="efficiency below the policy's floor at every world size above one, or lateness that will outlast the time-out",
        drill="straggler", fired_by="rank 1 sleeps in its forward pass, and in its data in a second run", in_release=True,
        gates=("scaling", "incident"),
        page=Page(
            wait="Yes: it costs money, not correctness. Not when the finding says that lateness is about to pass the time-out.",
            confirm=("`seatrial diagnose FOLDER`: late_rank, the rank, its phase, its cause, the slowdown",
                     "`top`, `vmstat 1 5` and `nvidia-smi` on that rank's host, beside another one"),
            done="Named the rank and what the job would do without it (what_if); waited.",
            act=("compute: look at that device (clocks, temperature, errors); drain the host if it is slower alone, too.",
                 "data: that rank's disk or its samples; more loader processes; equal shards.",
                 "host_cpu: who else runs there? Move them.",
                 "gc: no host to drain. Switch automatic collection off and collect together every n steps.",
                 "checkpoint_io: spread the write, or give that group a longer time-out.",
                 "network: see fabric; compile and imbalance: the recipe's shapes differ by rank."),
            call=f"{MACHINES} for a slow host in working hours; {OWNER} for the rest.",
            over="The slowdown in a new `seatrial diagnose FOLDER` is below 1.2 and no rank is named.",
        ),
        critical=False,
    ),
    FailureMode(
        name="uniform_slowness", title="Everybody is slower than before",
        sees=("whole epochs that take several times longer", "all ranks alike", "it switches back by itself"),
        detector="validation.straggling: uniform_slowness with the steps from and to, and no rank",
        kinds=("uniform_slowness",), owner=OWNER,
        mitigation="nothing is ended and nobody is blamed; look at what the ranks share",
        is_automatic=False, command="seatrial diagnose FOLDER",
        stop_condition="the run would cost more than its budget at this pace: stop at a checkpoint",
        drill="uniform_slowness", fired_by="every rank sleeps in every step from the middle of the run on", gates=("incident",),
        page=Page(
            wait="Yes.",
            confirm=("`seatrial diagnose FOLDER`: uniform_slowness, the steps, nobody named",
                     "`vmstat 1 5`, `iostat -x 1 3`, `cat /proc/pressure/*` on the hosts: who takes the processor, the disk, the memory"),
            done="Said since which step, and how much.",
            act=("A shared disk or network: find the other job.",
                 "Clocks: `nvidia-smi -q -d CLOCK,PERFORMANCE` shows throttling of all devices at once (power, cooling).",
                 "The same machine, another program beside it: move one of them."),
            call=MACHINES + ", in working hours.",
            over="Step times are back where they were before the finding's first step.",
        ),
        critical=False,
    ),
)  # fmt: skip
