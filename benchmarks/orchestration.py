"""What a release spends on anything but its gates and its training, as a share of the command's wall clock.

    python benchmarks/orchestration.py [--json] [--quick]

`seatrial release flights`, three times in one fresh home, each a process of its own from its start to its end: imports, servers, plan,
journal, evidence, registry, report, pages. Gate work is what each gate's evidence says it took (probe and judgement) and the candidate's
training by its own record. `ratio` is the median share of the rest over the releases after the first; the goal is 0.15. The first one
also makes the databases and prepares the data; it stands in the samples. No peer runs the same gates without Prefect and MLflow: the
scaling and quality gates judge a registered version, so the share is of the release itself.

Limits: on a shared machine everything grows alike, so the share holds better than the seconds; journal times are whole seconds; --quick
releases the small digits recipe, whose gates are so short that its share means nothing.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from support.output import Document, Sample, parser, progress, publish
from support.releases import Yard, journal_s

GOAL = 0.15


def measure(yard: Yard, number: int) -> Sample:
    """One release, split."""
    document, wall_s = yard.release()
    story = yard.story(document["release_id"])
    gates_s = sum(float(gate["seconds"]) for gate in document["gates"])
    training_s = yard.training_s(story)
    rest_s = wall_s - gates_s - training_s
    progress(f"release {number + 1}: {document['decision']} in {wall_s:.1f} s, {rest_s:.1f} s of it neither gate nor training")
    return {
        "release": number, "decision": document["decision"], "wall_s": wall_s, "gates_s": gates_s, "training_s": training_s,
        "rest_s": rest_s, "outside_the_journal_s": wall_s - journal_s(story), "share": rest_s / wall_s,
    }  # fmt: skip


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        yard = Yard(Path(folder) / "home", arguments.quick)
        samples = [measure(yard, number) for number in range(1 if arguments.quick else 3)]
    share = statistics.median(float(sample["share"]) for sample in (samples[1:] or samples))
    document = Document(
        name="orchestration", peer="the whole command: gates, training and the rest", ratio=share, goal=GOAL, met=share <= GOAL,
        unit="share of a release's wall clock (lower is better)", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
