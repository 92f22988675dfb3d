"""The bytes recipe: its text, its windows, its transformer, its contenders and what a decision is worth."""

import io
import json
import math
import multiprocessing
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch
from helpers_loop import run_job, tiny_job
from torch import nn
from torch.export import Dim, export

from trainer.checks import check_loss, check_model
from trainer.recipe import Recipe, load_recipe
from trainer.recipes import bytes_source
from trainer.recipes.bytes_data import COLUMNS, STRIDE, BytesSplit, T, load_split, place_of, split_of, windows_at
from trainer.recipes.bytes_model import BYTES, WIDTH, fit_followers
from trainer.recipes.bytes_source import COMMENT, STRING, Corpus, load_corpus, open_spans, prepared_folder, source_files
from trainer.recipes.bytes_text import PUT_IN_ABOVE, RULE, recipe
from validation.errors import DataError


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library of this interpreter, prepared once for this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEATRIAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def train() -> BytesSplit:
    return load_split("train")


@pytest.fixture(scope="module")
def judge() -> BytesSplit:
    return load_split("judge")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library of three files, with a cache of its own; any size is enough."""
    for path in ("b.py", "a/c.py", "a/test/d.py", "_sysconfigdata_x.py", "encodings/e.py"):
        (tmp_path / "lib" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / path).write_text(f"# {path}\n" + "value = 'text'\n" * 40)
    monkeypatch.setattr(bytes_source, "LEAST_BYTES", 1)
    monkeypatch.setattr(bytes_source, "library_folder", lambda: tmp_path / "lib")
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "lib"


def seeded_model() -> nn.Module:
    torch.manual_seed(0)
    return recipe.model().eval()


def file_of(corpus: Corpus, place: int) -> int:
    return int(np.searchsorted(corpus.starts, place, side="right")) - 1


def test_shipped_name_loads_and_passes_every_check() -> None:
    """`bytes` is a complete recipe."""
    assert load_recipe("bytes") is recipe
    assert isinstance(recipe, Recipe)


def test_only_typed_files_are_read_in_order(library: Path) -> None:
    """Tests, generated tables and build settings are left out; the rest is sorted by path."""
    corpus = load_corpus()

    assert corpus.paths == source_files(library) == ("a/c.py", "b.py")
    assert bytes(corpus.text) == (library / "a/c.py").read_bytes() + (library / "b.py").read_bytes()


def test_library_without_sources_is_refused(tmp_path: Path) -> None:
    """An interpreter that came without source text is told so."""
    with pytest.raises(DataError, match="Use a regular CPython"):
        source_files(tmp_path)


def text_in_child(_number: int) -> bytes:
    return load_corpus().text.tobytes()


def test_every_process_gets_the_same_bytes(library: Path) -> None:
    """Processes that start together on an empty cache all get the whole text, prepared once."""
    with multiprocessing.get_context("fork").Pool(3) as pool:
        seen = pool.map(text_in_child, range(3))
    folder = prepared_folder(library)

    assert seen == [load_corpus().text.tobytes()] * 3
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


@pytest.mark.parametrize("name", ["text.npy", "inside.npy", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_cache_says_what_to_delete(name: str, damage: str, library: Path) -> None:
    """A prepared file that lost its end or a bit is refused, and the message names the folder to delete."""
    path = prepared_folder(library) / name
    body = bytearray(path.read_bytes())
    body[-3] ^= 1
    path.write_bytes(body if damage == "flipped" else body[:-3])

    with pytest.raises(DataError, match="Delete that folder"):
        load_corpus()


def test_changed_library_is_prepared_anew(library: Path) -> None:
    """Another text has another key: what was prepared before is not read."""
    before = prepared_folder(library)
    (library / "b.py").write_text("other = 1\n")

    assert prepared_folder(library) != before


@pytest.mark.parametrize("path", ["argparse.py", "tokenize.py", "re/_parser.py"])
def test_open_spans_agree_with_the_tokenizer(path: str) -> None:
    """What is open at each byte is what Python's own tokenizer says: from behind the opening sign to the closing one."""
    body = (bytes_source.library_folder() / path).read_bytes()
    lines = np.cumsum([0, *(len(line) for line in body.splitlines(keepends=True))])
    expected = np.zeros(len(body), np.uint8)
    for token in tokenize.tokenize(io.BytesIO(body).readline):
        start, end = (int(lines[max(row, 1) - 1]) + column for row, column in (token.start, token.end))
        if token.type == tokenize.STRING:
            prefix = len(token.string) - len(token.string.lstrip("rRbBfFuU"))
            expected[start + prefix + 1 : end] = STRING
        elif token.type == tokenize.COMMENT:
            expected[start + 1 : end + 1] = COMMENT

    np.testing.assert_array_equal(open_spans(body), expected)


