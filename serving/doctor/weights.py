"""Whether a host can read a model's weights: from Hugging Face's site, from a mounted bucket, or from a bucket by its API."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from serving.errors import ServingError
from serving.gke.storage import WEIGHTS
from serving.planning.checkpoints import folder_of, snapshot

_ASK_S = 5.0
# Both are Google's own: where its client libraries look for the metadata server, and for another store than Google's.
_METADATA = "GCE_METADATA_HOST"
_STORE = "STORAGE_EMULATOR_HOST"


def unreadable(model: str, config_of: Callable[[str], Any]) -> str:
    """Why this host can't read the weights of a model that can be asked for, in words; empty where it can.

    `config_of` asks Hugging Face's site for a config.json, with this host's token.
    """
    if path := model.partition("://")[2]:
        return _unreadable_bucket(*path.partition("/")[::2])
    if model.startswith(("/", ".")):
        return _unreadable_folder(Path(model))
    if folder_of(model) or snapshot(model):
        return ""
    try:
        config_of(model)
    except ServingError as error:
        return error.message
    return ""


def _unreadable_folder(folder: Path) -> str:
    try:
        return "" if any(folder.iterdir()) else f"{folder} is empty"
    except FileNotFoundError:
        missing = f"{folder} is not there"
        return missing if Path(WEIGHTS).is_dir() else f"{missing}, nor is a bucket mounted at {WEIGHTS}"
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _unreadable_bucket(bucket: str, prefix: str) -> str:
    """Lists one object below the prefix and asks for the bucket, as the pod's own service account. The streamer does both."""
    store = os.environ.get(_STORE, "https://storage.googleapis.com")
    try:
        headers = {} if _STORE in os.environ else {"Authorization": f"Bearer {_account_token()}"}
        url = f"{store}/storage/v1/b/{bucket}"
        with httpx.Client(headers=headers, timeout=_ASK_S) as client:
            # Without the slash a neighbour's name would do: llama-70b for llama.
            below = f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
            answer = client.get(f"{url}/o", params={"prefix": below, "maxResults": 1})
            if answer.status_code in (401, 403):
                return f"this host's service account may not read gs://{bucket} ({answer.status_code})"
            if answer.status_code == 404:
                return f"there is no bucket gs://{bucket}"
            answer.raise_for_status()
            objects = answer.json().get("items")
            if client.get(url).status_code == 403:
                return f"this host's service account may read gs://{bucket}, but lacks storage.buckets.get, which the streamer needs (403)"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return f"gs://{bucket} can't be asked ({type(error).__name__})"
    return "" if objects else f"gs://{bucket} has nothing below {prefix or '/'}"


def _account_token() -> str:
    host = os.environ.get(_METADATA, "metadata.google.internal")
    answer = httpx.get(
        f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token",
        headers={"Metadata-Flavor": "Google"},
        timeout=_ASK_S,
    )
    answer.raise_for_status()
    return str(answer.json()["access_token"])
