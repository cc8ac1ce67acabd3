// The page of `linattn serve`: chat with streaming, documents and their states, and what the server does now.
"use strict";

const $ = (id) => document.getElementById(id);
let messages = []; // of this conversation
let state = null; // id of the state that it continues
let running = null; // AbortController of the answer that is being written

function headers(kind) {
  const key = $("key") ? $("key").value : "";
  return { ...(kind ? { "Content-Type": kind } : {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function fail(error) {
  $("error").textContent = error ? error.message : "";
  $("error").hidden = !error;
}

async function call(path, options = {}) {
  const response = await fetch(path, options);
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body && body.error ? body.error.message : `the server answered ${response.status}`);
  }
  return response;
}

// The data of server-sent events, one object at a time, up to [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      yield found;
    }
  }
}

function show(role, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const who = document.createElement("b");
  who.textContent = role === "user" ? "You" : "Model";
  const body = document.createElement("span");
  body.textContent = text;
  turn.append(who, body);
  $("log").append(turn);
  $("log").scrollTop = $("log").scrollHeight;
  return body;
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
}

async function ask(question) {
  fail(null);
  messages.push({ role: "user", content: question });
  show("user", question);
  const body = show("assistant", "");
  running = new AbortController();
  busy(true);
  const begun = performance.now();
  let first = null;
  let usage = null;
  try {
    const request = { messages, stream: true, stream_options: { include_usage: true }, ...(state ? { state } : {}) };
    const response = await call("/v1/chat/completions", {
      method: "POST",
      headers: headers("application/json"),
      body: JSON.stringify({ ...request, temperature: 0.2 }),
      signal: running.signal,
    });
    for await (const chunk of events(response)) {
      usage = chunk.usage || usage;
      const text = chunk.choices.length ? chunk.choices[0].delta.content : "";
      if (!text) continue;
      first = first || performance.now();
      body.textContent += text;
      $("log").scrollTop = $("log").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
  }
  running = null;
  busy(false);
  if (body.textContent) messages.push({ role: "assistant", content: body.textContent });
  else {
    messages.pop();
    body.parentElement.remove();
  }
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    const wait = first ? `, first after ${((first - begun) / 1000).toFixed(2)} s` : "";
    $("about").textContent = `${usage.prompt_tokens} tokens before the answer, ${cached} of them from a state${wait}.`;
  }
}

function clear() {
  if (running) running.abort();
  messages = [];
  $("log").replaceChildren();
  $("about").textContent = "";
  fail(null);
}

async function read(file) {
  fail(null);
  $("reading").hidden = false;
  $("bar").value = 0;
  $("read").textContent = `reading ${file.name}`;
  try {
    const query = new URLSearchParams({ stream: "true", name: file.name.slice(0, 200) });
    const options = { method: "POST", headers: headers("text/plain"), body: await file.text() };
    for await (const found of events(await call(`/v1/states?${query}`, options))) {
      if (found.object === "state") {
        state = found.id;
        clear();
      } else {
        $("bar").value = found.read / found.tokens;
        $("read").textContent = `${file.name}: ${found.read} of ${found.tokens} tokens`;
      }
    }
    $("question").focus();
  } catch (error) {
    fail(error);
  }
  $("reading").hidden = true;
  await list();
}

function mebibytes(bytes) {
  return bytes === null ? "-" : `${(bytes / 2 ** 20).toFixed(bytes < 10 * 2 ** 20 ? 1 : 0)} MiB`;
}

async function list() {
  const found = (await (await call("/v1/states", { headers: headers() })).json()).data;
  $("none").hidden = found.length > 0;
  $("states").replaceChildren(...found.map(row));
}

function row(saved) {
  const item = document.createElement("li");
  const label = document.createElement("label");
  const choice = document.createElement("input");
  choice.type = "radio";
  choice.name = "state";
  choice.checked = saved.id === state;
  choice.disabled = !saved.usable;
  choice.addEventListener("change", () => {
    state = saved.id;
    clear();
  });
  const size = document.createElement("span");
  size.className = "note";
  size.textContent = ` ${saved.tokens} tokens, ${mebibytes(saved.bytes)}${saved.usable ? "" : ", of another model"}`;
  label.append(choice, ` ${saved.name || saved.id}`, size);
  const remove = document.createElement("button");
  remove.type = "button";
  remove.textContent = "Delete";
  remove.addEventListener("click", async () => {
    await call(`/v1/states/${saved.id}`, { method: "DELETE", headers: headers() }).catch(fail);
    if (state === saved.id) {
      state = null;
      clear();
    }
    await list();
  });
  item.append(label, remove);
  return item;
}

async function refresh() {
  try {
    const now = await (await call("/v1/status", { headers: headers() })).json();
    $("written").textContent = `${now.written_per_second.toFixed(1)} tokens/s`;
    $("reads").textContent = `${now.read_per_second.toFixed(0)} tokens/s`;
    $("load").textContent = `${now.running} writing, ${now.reading + now.waiting} before`;
    $("memory").textContent = `${mebibytes(now.state_bytes)} of ${mebibytes(now.state_budget)}`;
    $("process").textContent = mebibytes(now.resident_bytes);
  } catch {
    $("written").textContent = "no answer";
  }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || running) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  state = null;
  clear();
  list().catch(fail);
});
$("file").addEventListener("change", () => $("file").files.length && read($("file").files[0]));
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("drop").addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop" && event.dataTransfer.files.length) read(event.dataTransfer.files[0]);
  });
}
if ($("key")) {
  $("enter").addEventListener("submit", (event) => event.preventDefault());
  $("key").addEventListener("change", () => list().then(() => fail(null), fail));
} else list().catch(fail);
refresh();
setInterval(refresh, 1000);
