import json
import re
from collections.abc import Iterator

import httpx
import pytest
from support.page_service import Shown, entry, shown

from serving.status import page
from serving.status.document import Status

pytestmark = pytest.mark.http
LIMIT_BYTES = 150_000
LLAMA = "llama"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with shown(Shown([LLAMA], [entry(LLAMA, 0)])) as service:
        yield service.address


def test_the_page_is_smaller_than_150_kb(address: str) -> None:
    sizes = {path: len(httpx.get(address + path).content) for path in page.PATHS}
    print(f"page: {sum(sizes.values())} bytes: {sizes}")
    assert sum(sizes.values()) < LIMIT_BYTES


def test_whatever_the_page_names_is_served_here(address: str) -> None:
    html = httpx.get(f"{address}/").text
    named = re.findall(r'(?:src|href)="([^"#]+)"', html)
    scripts = [path for path in page.PATHS if path.endswith(".js")]
    for path in scripts:
        named += [f"page/{one}" for one in re.findall(r'from "\./([^"]+)"', httpx.get(address + path).text)]
    assert {f"/{one}" for one in named} == {*page.PATHS, "/status.json"} - {"/"}


@pytest.mark.parametrize("path", page.PATHS)
def test_nothing_but_this_service_may_be_run_loaded_or_asked(address: str, path: str) -> None:
    answer = httpx.get(address + path)
    policy = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{what}-src"] for what in ("script", "style", "connect", "img")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    elsewhere = re.findall(r"https?://[^\s\"'`]+", answer.text)
    assert set(elsewhere) <= {"http://www.w3.org/2000/svg"}  # a name, not an address


@pytest.mark.parametrize("path", page.PATHS)
def test_what_a_browser_has_is_not_sent_again(address: str, path: str) -> None:
    first = httpx.get(address + path)
    again = httpx.get(address + path, headers={"if-none-match": f'W/"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert httpx.get(address + path, headers={"if-none-match": '"old"'}).content == first.content


def test_the_page_takes_get_and_head_alone(address: str) -> None:
    head = httpx.head(f"{address}/")
    assert (head.status_code, head.content) == (200, b"")
    posted = httpx.post(f"{address}/", json={})
    assert (posted.status_code, posted.headers["allow"]) == (405, "GET, HEAD")


def test_no_script_makes_markup_out_of_text(address: str) -> None:
    for path in (path for path in page.PATHS if path.endswith(".js")):
        source = httpx.get(address + path).text
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", source
        )


def test_the_router_answers_with_the_document() -> None:
    service = Shown([LLAMA, "qwen"], [entry(LLAMA, 0)])
    with shown(service):
        answer = httpx.get(f"{service.address}/status.json")
        assert answer.status_code == 200
        assert (answer.headers["content-type"], answer.headers["cache-control"]) == (
            "application/json",
            "no-store",
        )
        assert Status.model_validate_json(answer.content) == service.status()
        assert [model["name"] for model in answer.json()["models"]] == [LLAMA, "qwen"]
        described = httpx.get(f"{service.address}/openapi.json").json()
        assert "Status" in json.dumps(described["paths"]["/status.json"])
        refused = httpx.post(f"{service.address}/status.json")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
