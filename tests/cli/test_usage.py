"""`serving usage` on a store that routers have told."""

import asyncio
import csv
from pathlib import Path

import pytest

from serving.cli.main import main
from serving.database.database import Database
from serving.metering.ledger import Flush, Ledger

pytestmark = pytest.mark.unit
Out = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> str:
    async def fill() -> None:
        database = await Database.open(str(tmp_path / "store.sqlite"))
        rows = [
            ["aa", "2026-11-01", "llama", "spot", 2, 20, 5, 10, 1.25, 0.5],
            ["aa", "2026-11-02", "llama", "spot", 1, 10, 0, 5, 0.75, 0.25],
            ["aa", "2026-11-02", "qwen", "spot", 1, 1, 0, 1, 0.0, 0.0],
            ["bb", "2026-10-31", "llama", "spot", 7, 7, 0, 7, 7.0, 7.0],
        ]
        await Ledger(database).flush(Flush("router", 1, "2026-11-02", rows), 0.0)
        await database.close()

    asyncio.run(fill())
    return str(tmp_path)


def test_usage_of_all_keys_is_a_table_or_csv(store: str, capsys: Out) -> None:
    days = ["--start", "2026-11-01", "--end", "2026-11-30"]
    assert main(["usage", "--store", store, "--by", "key,model", "--csv", *days]) == 0
    head, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert head[:4] == ["key", "model", "requests", "prompt_tokens"]
    assert rows == [
        ["aa", "llama", "3", "30", "5", "15", "2.0", "0.75"],
        ["aa", "qwen", "1", "1", "0", "1", "0.0", "0.0"],
    ]
    assert (
        main(["usage", "--store", store, "--by", "day", "--start", "2026-10-01", "--end", "2026-11-01"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["2026-10-31", "7", "7"], ["2026-11-01", "2", "20"]]
    assert lines[1].split()[-1] == "7.0000"
    assert main(["usage", "--store", store]) == 0


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path, capsys: Out) -> None:
    assert main(["usage", "--store", str(tmp_path / "none")]) == 1
    assert "store.sqlite is not there" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_columns_and_days_that_are_none(store: str, capsys: Out) -> None:
    assert main(["usage", "--store", store, "--start", "monday"]) == 1
    assert "start has to be a day" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["usage", "--store", store, "--by", "key,colour"])
    assert "no column 'colour'; there are key, model, pool, day" in capsys.readouterr().err
