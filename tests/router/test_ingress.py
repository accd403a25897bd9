import pytest

from serving.router import ingress
from serving.slices import placement

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("host", "warns"),
    [
        ("0.0.0.0", True),
        ("10.0.0.7", True),
        ("127.0.0.1", False),
        ("127.77.0.1", False),
        ("localhost", False),
    ],
)
def test_a_service_that_the_network_reaches_without_a_key_says_so(
    host: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "http_host", lambda: host)
    ingress._warn_if_public()
    assert [host in record.message and "serving keys" in record.message for record in caplog.records] == [
        True
    ] * warns
