// The AI SDK with @ai-sdk/openai-compatible.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const { SERVICE_URL: url, SERVICE_MODEL: name } = process.env;
const provider = createOpenAICompatible({ name: "service", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });
const asked = { model: provider(name), prompt: "Hello", maxOutputTokens: 8, maxRetries: 0 };

const whole = await generateText(asked);
assert.ok(whole.text);
assert.equal(whole.usage.outputTokens, 8);
const stream = streamText(asked);
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, 8);
await assert.rejects(generateText({ ...asked, model: provider("other") }), (error) => error.statusCode === 404);
