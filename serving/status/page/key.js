// The API key: asked for when the service wants one, kept for this tab alone, sent to this service alone.

const STORED = "serving.key";
const $ = (id) => document.getElementById(id);
const waiting = [];
let refused = false;

/** fetch() with the key. A 401 asks for one and tries again; null where the user gives none. */
export async function withKey(path, options = {}, ask = true) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.status !== 401) return answer;
    if (sessionStorage.getItem(STORED) !== key) continue; // another request has asked meanwhile
    if (refused && !ask) return null;
    if (!(await asked(key ? "The service does not know this key." : "The service asks for an API key."))) return null;
  }
}

/** Opens the dialog; resolves to whether there is a new key. */
function asked(why) {
  $("key-why").textContent = why;
  $("key-error").textContent = "";
  if (!$("key-dialog").open) {
    $("key").value = "";
    $("key-dialog").showModal();
    $("key").focus();
  }
  return new Promise((resolve) => waiting.push(resolve));
}

function answered(given) {
  refused = !given;
  $("key-dialog").close();
  for (const resolve of waiting.splice(0)) resolve(given);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    $("key-error").textContent = key
      ? "A key has letters, digits and ASCII punctuation only; this one can't be sent."
      : "Enter a key, or cancel.";
    return;
  }
  sessionStorage.setItem(STORED, key);
  $("key").value = "";
  answered(true);
});
$("key-cancel").addEventListener("click", () => answered(false));
$("key-dialog").addEventListener("cancel", (event) => (event.preventDefault(), answered(false)));
$("key-forget").addEventListener("click", () => {
  sessionStorage.removeItem(STORED);
  answered(false);
});
$("key-open").addEventListener("click", () => {
  asked(sessionStorage.getItem(STORED) ? "A key is in use. Give another one, or forget it." : "No key is in use.").then(
    (given) => given && dispatchEvent(new Event("serving:key")),
  );
});
