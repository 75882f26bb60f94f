// Tabs, health, and the two views.

import { startChat } from "./chat.js";
import { get, say } from "./dom.js";
import { showLive } from "./live.js";

const TABS = ["chat", "live"];

function select(name, focus = false) {
  for (const each of TABS) {
    const tab = get(`tab-${each}`), chosen = each === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    get(each).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  showLive(name === "live");
}

for (const [place, name] of TABS.entries()) {
  get(`tab-${name}`).onclick = () => select(name);
  get(`tab-${name}`).onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) select(TABS[(place + step + TABS.length) % TABS.length], true);
  };
}
addEventListener("hashchange", () => select(location.hash === "#live" ? "live" : "chat"));

get("forget-key").addEventListener("click", () => {
  showLive(false);
  showLive(!get("live").hidden);
});

async function watchHealth() {
  for (;;) {
    let state = "down", text = "unreachable";
    try {
      const answer = await fetch("health", { cache: "no-store" });
      [state, text] = answer.ok ? ["ready", "ready"] : ["waiting", "not ready"];
    } catch {
      // the server is unreachable
    }
    get("health").dataset.state = state;
    say(get("health").lastElementChild, text);
    await new Promise((resolve) => setTimeout(resolve, document.hidden ? 30_000 : 5_000));
  }
}

select(location.hash === "#live" ? "live" : "chat");
startChat();
watchHealth();
