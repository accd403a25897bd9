"""The one door to Hugging Face's site. The variables are Hugging Face's own: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE."""

import os
from typing import Any

import httpx

from serving.planning.checkpoints import QUANTIZATION_FILE, unknown, with_quantization

_FETCH_S = 5.0  # a plan answers or says why not while someone watches


def config_of(model: str) -> dict[str, Any]:
    """A checkpoint's config.json from the hub, within five seconds; raises PlanError with what to do."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise unknown(model, "HF_HUB_OFFLINE=1 forbids to ask Hugging Face")
    config = _read(model, "config.json")
    return with_quantization(config, lambda: _read(model, QUANTIZATION_FILE, needed=False) or None)


def _read(model: str, name: str, *, needed: bool = True) -> dict[str, Any]:
    """A JSON file of a checkpoint; empty where it is not there and not needed."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            f"{hub}/{model}/resolve/main/{name}",
            headers=headers,
            follow_redirects=True,
            timeout=_FETCH_S,
        )
        if answer.status_code == httpx.codes.NOT_FOUND and not needed:
            return {}
        answer.raise_for_status()
        fields = answer.json()
    except httpx.HTTPStatusError as error:
        raise unknown(model, _refused(error.response)) from None
    except (httpx.HTTPError, ValueError, RecursionError) as error:
        raise unknown(model, f"Hugging Face can't be asked ({type(error).__name__})") from None
    if not isinstance(fields, dict):
        raise unknown(model, f"its {name} is no config")
    return fields


def _refused(answer: httpx.Response) -> str:
    """Why the site gives no config. It answers 401 for a name that does not exist too, and tells in a header which it is."""
    match answer.headers.get("X-Error-Code"):
        case "RepoNotFound":
            return "Hugging Face has none of this name that may be read; see how it is spelt, or set HF_TOKEN for a private one"
        case "GatedRepo":
            return "it is gated at Hugging Face; accept its terms there, and set HF_TOKEN to a token of that account"
        case "EntryNotFound":
            return "its repository at Hugging Face has none"
    if answer.headers.get("X-Error-Message") == "Invalid credentials in Authorization header":
        return "Hugging Face does not know this HF_TOKEN; set a valid one, or none"
    if answer.status_code in (401, 403):
        return "Hugging Face does not show it; see how it is spelt, or set HF_TOKEN"
    return f"Hugging Face answers {answer.status_code}"
