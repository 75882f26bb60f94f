// Requests to the server this page came from. The key is a variable of this module, and is stored nowhere.

import { get } from "./dom.js";

let key = "";
let asking = null;

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Send a request, with the key if there is one. Asks the user for a key on a 401. Throws ApiError. */
export async function request(path, options = {}) {
  for (let fault = ""; ; fault = "The server does not know this key.") {
    const used = key;
    const headers = { ...options.headers };
    if (used) headers.authorization = `Bearer ${used}`;
    const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
    if (answer.ok) return answer;
    if (answer.status !== 401) throw new ApiError(await reason(answer), answer.status);
    await answer.body?.cancel();
    if (key === used) await askForKey(used ? fault || "The server does not know this key." : "");
  }
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

/** Yield the data of each server-sent event of an answer. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const data = piece.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function forgetKey() {
  key = "";
  get("forget-key").hidden = true;
}

async function reason(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

/** Ask for a key once, however many requests wait for it. Throws ApiError if the user cancels. */
function askForKey(fault) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = get("key-dialog"), form = get("key-form"), input = get("key");
    get("key-fault").textContent = fault;
    const end = (entered) => {
      form.onsubmit = get("key-cancel").onclick = dialog.oncancel = null;
      input.value = "";
      dialog.close();
      asking = null;
      if (!entered) return reject(new ApiError("The server needs a key.", 401));
      key = entered;
      get("forget-key").hidden = false;
      resolve();
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      if (/^[\x21-\x7e]+$/.test(input.value.trim())) end(input.value.trim());
      else get("key-fault").textContent = "A key has printable ASCII characters and no spaces.";
    };
    get("key-cancel").onclick = () => end("");
    dialog.oncancel = (event) => {
      event.preventDefault();
      end("");
    };
    dialog.showModal();
    input.focus();
  });
  return asking;
}
