// Images of the next message: chosen or pasted files, which are sent as `data:` URLs.
// They are shown by name: the content security policy loads no `data:` URLs.

import { el, get, say } from "./dom.js";

const KINDS = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const MOST_BYTES = 12 * 1024 * 1024;

/** Each has the `name` of its file and its `url`. */
let images = [];

export function startImages() {
  const files = get("image-files");
  get("add-image").onclick = () => files.click();
  files.onchange = async () => {
    await attach([...files.files]);
    files.value = "";
  };
  get("prompt").onpaste = (event) => {
    const pasted = [...event.clipboardData.files];
    if (!pasted.length) return;
    event.preventDefault();
    attach(pasted);
  };
}

export function hasImages() {
  return images.length > 0;
}

/** Return the images of the next message, and have none from then on. */
export function takeImages() {
  const taken = images;
  images = [];
  show();
  return taken;
}

async function attach(files) {
  say(get("image-fault"), "");
  for (const file of files) {
    if (!KINDS.includes(file.type)) say(get("image-fault"), `${file.name} is no PNG, JPEG, GIF or WebP file.`);
    else if (file.size > MOST_BYTES) say(get("image-fault"), `${file.name} has more than 12 MiB.`);
    else images.push({ name: file.name, url: await urlOf(file) });
  }
  show();
  get("prompt").focus();
}

function urlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function show() {
  const nodes = images.map((image) => {
    const remove = el("button", { type: "button", class: "quiet", "aria-label": `Remove ${image.name}` }, "×");
    remove.onclick = () => {
      images = images.filter((each) => each !== image);
      show();
    };
    return el("li", {}, image.name, remove);
  });
  get("images").replaceChildren(...nodes);
  get("images").hidden = !nodes.length;
}
