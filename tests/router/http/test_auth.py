import os
from pathlib import Path

import pytest

from serving.errors import ConfigError, UnauthorizedError
from serving.metrics.table import NO_KEY
from serving.router.http.auth import ANYONE, KeyFile, KeyRing, new, parse

pytestmark = pytest.mark.unit


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


def test_a_new_key_is_let_in_by_its_line_and_is_not_in_it() -> None:
    key, line = new("batch", requests_per_minute=60, weight=2, concurrency=None)
    ring = parse(line, "file")
    assert key not in line
    holder = ring.holder(bearer(key))
    assert (holder.name, holder.requests_per_minute, holder.weight) == ("batch", 60, 2)
    assert holder.concurrency is None
    assert ring.holder([(b"x-api-key", key.encode())]) is holder  # as Anthropic's clients send it
    assert new("batch")[0] != key


def test_a_key_is_known_by_how_its_hash_begins_and_not_by_its_name() -> None:
    _, line = new("Jane Doe")
    (key,) = parse(line, "file").keys
    assert key.id == key.sha256[:12]
    assert ANYONE.id == NO_KEY


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic c2s=")],
        bearer("sk-wrong"),
        [(b"x-api-key", b"\xff\x00")],
    ],
)
def test_without_one_of_the_keys_nobody_is_let_in(headers: list[tuple[bytes, bytes]]) -> None:
    ring = parse(new("batch")[1], "file")
    with pytest.raises(UnauthorizedError) as refusal:
        ring.holder(headers)
    assert "sk-wrong" not in refusal.value.message


def test_a_key_whose_hash_only_begins_like_another_is_not_let_in() -> None:
    key, line = new("batch")
    hexed = parse(line, "file").keys[0].sha256
    with pytest.raises(UnauthorizedError):
        parse(line.replace(hexed, hexed[:-1] + ("0" if hexed[-1] != "0" else "1")), "file").holder(
            bearer(key)
        )


