"use strict";
// Everything from the server is put into the page as text, never as markup.
const at = (id) => document.getElementById(id);
const LIKED = 10;
const wanted = new URLSearchParams(location.hash.slice(1));  // #user=42&k=5, or #new; behind #, so that no log holds it
let served = null;
let isNew = false;
let fields = {};  // of each feature of someone new: a function that returns its value

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
  const details = { ...certificate, ...certificate.details };
  const what = details.recipe ? `${details.recipe} on ${details.data}, bundle ` : "Bundle ";
  at("served").textContent = `${what}${found.digest.slice(0, 12)}: ${number(found.items)} items, ${number(found.users)} known users.`;
  const facts = {
    "Greatest difference from the trained model": `${number(certificate.parity?.greatest_difference)} over ${number(certificate.parity?.pairs)} pairs`,
    "Recall of the index": `${number(content.index?.recall ?? 1)} (${content.index?.factory ?? content.index?.kind}, by ${content.metric})`,
    "Stored rows": `${number(content.items?.rows)} of ${content.graphs?.candidate?.width} numbers, ${content.store}`,
    "Towers": [...(content.towers?.query?.names ?? []), ...(content.towers?.candidate?.names ?? [])].join(" · "),
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
  at("k").max = Math.min(100, found.most_items);
  at("scale").textContent = content.calibrated
    ? "The logit, and its probability among rows like those of the training, drawn negatives included."
    : "The model's score. It ranks, and is no probability.";
  at("known").hidden = !found.user_key;
  showFeatures();
  choose(!found.user_key || wanted.has("new"));
}

function choose(someoneNew) {
  isNew = someoneNew;
  at("known").setAttribute("aria-pressed", String(!isNew));
  at("new").setAttribute("aria-pressed", String(isNew));
  at("user-field").hidden = isNew;
  at("person").hidden = !isNew;
  at("other").hidden = isNew || served.sample_users.length === 0;
}

function typed(kind, text) {
  if (kind === "bool") return text === "true";
  const isNumber = kind === "int64" ? /^-?\d{1,15}$/.test(text) : kind.startsWith("float") && text !== "" && isFinite(text);
  return isNumber ? Number(text) : text;
}

function trueOrFalse(chosen) {
  const select = element("select");
  select.append(...["true", "false"].map((text) => Object.assign(element("option", text), { value: text, selected: text === String(chosen) })));
  return [select, () => typed("bool", select.value)];
}

function textInput(kind, chosen) {
  const input = Object.assign(element("input"), { value: chosen, spellcheck: false });
  if (kind === "int64" || kind.startsWith("float")) input.inputMode = "decimal";
  return [input, () => typed(kind, input.value.trim())];
}

// Values are added one by one, and removed by pressing them.
function listInput(kind, chosen) {
  const taken = [...chosen];
  const [input, read] = textInput(kind, "");
  const box = element("div");
  const chips = element("div", "", "chips");
  const draw = () => chips.replaceChildren(...taken.map((value, place) => {
    const chip = Object.assign(element("button", `${value} ×`, "quiet"), { type: "button" });
    chip.setAttribute("aria-label", `remove ${value}`);
    chip.addEventListener("click", () => { taken.splice(place, 1); draw(); });
    return chip;
  }));
  const add = () => {
    if (input.value.trim()) taken.push(read());
    input.value = "";
    draw();
  };
  input.addEventListener("change", add);
  input.placeholder = "add one";
  box.append(input, chips);
  draw();
  return [box, () => { add(); return taken; }, input];
}

function showFeatures() {
  fields = {};
  at("features").replaceChildren(...Object.entries(served.example_user).map(([name, chosen]) => {
    const kind = served.columns[name];
    const isList = kind.startsWith("list<");
    let made;
    if (isList) made = listInput(kind.slice(5, -1), chosen);
    else if (kind === "bool") made = trueOrFalse(chosen);
    else made = textInput(kind, chosen);
    const [control, read, input] = made;
    const label = Object.assign(element("label", name), { htmlFor: `feature-${name}` });
    (input ?? control).id = `feature-${name}`;
    fields[name] = read;
    const field = element("div", undefined, isList ? "field wide" : "field");
    field.append(label, control);
    return field;
  }));
}

function row(name, score, share, chance) {
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
  if (chance !== undefined) line.append(element("span", `${(100 * chance).toFixed(1)} %`, "chance"));
  return line;
}

function showAnswer(found, ms) {
  at("answer").hidden = false;
  const [best, worst] = [Math.max(...found.scores), Math.min(...found.scores)];
  const isChance = Boolean(served.manifest.content?.calibrated);
  const chance = (score) => isChance ? 1 / (1 + Math.exp(-score)) : undefined;
  const share = (score) => chance(score) ?? (best > worst ? 0.15 + 0.85 * (score - worst) / (best - worst) : 1);
  const names = found.items.map((id, place) => found.titles?.[place] || `Item ${id}`);
  at("items").classList.remove("waiting");
  at("items").replaceChildren(...found.items.map((_, place) => row(names[place], found.scores[place], share(found.scores[place]), chance(found.scores[place]))));
  at("items-empty").hidden = found.items.length > 0;
  const liked = found.liked ?? [];
  at("liked").classList.remove("waiting");
  at("liked").replaceChildren(...liked.map((id, place) => row(found.liked_titles?.[place] || `Item ${id}`)));
  at("liked-card").hidden = liked.length === 0;
  at("latency").textContent = `${ms.toFixed(1)} ms`;
  at("latency").title = "from the browser's request to the whole answer";
  at("latency").hidden = false;
  let who = `${found.items.length} recommendations`;
  if (isNew) who += " for someone new";
  else if (found.unknown_user) who = "This user is unknown: the answer is the model's for someone new";
  const fewer = found.items.length < found.asked ? `, all that are left of ${found.asked}` : "";
  const cold = found.unknown_features.length ? ` (never seen in training: ${found.unknown_features.join(", ")})` : "";
  say(`${who}${fewer}${cold}.`);
}

function userFeatures() {
  if (isNew) return Object.fromEntries(Object.entries(fields).map(([name, read]) => [name, read()]));
  return { [served.user_key]: typed(served.user_kind, at("user").value.trim()) };
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
    if (!at("user").value && served.sample_users.length) at("user").value = String(served.sample_users[0]);
    if (!isNew && !at("user").value) {  // ids of users are offered on loopback, and to those who bear a token
      clearTimeout(waiting);
      at("user").focus();
      say("Type the id of a user, then press Recommend. Or press Someone new.");
      return;
    }
    const body = { user: userFeatures(), k: Number(at("k").value), titles: true, liked: LIKED };
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
for (const [mode, someoneNew] of [["known", false], ["new", true]]) {
  at(mode).addEventListener("click", () => {
    if (served) choose(someoneNew);
    recommend();
  });
}
at("other").addEventListener("click", () => {
  if (served?.sample_users.length) at("user").value = String(served.sample_users[Math.floor(Math.random() * served.sample_users.length)]);
  recommend();
});
if (wanted.get("user")) at("user").value = wanted.get("user");
if (wanted.get("k")) at("k").value = wanted.get("k");
recommend();
