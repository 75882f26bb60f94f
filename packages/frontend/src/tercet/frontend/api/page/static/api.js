// Requests to the server this page came from.

import { askForKey, currentKey } from "./key.js";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Send a request, with the key if there is one. Asks the user for a key on a 401. Throws ApiError. */
export async function request(path, options = {}) {
  for (;;) {
    const key = currentKey();
    const headers = { ...options.headers };
    if (key) headers.authorization = `Bearer ${key}`;
    const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
    if (answer.ok) return answer;
    if (answer.status !== 401) throw new ApiError(await reason(answer), answer.status);
    await answer.body?.cancel();
    if (key !== currentKey()) continue; // another request has asked for a key meanwhile
    const entered = await askForKey(key ? "The server does not know this key." : "");
    if (!entered) throw new ApiError("The server needs a key.", 401);
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

async function reason(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}
