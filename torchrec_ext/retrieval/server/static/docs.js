"use strict";
let schemas = {};

// A schema, or the one that it names.
function plain(schema) {
  return schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
}

function element(name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
}

function kind(schema) {
  if (schema.enum) return schema.enum.slice(0, 12).map((one) => JSON.stringify(one)).join(" | ") + (schema.enum.length > 12 ? " | …" : "");
  if (schema.anyOf) return schema.anyOf.map(kind).join(" | ");
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items) : "anything"}`;
  if (schema.type === "object" && schema.properties) return `{ ${Object.keys(schema.properties).join(", ")} }`;
  return schema.type ?? "anything";
}

function rules(schema) {
  if (schema.maxItems === 0) return "this bundle has none";
  const named = { minimum: "at least", maximum: "at most", minItems: "entries at least", maxItems: "entries at most", default: "by default" };
  const told = Object.entries(named).filter(([key]) => schema[key] !== undefined && Math.abs(schema[key]) !== 2 ** 63).map(([key, words]) => `${words} ${JSON.stringify(schema[key])}`);
  const known = schema.examples ?? schema.items?.examples;
  const values = known ? `known values: ${known.map((one) => JSON.stringify(one)).join(", ")}` : "";
  return [values, schema.description?.replace(/\.$/, ""), schema.uniqueItems ? "each once" : "", ...told].filter(Boolean).join("; ");
}

function fields(schema, title) {
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const name of [title, "type", "meaning"]) head.append(Object.assign(element("th", name), { scope: "col" }));
  const body = table.createTBody();
  const add = (within, prefix) => {
    const required = within.required ?? [];
    for (const [name, value] of Object.entries(within.properties ?? {})) {
      const line = body.insertRow();
      line.insertCell().append(element("code", prefix + name + (required.includes(name) ? " *" : "")));
      const inner = plain(value.anyOf?.find((one) => one.$ref) ?? value);
      line.insertCell().textContent = inner.properties ? "object" : kind(value);
      line.insertCell().textContent = rules(value);
      add(inner, `${prefix}${name}.`);
    }
  };
  add(schema, "");
  return table;
}

const MOST = 1500;  // characters of an answer

function example(path, request, needsToken) {
  const box = element("div");
  const token = needsToken ? ' -H "Authorization: Bearer $TOKEN"' : "";
  const body = JSON.stringify(request).replaceAll("'", "'\\''");
  const command = `curl -s ${location.origin}${path} -H 'Content-Type: application/json'${token} -d '${body}'`;
  const answer = Object.assign(element("pre", needsToken ? "Its answer needs the token." : "Asking …"), { className: "answer" });
  box.append(element("p", "A request, and its answer:"), Object.assign(element("pre", command), { className: "answer" }), answer);
  if (needsToken) return box;
  fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request) })
    .then((found) => found.json())
    .then((found) => {
      const lines = Object.entries(found).map(([name, value]) => `  "${name}": ${JSON.stringify(value)}`);
      const text = `{\n${lines.join(",\n")}\n}`;
      answer.textContent = text.length > MOST ? `${text.slice(0, MOST)} …` : text;
    })
    .catch(() => { answer.textContent = "The server cannot be reached."; });
  return box;
}

function operation(path, method, told) {
  const card = element("section");
  card.className = "card";
  card.append(element("h2", `${method.toUpperCase()} ${path}`), element("p", told.summary));
  const content = told.requestBody?.content["application/json"];
  if (content) card.append(example(path, content.example, Boolean(told.security)), fields(plain(content.schema), "field"));
  const answer = told.responses["200"]?.content?.["application/json"]?.schema;
  const schema = answer && plain(answer);
  if (schema?.properties) card.append(element("p", "The answer:"), fields(schema, "field"));
  const refusals = element("table");
  for (const [status, { description }] of Object.entries(told.responses)) {
    if (status === "200") continue;
    const line = refusals.insertRow();
    line.append(Object.assign(element("th", status), { scope: "row" }));
    line.insertCell().textContent = description;
  }
  if (refusals.rows.length) card.append(element("p", "Refusals:"), refusals);
  return card;
}

fetch("/openapi.json").then((answer) => answer.json()).then((found) => {
  schemas = found.components.schemas;
  const cards = Object.entries(found.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, told]) => operation(path, method, told)));
  document.getElementById("operations").replaceChildren(...cards);
}).catch(() => {
  document.getElementById("operations").replaceChildren(element("p", "The server cannot be reached."));
});
