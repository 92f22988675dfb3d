"""Failure modes of checkpoints: torn, refused by a full disk, or not copied because the store is away."""

from validation.records import FailureMode, Page

OWNER = "the recipe's owner"
MACHINES = "whoever runs the machines"

STORAGE = (
    FailureMode(
        name="torn_checkpoint", title="A checkpoint is torn or damaged",
        sees=("'step-... is damaged'", "a rank died while it saved", "a bit flipped on disk"),
        detector="the checkpoint's manifest: sizes and sha256 are verified before a byte is loaded",
        owner=OWNER,
        mitigation="the torn checkpoint is passed over and the newest one that verifies is loaded",
        is_automatic=True, command="ls -l FOLDER/checkpoints",
        stop_condition="no checkpoint of the run verifies: start from the beginning, never from unverified bytes",
        drill="torn_checkpoint", fired_by="SIGKILL while a checkpoint is written and not yet sealed", in_release=True,
        gates=("kill_and_resume", "readiness"),
        page=Page(
            wait="Yes: the run goes on from an older checkpoint and ends in the same bits.",
            confirm=("`seatrial train ... --run NAME --json`: `refused` names the folders that were passed over",
                     "`ls -l FOLDER/checkpoints`: a sealed folder has a MANIFEST.json"),
            done="Refused what does not verify, loaded the newest that does, did the lost steps again.",
            act=("One folder after a kill: nothing to do.",
                 "A sealed folder that no longer verifies: the disk changed bytes. Copy the run away (`--mirror`) and test the disk.",
                 "None verifies and there is a mirror: move FOLDER away and type the same command with `--mirror`; it fetches the copy."),
            call=MACHINES + " for a sealed folder that changed.",
            over="A newer checkpoint is sealed (event `sealed`).",
        ),
        critical=True,
    ),
    FailureMode(
        name="full_disk", title="The disk is full while a checkpoint is written",
        sees=("'No space left on device'", "'checkpoint not written: step ...'", "event `unsaved`"),
        detector="trainer.saver: a rank whose disk refuses says so to all; the leader hears `unsaved` and the record names the step",
        owner=OWNER,
        mitigation="that checkpoint is given up by all ranks and cleared away, training goes on, the next save tries again",
        is_automatic=True, command="df -h FOLDER /tmp /dev/shm",
        stop_condition="the newest sealed checkpoint is older than you can afford to lose",
        drill="full_disk", fired_by="the first save's disk says that it is full; the next one has room", gates=("kill_and_resume",),
        page=Page(
            wait="As long as the steps since the newest sealed checkpoint are cheap.",
            confirm=("`df -h FOLDER`: 100 %", "`du -sh FOLDER/* | sort -h | tail`: what took it",
                     "`grep unsaved FOLDER/group.jsonl | tail -n 3`: which steps are missing"),
            done="Removed the half-written folder, kept the sealed ones, went on training.",
            act=("Make room: other runs' folders, old logs. Leave FOLDER/checkpoints/step-* alone: retention keeps only the newest.",
                 "Do not end the run before a checkpoint is sealed again."),
            call=MACHINES + ", when there is no room to make.",
            over="`grep sealed FOLDER/group.jsonl | tail -n 1` shows a step beyond the refused one.",
        ),
        critical=True,
    ),
    FailureMode(
        name="store_away", title="The object store does not answer",
        sees=("'mirror: ...' problems at the end of a run", "`uploaded` stays empty", "connection errors to the bucket"),
        detector="infra.mirror: what goes wrong stands in `problems`, and `uploaded` names what is complete",
        owner=OWNER,
        mitigation="training goes on; nothing counts as copied before its manifest stands; the next look copies what is missing",
        is_automatic=True, command="seatrial show",
        stop_condition="the machine is to be given back and nothing was uploaded: wait, or copy FOLDER by hand",
        drill="store_away", fired_by="the store's folder is not usable when a run is mirrored, and comes back", gates=("`--mirror`",),
        page=Page(
            wait="Yes, as long as the local disk lives. A release cannot be decided without its store.",
            confirm=("`seatrial show`: an error that names the store, or the list of releases",
                     "`seatrial train ... --run NAME --mirror --json`: `mirror.uploaded` and `mirror.problems`"),
            done="Kept training, kept what has to be copied, tried again every second.",
            act=("Credentials (`SEATRIAL_STORE`, AWS_*) expired: renew them and type the same command; what stands is not sent twice.",
                 "The service is down: wait; see that the local disk has room.",
                 "Before the machine goes: `seatrial train ... --run NAME --mirror` once more; it copies what is missing and ends at "
                 "once."),
            call="whoever runs the object store.",
            over="`mirror.uploaded` has the newest sealed step and `mirror.problems` no new line.",
        ),
        critical=True,
    ),
)  # fmt: skip