def test_two_loads_give_the_same_bytes(train: BytesSplit) -> None:
    """Ids, inputs and labels of two loads are equal bit by bit."""
    again, rows = load_split("train"), np.array([3, 1, 4, 1, 5])

    assert again.sample_ids.tobytes() == train.sample_ids.tobytes()
    assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(again.batch(rows), train.batch(rows), strict=True))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_batch_is_bytes_and_their_followers(count: int, train: BytesSplit) -> None:
    """Inputs and labels are the same window, one byte apart; any number of rows, none included."""
    batch = train.batch(np.arange(count))

    assert batch.inputs.shape == batch.labels.shape == (count, T)
    assert (batch.inputs.dtype, batch.labels.dtype, batch.weights.tolist()) == (torch.int64, torch.int64, [1.0] * count)
    assert torch.equal(batch.inputs[:, 1:], batch.labels[:, :-1])


def test_no_judged_window_shares_a_file_with_training(train: BytesSplit, judge: BytesSplit) -> None:
    """Each window lies in one file, each file in one split, and windows of a split do not overlap."""
    corpus = load_corpus()
    files = {}
    for split, data in (("train", train), ("judge", judge)):
        spans = [(file_of(corpus, place), file_of(corpus, place + T)) for place in data.sample_ids.tolist()]
        files[split] = {first for first, _ in spans}
        assert all(first == last for first, last in spans)
        assert (np.diff(data.sample_ids) > T).all()
        assert {split_of(corpus.paths[file]) for file in files[split]} == {split}
        assert STRIDE[split] > T

    assert not files["train"] & files["judge"]


def test_frame_has_what_the_recipe_names_and_nothing_from_later(judge: BytesSplit) -> None:
    """The contract's columns are the model's very inputs and keep their limits; of what is typed later only the label is there."""
    frame, contract, batch = judge.frame, recipe.contract, judge.batch(np.arange(len(judge)))

    assert {*contract.columns, *recipe.slices, recipe.cluster, contract.label, contract.event_time} == set(frame.columns)
    np.testing.assert_array_equal(frame[list(COLUMNS)].to_numpy(), batch.inputs.numpy())
    np.testing.assert_array_equal(frame["next_byte"], batch.labels[:, -1])
    assert all(frame[name].between(column.minimum, column.maximum).all() for name, column in contract.columns.items())
    assert frame[[*recipe.slices, recipe.cluster]].map(lambda value: isinstance(value, str)).all().all()
    assert frame["typed"].between(*contract.period["judge"], inclusive="left").all()


def test_splits_are_large_enough(train: BytesSplit, judge: BytesSplit) -> None:
    """Both splits of this interpreter's library have the contract's rows, and each slice of the place in a line can be judged."""
    assert [len(data) >= recipe.contract.min_rows[name] for name, data in (("train", train), ("judge", judge))] == [True, True]
    assert (judge.frame["place"].value_counts() >= 300).all()


@pytest.mark.parametrize(
    ("seen", "inside", "place"),
    [
        (b"x = 1\n", 0, "indent"),
        (b"x:\n    ", 0, "indent"),
        (b"x = ", 0, "between words"),
        (b"x = val", 0, "word"),
        (b"x = 'a", STRING, "string"),
        (b"# a", COMMENT, "comment"),
    ],
    ids=["line start", "indent", "after a blank", "word", "string", "comment"],
)
def test_place_is_told_by_what_was_typed(seen: bytes, inside: int, place: str) -> None:
    """The slice follows from the bytes before and what they left open."""
    window = np.frombuffer(seen.rjust(T, b"y"), np.uint8)[None]
    column = np.array([len(seen) - seen.rfind(b"\n") - 1])

    assert place_of(window, np.array([inside], np.uint8), column).tolist() == [place]


@pytest.mark.parametrize("changed", [0, 17, T - 1])
def test_no_byte_sees_a_later_one(changed: int, judge: BytesSplit) -> None:
    """Another byte at j changes nothing that is predicted before j, and everything from j on."""
    model, inputs = seeded_model(), judge.batch(np.arange(4)).inputs
    other = inputs.clone()
    other[:, changed] = (other[:, changed] + 1) % BYTES
    before, after = model(inputs), model(other)

    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.isclose(before[:, changed:], after[:, changed:]).all(dim=2).any()


