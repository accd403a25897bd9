"""Which lines of a corpus a run has still to ask, and what its file of results keeps."""

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.batches import line

from serving.batches import corpus, lines
from serving.batches.corpus import Corpus, Results
from serving.errors import ConfigError, StorageError

pytestmark = pytest.mark.unit

MODEL = "llama"


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    made = Results(tmp_path / "out.jsonl")
    yield made
    made.close()


def written(folder: Path, *texts: str) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(texts))
    return path


def to_ask(found: Corpus) -> list[tuple[int, str]]:
    return [
        (number, corpus.read(text, MODEL).custom_id)
        for part in found.parts()
        for piece in part
        for number, text in corpus.lines_of(found.path, piece)
    ]


def answer(number: int, custom_id: str, status: int = 200) -> str:
    return lines.answered(corpus.NAME, number, custom_id, status, "", {"choices": []})


def test_a_corpus_has_its_good_lines_with_their_numbers_and_refuses_each_other_line_alone(
    tmp_path: Path, results: Results
) -> None:
    path = written(
        tmp_path,
        line("a", model="of another service"),
        "",
        "{",
        line("b", url="/v1/embeddings"),
        line("a"),
        line("c", url="/v1/models"),
        line("d", stream=True),
        line("c"),
        *(line(f"more{at}") for at in range(100)),
    )
    found = Corpus(path, MODEL, results)
    assert found.total == 107
    assert to_ask(found) == [(1, "a"), (4, "b"), *((9 + at, f"more{at}") for at in range(100))]
    refused = [json.loads(text) for text in found.refused]
    assert [(row["error"]["line"], row["error"]["code"], row["custom_id"]) for row in refused] == [
        (3, "invalid_json_line", None),
        (5, "duplicate_custom_id", None),
        (6, "mismatched_url", "c"),
        (7, "invalid_request", "d"),
        (8, "duplicate_custom_id", None),
    ]


def test_the_model_asked_for_takes_the_place_of_the_line_s(tmp_path: Path, results: Results) -> None:
    found = Corpus(written(tmp_path, line("a", model="of another service")), MODEL, results)
    ((piece,),) = found.parts()
    ((_, text),) = corpus.lines_of(found.path, piece)
    assert corpus.read(text, MODEL).body["model"] == MODEL


def test_a_run_goes_on_where_the_last_one_has_ended(tmp_path: Path) -> None:
    path = written(tmp_path, *(line(f"r{at}") for at in range(50)), "{", line("r3"))
    out = tmp_path / "out.jsonl"
    first = Results(out)
    first.add(Corpus(path, MODEL, first).refused)
    first.add([answer(1, "r0"), answer(31, "r30", status=400)])
    first.close()
    again = Results(out)
    found = Corpus(path, MODEL, again)
    assert (len(again), again.failed, found.refused) == (4, 3, [])
    assert [custom_id for _, custom_id in to_ask(found)] == [
        f"r{at}" for at in range(50) if at not in (0, 30)
    ]
    again.add([answer(number, custom_id) for number, custom_id in to_ask(found)])
    again.close()
    last = Results(out)
    assert Corpus(path, MODEL, last).pieces == []
    assert len(last) == 52
    last.close()


@pytest.mark.parametrize("left", [1, 20, 60])
def test_half_a_result_at_the_end_is_cut_off(tmp_path: Path, left: int) -> None:
    out = tmp_path / "out.jsonl"
    whole = answer(1, "a") + "\n"
    out.write_text(whole + answer(2, "b")[:left])
    results = Results(out)
    results.add([answer(2, "b")])
    results.close()
    assert out.read_text() == whole + answer(2, "b") + "\n"


@pytest.mark.parametrize("text", ["notes of mine", '{"id": 1}\n', "[]\n", '{"a": 1}'])
def test_a_file_that_has_no_results_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    with pytest.raises(ConfigError, match="line 1, is no result of a run"):
        Results(out)
    assert out.read_text() == text


