"""What `serving batch run` ends with where no service is needed."""

from pathlib import Path

import pytest

from serving.batches import corpus, lines
from serving.cli.main import main

pytestmark = pytest.mark.unit
BAD = '{"custom_id": "a", "url": "/v1/completions", "body": {}}'


@pytest.mark.parametrize(("statuses", "status"), [([], 1), ([200], 0), ([400], 1), ([400, 200], 0)])
def test_a_run_whose_lines_have_all_failed_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statuses: list[int], status: int
) -> None:
    names = [f"r{at}" for at in range(len(statuses))]
    texts = [
        f'{{"custom_id": "{name}", "method": "POST", "url": "/v1/completions", "body": {{}}}}'
        for name in names
    ]
    (tmp_path / "in.jsonl").write_text("\n".join([*texts, BAD]))
    results = corpus.Results(tmp_path / "out.jsonl")
    results.add(
        [
            lines.answered(corpus.NAME, at, name, answered, "", {})
            for at, (name, answered) in enumerate(zip(names, statuses, strict=True), 1)
        ]
    )
    results.close()
    files = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["batch", "run", *files, "--model", "llama"]) == status
    said = capsys.readouterr()
    assert f"all {len(texts) + 1} lines have a result" in said.out
    assert ("no line was answered" in said.err) == bool(status)


def test_a_run_with_another_model_than_an_earlier_one_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / "in.jsonl").write_text(
        "\n".join(
            f'{{"custom_id": "{name}", "method": "POST", "url": "/v1/completions", "body": {{}}}}'
            for name in "abc"
        )
    )
    results = corpus.Results(out)
    for name, answer in (("a", {"model": "small"}), ("b", {"model": "large"}), ("c", "no object")):
        results.add([lines.answered(corpus.NAME, 1, name, 200, "", answer)])
    results.close()
    for model, other in (("large", "1 of 'small'"), ("small", "1 of 'large'")):
        assert main(["batch", "run", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", model]) == 0
        said = capsys.readouterr().err
        assert f"has answers of another model, {other}; lines without one are asked of {model!r}" in said