def test_embedding_and_output_are_one_parameter() -> None:
    """One matrix, used twice: the row of a byte that was not seen moves that byte's logits alone, the row of one that was, all of them."""
    model, inputs = seeded_model(), torch.full((1, T), ord("a"))
    table = dict(model.named_parameters())["embedding.weight"]
    changed = {}
    for byte in (ord("a"), ord("b")):
        before = model(inputs)
        with torch.no_grad():
            table[byte, 0] += 0.1
        changed[byte] = (model(inputs) != before).any(dim=1)[0].nonzero().flatten().tolist()

    assert changed[ord("b")] == [ord("b")]
    assert len(changed[ord("a")]) > BYTES // 2
    assert table.shape == (BYTES, WIDTH)


def test_recipe_passes_the_checks_of_a_run(train: BytesSplit) -> None:
    """The loss is a sum in nats per byte, doubles with the batch, and nothing is random with dropout modules off."""
    model, batch = seeded_model(), train.batch(np.arange(8))
    check_model(recipe, model, recipe.optimizer(model))
    total, weight = recipe.loss(model, batch)

    assert not check_loss(recipe, model, batch, dropout=False).has_unused
    assert weight.item() == 8 * T
    assert (total / weight).item() == pytest.approx(math.log(BYTES), rel=0.1)  # an untrained model knows next to nothing


def test_double_precision_agrees(train: BytesSplit) -> None:
    """The model and its gradient work in float64, and float32 differs by rounding."""
    single, double, batch = seeded_model(), seeded_model().double(), train.batch(np.arange(8))
    totals = [recipe.loss(model, batch)[0] for model in (single, double)]
    for total in totals:
        total.backward()

    assert totals[1].dtype == torch.float64
    for first, second in zip(single.parameters(), double.parameters(), strict=True):
        assert first.grad is not None
        assert second.grad is not None
        torch.testing.assert_close(first.grad.double(), second.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("contender", ["candidate", "baseline"])
@pytest.mark.parametrize("strict", [True, False])
def test_serving_modules_export_with_any_batch(contender: str, strict: bool, judge: BytesSplit) -> None:
    """Candidate and baseline export with a dynamic batch and give the same probabilities as before, for 1, 2 and 100 rows."""
    module = (recipe.scorer(seeded_model()) if contender == "candidate" else recipe.baseline(judge)).eval()
    inputs = judge.batch(np.arange(100)).inputs
    exported = export(module, (inputs[:2],), dynamic_shapes=({0: Dim("batch")},), strict=strict).module()

    for count in (1, 2, 100):
        scores = exported(inputs[:count])
        torch.testing.assert_close(scores, module(inputs[:count]))
        torch.testing.assert_close(scores.sum(dim=1), torch.ones(count))
        assert scores.shape == (count, BYTES)


def test_scorer_is_the_model_at_the_last_byte(judge: BytesSplit) -> None:
    """Serving reads the same logits that training fits."""
    model, inputs = seeded_model(), judge.batch(np.arange(5)).inputs

    torch.testing.assert_close(recipe.scorer(model)(inputs), torch.softmax(model(inputs)[:, -1], dim=1))


def test_followers_are_smoothed_counts() -> None:
    """A pair's followers lean on those of its last byte; a pair never seen goes by its last byte."""
    table = fit_followers(np.array([[1, 2, 3], [1, 2, 3], [1, 2, 4], [9, 2, 5]]))
    seen, unseen = table(torch.tensor([[1, 2], [7, 2]]))

    assert seen.argmax() == 3
    assert (seen[3] > unseen[3], seen[5] < unseen[5]) == (True, True)
    torch.testing.assert_close(torch.stack((seen.sum(), unseen.sum())), torch.ones(2))


def test_few_steps_learn(train: BytesSplit) -> None:
    """Thirty updates bring the loss on windows not trained on below that of each byte's share of the text."""
    model = seeded_model().train()
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer, 60)
    for step in range(30):
        total, weight = recipe.loss(model, train.batch(np.arange(32 * step, 32 * (step + 1))))
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        schedule.step()
    held_out = train.batch(np.arange(30_000, 30_200))
    with torch.no_grad():
        total, weight = recipe.loss(model.eval(), held_out)
    shares = np.bincount(held_out.labels.flatten()) / held_out.labels.numel()

    assert (total / weight).item() < -np.sum(shares * np.log(np.maximum(shares, 1e-9)))