def test_results_of_another_corpus_are_refused(tmp_path: Path, results: Results) -> None:
    results.add([answer(1, "a"), answer(2, "of another")])
    with pytest.raises(
        ConfigError, match=r'has 1 that are of no line of .* the one of custom_id "of another"'
    ):
        Corpus(written(tmp_path, line("a")), MODEL, results)


@pytest.mark.parametrize(
    "later", [[line("a"), line("mended")], [line("new"), line("a"), "{"], [line("a")]], ids=str
)
def test_the_result_of_a_line_that_has_changed_stands_for_no_other_line(
    tmp_path: Path, results: Results, later: list[str]
) -> None:
    """It was counted in the place of one without a result."""
    results.add(Corpus(written(tmp_path, line("a"), "{"), MODEL, results).refused)
    with pytest.raises(ConfigError, match="as it is now, the one of line 2 for example; take them out"):
        Corpus(written(tmp_path, *later), MODEL, results)


def test_a_line_that_was_asked_twice_has_its_first_result(tmp_path: Path, results: Results) -> None:
    refused = Corpus(written(tmp_path, "{"), MODEL, results).refused
    results.add([answer(2, "a"), *refused, answer(2, "a", status=400)])
    results.add([answer(2, "a", status=500), *refused])
    rows = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == ["a", None]
    assert rows[0]["response"]["status_code"] == 200
    assert (len(results), results.failed) == (2, 1)


def test_results_out_of_which_an_editor_took_some_are_read(tmp_path: Path) -> None:
    """It may leave empty lines, and the last one without an end."""
    out = tmp_path / "out.jsonl"
    out.write_text(f"{answer(1, 'a')}\n\n{json.dumps(json.loads(answer(3, 'c')), separators=(',', ':'))}")
    results = Results(out)
    results.add([answer(2, "b")])
    results.close()
    names = [json.loads(text)["custom_id"] for text in out.read_text().splitlines() if text]
    assert names == ["a", "c", "b"]


@pytest.mark.usefixtures("results")
def test_one_run_at_a_time_writes_a_file_of_results(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another run writes"):
        Results(tmp_path / "out.jsonl")


def test_a_full_disk_keeps_what_there_is_and_no_half_of_a_result(tmp_path: Path, results: Results) -> None:
    results.add([answer(1, "a")])
    has = (tmp_path / "out.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(has) + 10, limits[1]))
    try:
        with pytest.raises(StorageError, match="can't be written"):
            results.add([answer(2, "b")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "out.jsonl").read_bytes() == has
    results.add([answer(2, "b")])
    assert len(results) == 2


def test_ten_thousand_lines_are_a_few_hundred_pieces(tmp_path: Path, results: Results) -> None:
    found = Corpus(written(tmp_path, *(line(f"r{at}") for at in range(10_000))), MODEL, results)
    assert [custom_id for _, custom_id in to_ask(found)] == [f"r{at}" for at in range(10_000)]
    assert len(found.parts()) == 625
    assert max(piece.bytes for piece in found.pieces) < 1 << 14


def test_a_line_that_is_too_long_fails_alone(
    tmp_path: Path, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MOST_LINE_BYTES", 1000)
    path = written(tmp_path, line("a"), line("b", content="x" * 5000), line("c"), *[line("d")] * 40)
    found = Corpus(path, MODEL, results)
    assert to_ask(found) == [(1, "a"), (3, "c"), (4, "d")]
    assert json.loads(found.refused[0])["error"]["code"] == "line_too_long"


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_corpus_is_refused(tmp_path: Path, results: Results, text: str) -> None:
    with pytest.raises(ConfigError, match="has no line"):
        Corpus(written(tmp_path, text), MODEL, results)


def test_what_a_later_run_can_not_read_again_is_refused(tmp_path: Path, results: Results) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(ConfigError, match="a file is needed"):
            Results(path)
        with pytest.raises(ConfigError, match="a file is needed"):
            Corpus(path, MODEL, results)
