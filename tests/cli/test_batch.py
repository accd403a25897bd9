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
