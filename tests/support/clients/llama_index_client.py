"""llama-index's client of servers that are like OpenAI's."""

import asyncio
import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=os.environ["SERVICE_MODEL"],
    api_base=f"{os.environ['SERVICE_URL']}/v1",
    api_key="none",
    is_chat_model=True,
    max_tokens=8,
    max_retries=0,
)
hello = [ChatMessage(role="user", content="Hello")]

whole = llm.chat(hello).message.content
assert whole
assert "".join(piece.delta or "" for piece in llm.stream_chat(hello)) == whole
assert asyncio.run(llm.achat(hello)).message.content == whole
assert llm.complete("Hello").text
