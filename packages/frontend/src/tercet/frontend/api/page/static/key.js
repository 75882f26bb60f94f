// The API key: a variable of this module, stored nowhere; the dialog that asks for it, and the button that forgets it.

import { el } from "./dom.js";

let key = "";
let asking = null;

const forget = el("button", { id: "forget-key", type: "button", class: "quiet", hidden: true }, "Forget key");
const input = el("input", { id: "key", type: "password", autocomplete: "off", spellcheck: false, required: true });
const fault = el("p", { id: "key-fault", class: "fault", role: "alert" });
const cancel = el("button", { type: "button", class: "quiet" }, "Cancel");
const form = el("form", {},
  el("h2", { id: "key-title" }, "This server needs a key"),
  el("p", {}, "The page keeps it in memory until it is closed or loaded again."),
  el("label", { htmlFor: "key" }, "API key"), input, fault,
  el("div", { class: "row" }, cancel, el("button", { type: "submit", class: "primary" }, "Use key")));
const dialog = el("dialog", { id: "key-dialog", "aria-labelledby": "key-title" }, form);

document.querySelector(".bar .grow").after(forget);
document.body.append(dialog);
forget.onclick = () => {
  key = "";
  forget.hidden = true;
};

/** Return the key, which is empty if there is none. */
export function currentKey() {
  return key;
}

/** Ask for a key once, however many requests wait for it. Returns whether the user entered one. */
export function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    fault.textContent = reason;
    const end = (entered) => {
      input.value = "";
      dialog.close();
      asking = null;
      if (entered) key = entered;
      forget.hidden = !key;
      resolve(Boolean(entered));
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      const entered = input.value.trim();
      if (/^[\x21-\x7e]+$/.test(entered)) end(entered);
      else fault.textContent = "A key has printable ASCII characters and no spaces.";
    };
    cancel.onclick = () => end("");
    dialog.oncancel = (event) => {
      event.preventDefault();
      end("");
    };
    dialog.showModal();
    input.focus();
  });
  return asking;
}
