// The OpenAPI description as a page.

import { element } from "/drawing.js";

const kind = (schema, all) => {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((s) => kind(s, all)).filter((t) => t !== "null").join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.length > 12 ? `one of ${schema.enum.length} names` : schema.enum.join(" | ");
  if (schema.type === "array") return `list of ${kind(schema.items, all)}`;
  if (schema.type === "object" && schema.additionalProperties?.type) return `name → ${kind(schema.additionalProperties, all)}`;
  const bounds = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"]].filter(([k]) => k in schema).map(([k, sign]) => `${sign} ${schema[k].toLocaleString("en")}`);
  return [schema.type ?? "anything", ...bounds].join(" ");
};

function bounded(schema) {
  const inner = schema.anyOf?.find((s) => s.type !== "null");
  return inner ? { ...inner, ...schema, anyOf: undefined, enum: schema.enum ?? inner.enum } : schema;
}

function table(head, rows) {
  return element("table", { class: "plan-table" }, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", text })))),
    element("tbody", {}, ...rows.map(([first, ...rest]) => element("tr", {}, element("th", { scope: "row", text: first }), ...rest.map((text) => element("td", { text }))))));
}

function operation(path, made, schemas) {
  const parameters = (made.parameters ?? []).map((p) => [p.name, kind(bounded(p.schema), schemas), p.schema.default === undefined ? "" : String(p.schema.default), p.description ?? p.schema.description ?? ""]);
  const answers = Object.entries(made.responses).map(([status, r]) => [status, kind(r.content?.["application/json"]?.schema, schemas), r.description]);
  return element("section", { class: "card" }, element("h2", {}, "GET ", element("a", { href: path, text: path })), element("p", { class: "quiet", text: made.summary }),
    ...(parameters.length ? [element("h3", { text: "Parameters" }), table(["Name", "Values", "Default", "Meaning"], parameters)] : []),
    element("h3", { text: "Answers" }), table(["Status", "What", "When"], answers));
}

function shape(name, schema, schemas) {
  const rows = Object.entries(schema.properties ?? {}).map(([field, s]) => [field, kind(s, schemas), s.description ?? ""]);
  return element("section", { class: "card" }, element("h2", { text: name }), element("p", { class: "quiet", text: schema.description ?? "" }), table(["Field", "Values", "Meaning"], rows));
}

const description = await (await fetch("/openapi.json")).json();
const schemas = description.components.schemas;
document.getElementById("api").replaceChildren(
  element("section", { class: "card" }, element("h1", { text: `The API of vramfit ${description.info.version}` }), element("p", { text: description.info.description })),
  ...Object.entries(description.paths).map(([path, item]) => operation(path, item.get, schemas)),
  ...Object.entries(schemas).map(([name, schema]) => shape(name, schema, schemas)));
