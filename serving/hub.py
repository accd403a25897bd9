"""The one door to Hugging Face's site. The variables are Hugging Face's own: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE."""

import os
from typing import Any

import httpx

from serving.planning.checkpoints import unknown

_FETCH_S = 5.0  # a plan answers or says why not while someone watches


def config_of(model: str) -> dict[str, Any]:
    """A checkpoint's config.json from the hub, within five seconds; raises PlanError with what to do."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise unknown(model, "HF_HUB_OFFLINE=1 forbids to ask Hugging Face")
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            f"{hub}/{model}/resolve/main/config.json",
            headers=headers,
            follow_redirects=True,
            timeout=_FETCH_S,
        )
        answer.raise_for_status()
        config = answer.json()
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        why = "is gated: set HF_TOKEN" if status in (401, 403) else f"answers {status}"
        raise unknown(model, f"Hugging Face {why}") from None
    except (httpx.HTTPError, ValueError) as error:
        raise unknown(model, f"Hugging Face can't be asked ({type(error).__name__})") from None
    if not isinstance(config, dict):
        raise unknown(model, "its config.json is no config")
    return config