def test_a_service_without_keys_lets_anyone_in_and_an_empty_list_nobody() -> None:
    assert KeyRing().holder([]) is ANYONE
    with pytest.raises(UnauthorizedError):
        parse("[]", "file").holder([])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[{name: a", "file, line 1: not YAML"),
        ("- {name: a, sha256: 2026-02-30}", "file: not YAML"),
        ("- {name: a, requests_per_minute: !!float sk-secret}", "file: not YAML"),
        ("- {name: a, sha256: !!bool sk-secret}", "file: not YAML"),
        pytest.param("[\n" * 3000, "file: not YAML", id="lists without end"),
        ("", "file is empty; write `[]` to let nobody in"),
        ("# only a comment", "file is empty"),
        ("just words", "the file: Input should be a valid tuple"),
        ("- {name: a}", "0.sha256: Field required"),
        ("- {name: a, sha256: sk-secret}", "0.sha256: String should match pattern"),
        pytest.param(
            new("a", weight=1)[1].replace("weight", "wieght"), "0.wieght: Extra inputs", id="an unknown field"
        ),
        pytest.param(new("a")[1] + "\n" + new("a")[1], "two keys have the name of 'a'", id="a name twice"),
        (f"- {{name: a, sha256: {'a' * 64}}}\n- {{name: b, sha256: {'a' * 64}}}", "the sha256 of 'a'"),
    ],
)
def test_a_file_that_can_not_be_read_says_where_and_repeats_no_secret(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(text, "file")
    assert says in refusal.value.message
    assert "sk-secret" not in refusal.value.message


def test_a_limit_that_makes_no_sense_makes_no_key() -> None:
    with pytest.raises(ConfigError, match="requests_per_minute: Input should be greater than 0"):
        new("batch", requests_per_minute=0)


def test_the_file_is_read_anew_when_it_changes_and_only_then(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    (first, first_line), (second, second_line) = new("first"), new("second")
    path.write_text(first_line)
    keys = KeyFile(path)
    assert not keys.refresh()
    path.write_text(first_line + "\n" + second_line)
    assert keys.refresh()
    assert {keys.ring.holder(bearer(key)).name for key in (first, second)} == {"first", "second"}
    assert not keys.refresh()


def test_a_secret_that_kubernetes_swaps_by_a_symbolic_link_is_seen(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(new(name)[1])
        os.utime(tmp_path / name, (0, 0))
    path = tmp_path / "keys.yaml"
    path.symlink_to("one")
    keys = KeyFile(path)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(path)
    assert keys.refresh()
    assert [key.name for key in keys.ring.keys] == ["two"]


def test_a_file_that_breaks_leaves_the_keys_as_they_were_and_is_told_of_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key, line = new("batch")
    path.write_text(line)
    keys = KeyFile(path)
    for broken in (lambda: path.write_text("[{"), path.unlink):
        broken()
        with pytest.raises(ConfigError, match=str(path)):
            keys.refresh()
        assert not keys.refresh()
        assert keys.ring.holder(bearer(key)).name == "batch"
    path.write_text(line)
    assert keys.refresh()


def test_a_file_that_was_read_ahead_is_in_force_with_the_next_refresh_and_not_read_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(new("first")[1])
    keys = KeyFile(path)
    assert not keys.behind
    for text, names in ((new("second")[1], ["second"]), ("[{", ["second"])):
        path.write_text(text)
        assert keys.behind
        before = keys.ring
        keys.read_ahead()
        assert keys.ring is before
        assert not keys.behind
        found, keys._parse = keys._parse, None  # type: ignore[method-assign,assignment]  # nothing is parsed twice
        if text.startswith("- "):
            assert keys.refresh()
        else:
            with pytest.raises(ConfigError, match="not YAML"):
                keys.refresh()
            assert not keys.refresh()
        keys._parse = found  # type: ignore[method-assign]
        assert [key.name for key in keys.ring.keys] == names
    path.unlink()
    assert not keys.behind
    keys.read_ahead()


def test_an_emptied_file_revokes_nothing_and_an_empty_list_everything(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key, line = new("batch")
    path.write_text(line)
    keys = KeyFile(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        keys.refresh()
    assert keys.ring.holder(bearer(key)).name == "batch"
    path.write_text("[]")
    assert keys.refresh()
    with pytest.raises(UnauthorizedError):
        keys.ring.holder(bearer(key))


def test_a_read_that_failed_is_tried_again_though_the_file_did_not_change(tmp_path: Path) -> None:
    """Of a mount that hiccups once: the keys that it revoked would stay for ever."""
    path = tmp_path / "keys.yaml"
    (revoked, old), (_, line) = new("revoked"), new("batch")
    path.write_text(old)
    keys = KeyFile(path)
    path.write_text(line)
    read_bytes, failures = Path.read_bytes, [OSError(5, "Input/output error")]

    class Mounted(type(path)):  # type: ignore[misc]
        def read_bytes(self) -> bytes:
            if failures:
                raise failures.pop()
            return read_bytes(self)

    keys._path = Mounted(path)
    with pytest.raises(ConfigError, match="Input/output error"):
        keys.refresh()
    assert keys.refresh()
    with pytest.raises(UnauthorizedError):
        keys.ring.holder(bearer(revoked))


def test_a_service_does_not_start_without_the_keys_it_was_told_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router.keys_file .*none.yaml: No such file or directory"):
        KeyFile(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="both set"):
        KeyFile(tmp_path / "none.yaml", new("a")[1])


def test_keys_may_come_as_a_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    key, line = new("batch")
    monkeypatch.setenv("SERVING_KEYS", line)
    keys = KeyFile.of(None)
    assert keys.ring.holder(bearer(key)).name == "batch"
    assert not keys.refresh()
    monkeypatch.delenv("SERVING_KEYS")
    assert not KeyFile.of(None).ring.required


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "weight", "concurrency"])
@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1.0e+300", "0", "-1"])
def test_a_limit_that_is_no_amount_is_refused_and_the_keys_stay(
    tmp_path: Path, limit: str, value: str
) -> None:
    """Every header of an endless limit would raise."""
    path = tmp_path / "keys.yaml"
    path.write_text(new("batch")[1])
    keys = KeyFile(path)
    before = keys.ring
    line = new("batch")[1].replace("}", f", {limit}: {value}}}")
    with pytest.raises(ConfigError, match=limit):
        parse(line, "keys.yaml")
    path.write_text(line)
    with pytest.raises(ConfigError, match=limit):
        keys.refresh()
    assert keys.ring is before
