import json
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.doctor_facts import LLAMA, healthy

from serving.cli.doctor import show
from serving.cli.main import main
from serving.doctor.examination import examine

pytestmark = pytest.mark.http


@pytest.fixture(autouse=True)
def without_kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_without_a_cluster_the_command_fails_and_nothing_is_called_ok(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", str(LLAMA), "--json", "--address", "127.0.0.1:1"]) == 1
    findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert {finding["verdict"] for finding in findings} == {"failed", "not looked at"}
    (wrong,) = [finding for finding in findings if finding["verdict"] == "failed"]
    assert (wrong["stage"], wrong["check"]) == ("cluster", "ray")
    assert "no Ray cluster answers at '127.0.0.1:1'" in wrong["said"]


def test_a_head_that_stands_still_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        assert main(["doctor", str(LLAMA), "--json", "--limit", "0.1", "--address", address]) == 1
    printed = capsys.readouterr()
    findings: list[dict[str, Any]] = json.loads(printed.out)
    assert {finding["verdict"] for finding in findings} == {"failed", "not looked at"}
    (wrong,) = [finding for finding in findings if finding["verdict"] == "failed"]
    assert wrong["check"] == "ray"
    assert f"the cluster at '{address}' no longer answers: reading the control store took" in wrong["said"]
    assert "reading the control store" in printed.err


def test_a_file_that_cannot_be_read_is_another_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none.yaml")
    assert main(["doctor", missing]) == 2
    printed = capsys.readouterr()
    assert "No such file" in printed.err
    assert not printed.out
    assert main(["doctor", missing, "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["stage"], finding["verdict"]) == ("file", "failed")
    assert "No such file" in finding["said"]
    assert main(["doctor", "x" * 300, "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)
    assert "File name too long" in finding["said"]


def test_the_table_has_a_row_for_each_check_and_counts_them() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        show(console, examine(healthy()))
    text = capture.get()
    assert "TPU_NAME and TPU_WORKER_ID on 2 hosts" in text
    assert text.splitlines()[-1] == "23 ok, 12 not yet"
