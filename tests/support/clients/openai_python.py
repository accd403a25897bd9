"""openai-python: what most programs use of it."""

import os

import openai

url, model = os.environ["SERVICE_URL"], os.environ["SERVICE_MODEL"]
api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
hello = [{"role": "user", "content": "Hello"}]

assert [each.id for each in api.models.list()] == [model]
whole = api.chat.completions.create(model=model, messages=hello, max_tokens=8)
assert whole.choices[0].message.content
assert whole._request_id
usage = {"include_usage": True}
chunks = list(
    api.chat.completions.create(model=model, messages=hello, max_tokens=8, stream=True, stream_options=usage)
)
assert (
    "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    == whole.choices[0].message.content
)
assert chunks[-1].usage == whole.usage
assert api.completions.create(model=model, prompt=["One", "Two"], max_tokens=4).choices[1].text
tool = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
called = api.chat.completions.create(
    model=model, messages=hello, tools=[tool], tool_choice="required", max_tokens=64
)
assert called.choices[0].message.tool_calls[0].function.name == "add"
refused = None
try:
    api.chat.completions.create(model="other", messages=hello)
except openai.NotFoundError as error:
    refused = error
assert refused
assert (refused.code, refused.param) == ("model_not_found", "model")
