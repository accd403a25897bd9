// openai-node.
import assert from "node:assert/strict";
import OpenAI from "openai";

const { SERVICE_URL: url, SERVICE_MODEL: model } = process.env;
const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "Hello" }], max_tokens: 8 };

assert.deepEqual((await api.models.list()).data.map((each) => each.id), [model]);
const whole = await api.chat.completions.create(asked);
assert.ok(whole.choices[0].message.content);
assert.ok(whole._request_id);
let text = "";
for await (const chunk of await api.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);
await assert.rejects(api.chat.completions.create({ ...asked, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(api.chat.completions.create({ ...asked, seed: 7 }), (error) => error.param === "seed");
