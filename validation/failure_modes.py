"""The ways in which this pipeline is known to fail: rows of the readiness rubric, each with a drill of the same name.

rank_killed         SIGKILLs of kill_and_resume            slice_regression    slice_quality's positive control
hang                one rank stops before a collective     torn_checkpoint     SIGKILL while a checkpoint is written
wrong_gradient      gradient_equivalence's control         bad_release_served  the fallbacks loaded and asked
straggler           scaling's control                      bad_data            data_contract's control
skipped_collective  one rank leaves out an all-reduce
"""

from validation.records import FailureMode

BAD_RELEASE = "bad_release_served"  # its drill is read off the fallback checks


def default_modes(owner: str) -> tuple[FailureMode, ...]:
    """List the failure modes of a release; `owner` is the recipe card's, who answers for all of them until told otherwise."""

    def mode(name: str, detector: str, mitigation: str, stop_condition: str, *, critical: bool = True) -> FailureMode:
        return FailureMode(
            name=name, detector=detector, owner=owner, mitigation=mitigation, stop_condition=stop_condition, drill=name, critical=critical
        )

    return (
        mode(
            "rank_killed", "the group's leader sees the rank's exit status and kills the survivors",
            "restart the group from the last sealed checkpoint, on fewer ranks if one is gone for good",
            "recovery takes longer than the policy's budget_s, or max_restarts are used up",
        ),
        mode(
            "hang", "the group's deadline; the report names each rank's last event and current line",
            "kill the group, read who did not enter the collective, restart from the last sealed checkpoint",
            "the same rank hangs at the same step a second time",
        ),
        mode(
            "skipped_collective", "every exact reduction carries its step: the next one finds the ranks out of step",
            "the update is not made and the group is ended; look at the rank that is ahead, then restart from the last sealed checkpoint",
            "the same rank skips a second time: its data or its exception handling decides on its own",
        ),
        mode(
            "wrong_gradient", "gradient_equivalence: bits across world sizes, error against float64",
            "train with the exact reduction, or at the last world size that passed; bisect to the named tensor",
            "any tensor outside the policy's noise_multiple: nothing trained since may be promoted",
        ),
        mode(
            "straggler", "scaling: each rank's busy time and its wait at collectives",
            "move the rank off its machine, or train at the largest world size above the efficiency floor",
            "efficiency below the policy's floor at every world size above one", critical=False,
        ),
        mode(
            "bad_data", "data_contract: expectations on both splits before anything is trained",
            "hold the release, keep serving, mend the loader or the upstream table",
            "a violated expectation: no training run starts on these inputs",
        ),
        mode(
            "slice_regression", "slice_quality: paired intervals by slice against what serves",
            "keep what serves; look at the named slice; train again with more of it or recalibrate",
            "any slice below the non-inferiority margin",
        ),
        mode(
            "torn_checkpoint", "the checkpoint's manifest: sizes and sha256 are verified before a byte is loaded",
            "pass over the torn checkpoint and load the newest one that verifies",
            "no checkpoint of the run verifies: start from the beginning, never from unverified bytes",
        ),
        mode(
            BAD_RELEASE, "before each decision the fallbacks are loaded and asked for a prediction",
            "roll back the serving pointer to the last known-good version, or to the baseline",
            "the fallback does not load or gives no finite prediction: release nothing until one does",
        ),
    )  # fmt: skip
