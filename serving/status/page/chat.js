// The playground: a conversation with one model over the service's own OpenAI API, with the times a client sees.

import { short, time } from "./draw.js";
import { withKey } from "./key.js";

const $ = (id) => document.getElementById(id);
const PATH = "v1/chat/completions";
const PARAMETERS = ["temperature", "top_p", "max_tokens", "seed"];
const conversation = []; // what was said, as the API takes it
const simulated = new Map();
let going = null; // AbortController of the answer under way

/** The models that can be chosen; the choice stays where it can. */
export function offer(models) {
  const select = $("model");
  for (const model of models) simulated.set(model.name, model.simulated);
  const names = models.map((model) => model.name);
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) select.value = chosen;
    showCode();
  }
  $("chat-simulated").hidden = !simulated.get(select.value);
}

function request(prompt) {
  const system = $("system").value.trim();
  const body = {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation, { role: "user", content: prompt }],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of PARAMETERS) {
    const value = $(name).valueAsNumber;
    if (Number.isFinite(value)) body[name] = value;
  }
  return body;
}

async function send() {
  const prompt = $("prompt").value;
  if (going || !prompt.trim() || !$("ask").reportValidity()) return;
  const invalid = PARAMETERS.map($).find((field) => !field.checkValidity());
  if (invalid) {
    invalid.closest("details").open = true;
    invalid.reportValidity();
    return;
  }
  const body = request(prompt);
  const question = say("user", prompt);
  const answer = say("assistant", "");
  const stop = (going = new AbortController());
  busy(true);
  try {
    const said = await stream(body, answer, stop.signal);
    $("prompt").value = "";
    conversation.push({ role: "user", content: prompt }, { role: "assistant", content: said });
  } catch (error) {
    const stopped = error.name === "AbortError";
    answer.append(line(stopped ? "quiet" : "error", stopped ? "stopped" : error instanceof TypeError ? "The service does not answer." : error.message));
    question.classList.add("unsaid"); // not part of the conversation that goes on
    answer.classList.add("unsaid");
  } finally {
    going = null;
    busy(false);
    showCode();
    $("prompt").focus();
  }
}

async function stream(body, shown, signal) {
  const text = line("said", "");
  const thought = line("thought", "");
  shown.append(thought, text);
  const asked = performance.now();
  const response = await withKey(PATH, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (response === null) throw new Error("No key was given.");
  if (!response.ok) throw new Error(await refusal(response));
  let first = 0, last = 0, pieces = 0, tokens = 0, content = "", reasoning = "", drawn = 0;
  const draw = () => {
    drawn = 0;
    text.textContent = content;
    thought.textContent = reasoning;
    figures(asked, first, last, tokens || pieces, tokens > 0);
    $("talk").scrollTop = $("talk").scrollHeight;
  };
  try {
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message ?? "The answer broke off.");
      const delta = event.choices?.[0]?.delta ?? {};
      const thinking = delta.reasoning_content ?? delta.reasoning ?? "";
      if (delta.content || thinking) {
        last = performance.now();
        first ||= last;
        pieces += 1;
        content += delta.content ?? "";
        reasoning += thinking;
      }
      if (event.usage) tokens = event.usage.completion_tokens;
      drawn ||= requestAnimationFrame(draw);
    }
  } finally {
    cancelAnimationFrame(drawn);
    draw();
  }
  return content;
}

/** The JSON of each server-sent event, up to [DONE]. A stream that ends without it broke off. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off.");
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((row) => row.startsWith("data:")).map((row) => row.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function refusal(response) {
  const said = await response.json().catch(() => null);
  return said?.error?.message ?? `The service answers ${response.status}.`;
}

function figures(asked, first, last, tokens, counted) {
  if (!first) return;
  const rate = tokens > 1 && last > first ? (tokens - 1) / ((last - first) / 1000) : null;
  const unit = counted ? "tokens" : "pieces";
  $("figures").textContent =
    `TTFT ${time((first - asked) / 1000)} · ${short(rate)} ${unit}/s · ${tokens} ${unit} · ${time((last - asked) / 1000)} in all`;
}

function say(role, text) {
  const box = document.createElement("div");
  box.className = `turn ${role}`;
  box.append(line("who", role === "user" ? "You" : $("model").value));
  if (text) box.append(line("said", text));
  $("talk").append(box);
  $("talk").scrollTop = $("talk").scrollHeight;
  return box;
}

function line(kind, text) {
  const made = document.createElement("p");
  made.className = kind;
  made.textContent = text;
  return made;
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("talk").setAttribute("aria-busy", String(is)); // read out when it is whole, not token by token
  if (is) $("figures").textContent = "waiting for the first token";
}

// --- the request as code -------------------------------------------------------------------------------------------

function showCode() {
  const body = request($("prompt").value || "Hello");
  const language = document.querySelector("input[name=language]:checked").value;
  $("code").textContent = language === "curl" ? curl(body) : python(body);
}

const KEYED = () => Boolean(sessionStorage.getItem("serving.key"));
const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(body) {
  const key = KEYED() ? ` -H "Authorization: Bearer $API_KEY"` : "";
  return `curl -N ${shell(new URL(PATH, document.baseURI).href)} -H 'Content-Type: application/json'${key} \\\n  -d ${shell(JSON.stringify(body))}`;
}

function python(body) {
  const base = new URL("v1", document.baseURI).href;
  const options = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value)},\n`).join("");
  return `import os
from openai import OpenAI

client = OpenAI(base_url=${literal(base)}, api_key=${KEYED() ? `os.environ["API_KEY"]` : `os.environ.get("API_KEY", "none")`})
stream = client.chat.completions.create(
${options})
for event in stream:
    if event.choices:
        print(event.choices[0].delta.content or "", end="", flush=True)
print()
`;
}

/** A value as Python writes it. A JSON string is a Python string; true, false and null are not its words. */
function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${literal(key)}: ${literal(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

async function copy() {
  const code = $("code");
  let copied = false;
  try {
    await navigator.clipboard.writeText(code.textContent); // absent over plain HTTP from another machine
    copied = true;
  } catch {
    getSelection().selectAllChildren(code);
    copied = document.execCommand("copy");
  }
  $("copied").textContent = copied ? "copied" : "select it and press Ctrl+C";
  setTimeout(() => ($("copied").textContent = ""), 3000);
}

$("ask").addEventListener("submit", (event) => (event.preventDefault(), send()));
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => going?.abort());
addEventListener("keydown", (event) => event.key === "Escape" && going?.abort());
$("clear").addEventListener("click", () => {
  going?.abort();
  conversation.length = 0;
  $("talk").replaceChildren();
  $("figures").textContent = "";
  showCode();
  $("prompt").focus();
});
$("copy").addEventListener("click", copy);
$("model").addEventListener("change", () => ($("chat-simulated").hidden = !simulated.get($("model").value)));
$("chat").addEventListener("input", showCode);
$("chat").addEventListener("change", showCode);
$("code-box").addEventListener("toggle", showCode);
showCode();
