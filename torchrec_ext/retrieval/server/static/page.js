"use strict";
// Everything from the server is put into the page as text, never as markup.
const at = (id) => document.getElementById(id);
const LIKED = 10;
let served = null;

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function say(text, bad) {
  at("status").textContent = text;
  at("status").classList.toggle("error", Boolean(bad));
}

async function ask(path, body) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if (at("token").value) headers.Authorization = `Bearer ${at("token").value}`;
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  } catch {
    throw new Error("The server cannot be reached. Is it still running?");
  }
  const found = await answer.json().catch(() => null);
  if (answer.status === 401) {
    at("token-field").hidden = false;
    at("token").focus();
    throw new Error("This server asks for a token: type it in, then press Recommend.");
  }
  if (!answer.ok) throw new Error(found?.error?.message ?? `The server answered with status ${answer.status}.`);
  return found;
}

function number(value, digits = 4) {
  if (typeof value !== "number") return "not known";
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toLocaleString("en", { maximumFractionDigits: digits });
}

function showBundle(found) {
  served = found;
  const { content = {}, certificate = {} } = found.manifest;
  at("served").textContent = `Bundle ${found.digest.slice(0, 12)}: ${number(found.items)} items, ${number(found.users)} known users.`;
  const coverage = content.coverage ?? {};
  const facts = {
    "Greatest difference from the trained model": `${number(certificate.parity?.greatest_difference)} over ${number(certificate.parity?.pairs)} pairs`,
    "Recall of the index": `${number(content.index?.recall)} (${content.index?.kind}, by ${content.metric})`,
    "Trained items in the bundle": `${number(coverage.trained - coverage.missing)} of ${number(coverage.trained)}`,
    "Towers": [...(content.query ?? []), content.candidate].filter(Boolean).join(" · "),
    "Made": certificate.created ?? "not said",
  };
  at("facts").replaceChildren(...Object.entries(facts).map(([name, value]) => {
    const group = element("div");
    group.append(element("dt", name), element("dd", value));
    return group;
  }));
  const manifest = { ...found.manifest, content: { ...content, files: content.files && `${Object.keys(content.files).length} files` } };
  at("manifest").textContent = JSON.stringify(manifest, null, 1);
  at("users").replaceChildren(...found.sample_users.map((id) => Object.assign(element("option"), { value: String(id) })));
  at("other").hidden = found.sample_users.length === 0;
  at("k").max = Math.min(100, found.limits.k);
  at("category-field").hidden = found.categories.length === 0;
  at("category").replaceChildren(Object.assign(element("option", "All"), { value: "" }), ...found.categories.map((name) => element("option", name)));
}

function row(name, score, share) {
  const line = element("li");
  line.append(element("span", name, "name"));
  if (score !== undefined) {
    const bar = element("span", "", "bar");
    bar.style.width = `${100 * share}%`;
    bar.setAttribute("aria-hidden", "true");
    const told = element("span", score.toFixed(3), "score");
    told.setAttribute("aria-label", `score ${score.toFixed(3)}`);
    line.prepend(bar);
    line.append(told);
  }
  return line;
}

function fill(list, empty, lines) {
  list.classList.remove("waiting");
  list.replaceChildren(...lines);
  empty.hidden = lines.length > 0;
}

function showAnswer(found, ms) {
  at("answer").hidden = false;
  const [best, worst] = [Math.max(...found.scores), Math.min(...found.scores)];
  const share = (score) => best > worst ? 0.15 + 0.85 * (score - worst) / (best - worst) : 1;
  const names = found.titles ?? found.items.map((id) => `Item ${id}`);
  fill(at("items"), at("items-empty"), found.items.map((_, place) => row(names[place], found.scores[place], share(found.scores[place]))));
  fill(at("liked"), at("liked-empty"), (found.liked_titles ?? found.liked ?? []).map((name) => row(String(name))));
  at("latency").textContent = `${ms.toFixed(1)} ms`;
  at("latency").title = "from the browser's request to the whole answer";
  at("latency").hidden = false;
  const who = found.unknown_user ? "This user is unknown: the answer is the model's for someone new" : `${found.answered} recommendations`;
  const fewer = found.answered < found.asked ? `, all that are left of ${found.asked}` : "";
  const cold = found.unknown_features.length ? ` (never seen in training: ${found.unknown_features.join(", ")})` : "";
  say(`${who}${fewer}${cold}.`);
}

function userId(text) {
  const whole = /^-?\d{1,15}$/.test(text);
  return served.user_kind === "int64" && whole ? Number(text) : text;
}

async function recommend() {
  at("go").disabled = at("other").disabled = true;
  at("items").setAttribute("aria-busy", "true");
  const waiting = setTimeout(() => {
    say("Asking …");
    at("answer").hidden = false;
    for (const list of [at("items"), at("liked")]) {
      list.classList.add("waiting");
      list.replaceChildren(...Array.from({ length: 5 }, () => element("li")));
    }
  }, 200);
  try {
    if (!served) showBundle(await ask("/v1/bundle"));
    if (!served.user_key) throw new Error("This bundle knows no users; send their features to /v1/recommend, as /docs says.");
    if (!at("user").value && served.sample_users.length) at("user").value = String(served.sample_users[0]);
    if (!at("user").value) {  // ids of users are offered on loopback, and to those who bear a token
      clearTimeout(waiting);
      at("user").focus();
      say("Type the id of a user, then press Recommend.");
      return;
    }
    const body = { user: { [served.user_key]: userId(at("user").value.trim()) }, k: Number(at("k").value), titles: true, liked: LIKED };
    if (at("category").value) body.categories = [at("category").value];
    const start = performance.now();
    const found = await ask("/v1/recommend", body);
    clearTimeout(waiting);
    showAnswer(found, performance.now() - start);
  } catch (error) {
    clearTimeout(waiting);
    at("answer").hidden = true;
    say(error.message, true);
  } finally {
    at("items").removeAttribute("aria-busy");
    at("go").disabled = at("other").disabled = false;
  }
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); recommend(); });
at("other").addEventListener("click", () => {
  if (served?.sample_users.length) at("user").value = String(served.sample_users[Math.floor(Math.random() * served.sample_users.length)]);
  recommend();
});
const wanted = new URLSearchParams(location.hash.slice(1));  // #user=42&k=5; behind #, so that no log holds it
if (wanted.get("user")) at("user").value = wanted.get("user");
if (wanted.get("k")) at("k").value = wanted.get("k");
recommend();
