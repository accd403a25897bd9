"""litellm, as a library."""

import os

import litellm

model, url = os.environ["SERVICE_MODEL"], os.environ["SERVICE_URL"]
litellm.suppress_debug_info = True
common = {
    "model": f"hosted_vllm/{model}",
    "api_base": f"{url}/v1",
    "api_key": "none",
    "max_tokens": 8,
    "num_retries": 0,
}
hello = [{"role": "user", "content": "Hello"}]

whole = litellm.completion(messages=hello, **common)
assert whole.choices[0].message.content
assert whole.usage.completion_tokens == 8
pieces = [
    chunk.choices[0].delta.content or ""
    for chunk in litellm.completion(messages=hello, stream=True, **common)
]
assert "".join(pieces) == whole.choices[0].message.content
try:
    litellm.completion(messages=hello, **{**common, "model": "hosted_vllm/other"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("a model that is not there answered")