def test_one_and_two_ranks_end_in_the_same_state(tmp_path: Path) -> None:
    """Four updates, dropout and clipping on: the same digest of weights and optimizer, and the same samples."""
    runs = [run_job(tiny_job(tmp_path / f"w{size}", recipe="bytes", world_size=size, steps=4)) for size in (1, 2)]

    assert [run.steps for run in runs] == [4, 4]
    assert len({digest for run in runs for digest in run.state_sha256_by_rank}) == 1


def surely(byte: str, share: float) -> npt.NDArray[np.float64]:
    scores = np.full((1, BYTES), (1 - share) / (BYTES - 1))
    scores[0, ord(byte)] = share
    return scores


@pytest.mark.parametrize(
    ("guess", "share", "utility", "hit"),
    [
        ("e", 0.9, 1.0, 1.0),
        ("f", 0.9, -2.0, 0.0),
        ("e", 0.6, 0.0, 1.0),
        ("e", PUT_IN_ABOVE, 1.0, 1.0),
        ("e", math.nextafter(PUT_IN_ABOVE, 0), 0.0, 1.0),
        ("e", math.nan, math.nan, 0.0),
    ],
    ids=["right", "wrong", "waits", "at the threshold", "an ulp below", "NaN"],
)
def test_worth_of_a_byte_put_in(guess: str, share: float, utility: float, hit: float) -> None:
    """A sure byte saves a keystroke or wastes two; an unsure one waits; NaN stays NaN."""
    worth = recipe.outcomes(pd.DataFrame({"next_byte": [ord("e")]}), surely(guess, share))

    np.testing.assert_allclose([worth.utility[0], worth.confidence[0], worth.hit[0]], [utility, share, hit])


@pytest.mark.parametrize(("share", "expected"), [(0.9, 1.0), (math.nan, math.nan)])
def test_quality_is_the_share_of_right_guesses(share: float, expected: float) -> None:
    """A NaN score has no quality, and NaN passes no gate."""
    frame = pd.DataFrame({"next_byte": [ord("e")]})

    assert recipe.quality(frame, surely("e", share)) == pytest.approx(expected, nan_ok=True)
    assert math.isnan(recipe.quality(frame[:0], surely("e", 0.9)[:0]))


@pytest.mark.parametrize(("ending", "guess"), [*((ending, guess) for ending, (guess, _) in RULE.items()), ("a ", "e"), ("th", "e")])
def test_rule_follows_the_last_two_bytes(ending: str, guess: str) -> None:
    """Each row of the table and the two ways past it: probabilities whose largest is the expected byte."""
    before, last = (ord(sign) for sign in ending.rjust(2, "x"))
    scores = recipe.rule(pd.DataFrame({"byte_02": [before], "byte_01": [last]}))

    assert chr(scores.argmax()) == guess
    assert scores.sum() == pytest.approx(1.0)
    assert (scores > 0).all()


def test_baseline_beats_the_rule(train: BytesSplit, judge: BytesSplit) -> None:
    """The table of followers guesses more bytes of files it has not seen than the rule does, with honest probabilities."""
    with torch.no_grad():
        scores = recipe.baseline(train)(judge.batch(np.arange(len(judge))).inputs).double().numpy()
    rule = recipe.rule(judge.frame)
    worth = recipe.outcomes(judge.frame, scores)

    assert recipe.quality(judge.frame, scores) > 0.45 > recipe.quality(judge.frame, rule) > 0.2
    assert worth.utility.mean() > recipe.outcomes(judge.frame, rule).utility.mean() > 0
    assert worth.confidence.mean() == pytest.approx(worth.hit.mean(), abs=0.02)


def test_windows_are_cut_where_asked() -> None:
    """Each place gives its T bytes and the next."""
    text = np.arange(200, dtype=np.uint8)

    assert windows_at(text, np.array([5, 0])).tolist() == [list(range(5, 6 + T)), list(range(T + 1))]


def test_facts_name_every_file() -> None:
    """The prepared text says which file each byte is from."""
    corpus = load_corpus()
    facts = json.loads((prepared_folder(bytes_source.library_folder()) / "facts.json").read_text())

    assert sum(facts["sizes"]) == len(corpus.text) == corpus.starts[-1]
    assert bytes(corpus.text[: corpus.starts[1]]) == (bytes_source.library_folder() / corpus.paths[0]).read_bytes()
