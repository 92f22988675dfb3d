"""Failure modes of a release: wrong gradients, bad data, a worse candidate, a bad version in service."""

from validation.records import FailureMode, Page

OWNER = "the recipe's owner"
HOLD = "`seatrial show ID`: the gate, the check that failed, and its next step"

RELEASE = (
    FailureMode(
        name="wrong_gradient", title="Gradients are wrong on several ranks",
        sees=("gradient_equivalence failed", "other losses on another number of ranks", "a model that learns worse than on one device"),
        detector="gradient_equivalence: bits across world sizes, error against float64",
        owner=OWNER,
        mitigation="the candidate is refused; train with the exact reduction, or at the last world size that passed; bisect to the named "
                   "tensor",
        is_automatic=True, command="seatrial check RECIPE --gate gradient_equivalence",
        stop_condition="any tensor outside the policy's noise_multiple: nothing trained since may be promoted",
        drill="wrong_gradient", fired_by="gradient_equivalence's positive control: a lane is left out of the gradient", in_release=True,
        gates=("gradient_equivalence",),
        page=Page(
            wait="Yes: what serves keeps serving.",
            confirm=(HOLD, "`seatrial check RECIPE --gate gradient_equivalence`: which tensor, at which world size, since which step"),
            done="Refused the candidate and kept what serves.",
            act=("Read the verdict's diagnosis: it says what the error looks like (a rank left out, divided twice, another order).",
                 "Undo the newest change to the loss, the sampler or the reduction; check again."),
            call=OWNER + ", in working hours.",
            over="The check passes on every world size that is trained at.",
        ),
        critical=True,
    ),
    FailureMode(
        name="bad_data", title="The data breaks its contract",
        sees=("data_contract failed", "a column that is empty or new", "an upstream table that came late"),
        detector="data_contract: expectations on both splits before anything is trained",
        owner=OWNER,
        mitigation="the release is held before anything is trained, and what serves keeps serving; mend the loader or the upstream table",
        is_automatic=True, command="seatrial show ID",
        stop_condition="a violated expectation: no training run starts on these inputs",
        drill="bad_data", fired_by="data_contract's positive control: a planted frame that has to be refused", in_release=True,
        gates=("data_contract",),
        page=Page(
            wait="Yes: nothing was trained.",
            confirm=(HOLD, "the split, column and expectation in the verdict, against the upstream table's own history"),
            done="Held the release.",
            act=("A late or empty upstream load: wait for it, then release again.",
                 "A real change of the world: the contract is the owner's to change, never at night."),
            call="whoever owns the upstream table; " + OWNER + " for the contract.",
            over="`seatrial release RECIPE` passes data_contract.",
        ),
        critical=True,
    ),
    FailureMode(
        name="slice_regression", title="The candidate is worse for some",
        sees=("slice_quality failed", "a better mean and a worse slice", "complaints from one region or product"),
        detector="slice_quality: paired intervals by slice against what serves",
        owner=OWNER,
        mitigation="the candidate is refused and what serves is kept; look at the named slice; train again with more of it or recalibrate",
        is_automatic=True, command="seatrial show ID",
        stop_condition="any slice below the non-inferiority margin",
        drill="slice_regression", fired_by="a candidate that was trained on turned labels in one slice, and slice_quality's positive "
                                           "control",
        in_release=True, gates=("slice_quality",),
        page=Page(
            wait="Yes: what serves keeps serving.",
            confirm=(HOLD, "the slice's row in the report: how many samples, how far below, in the unit of utility"),
            done="Refused the candidate and kept what serves.",
            act=("Compare the slice's rows in training and judged months: fewer, other labels, a new value?",
                 "Train again with more of it, or recalibrate; never raise the margin at night."),
            call=OWNER + ", in working hours.",
            over="A later candidate passes slice_quality.",
        ),
        critical=True,
    ),
    FailureMode(
        name="bad_release_served", title="A bad version serves",
        sees=("quality falls after a promotion", "errors from the serving module", "a promotion that somebody regrets"),
        detector="before each decision the fallbacks are loaded and asked for a prediction",
        owner=OWNER,
        mitigation="roll back the serving pointer to the last known-good version, or to the baseline",
        is_automatic=True, command="seatrial show",
        stop_condition="the fallback does not load or gives no finite prediction: release nothing until one does",
        drill="bad_release_served", fired_by="a refused candidate beside a torn last known-good version, beside a sound one, and beside "
                                             "none",
        in_release=True, gates=("readiness", "every decision"),
        page=Page(
            wait="No, when users see it.",
            confirm=("`seatrial show`: what serves, since which release, and what it could fall back to",
                     "`seatrial gate slice_quality --release ID`: is the promoted candidate really worse?"),
            done="Loaded every fallback before the decision; refused candidates fell back by themselves.",
            act=("Hold the gate that missed it again: `seatrial gate NAME --release ID`. A gate that fails now decides again, and the "
                 "pointer goes back to the last known-good version.",
                 "No gate sees it: tell the serving side to take the last known-good version that `seatrial show` names.",
                 "Write down what no gate saw: it is tomorrow's slice or check."),
            call=OWNER + ", and whoever runs the serving side, now.",
            over="`seatrial show` names the older version, and the users' measure is back.",
        ),
        critical=True,
    ),
)  # fmt: skip
