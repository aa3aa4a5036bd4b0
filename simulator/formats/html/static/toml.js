// Where a cursor stands in a study, what can be written there, and the line that a fault is about.

// Where the cursor of a TOML text stands: {table, key, prefix, from, inValue, quoted}; null in a comment or behind a value.
function placeAt(text, cursor) {
  const start = text.lastIndexOf("\n", cursor - 1) + 1,
    line = text.slice(start, cursor);
  const before = text.slice(0, start).match(/^[ \t]*\[([^\[\]\n]+)\][ \t]*(#.*)?$/gm),
    table = before ? before[before.length - 1].match(/\[([^\]]+)\]/)[1].trim() : "";
  const value = line.match(/^\s*([\w.-]+)\s*=\s*("?)([\w./-]*)$/);
  if (value)
    return { table, key: value[1], prefix: value[3], from: cursor - value[3].length - value[2].length, inValue: true };
  const header = line.match(/^\s*\[([\w.-]*)$/);
  if (header) return { table: null, key: "", prefix: header[1], from: cursor - header[1].length, inValue: false };
  const key = line.match(/^\s*([\w.-]*)$/);
  return key ? { table, key: "", prefix: key[1], from: cursor - key[1].length, inValue: false } : null;
}

// What can stand there: [{label, insert, about}]. words: tables of keys, names of presets.
function offersAt(words_, at) {
  if (!at) return [];
  const fits = (one) => one.label.toLowerCase().includes(at.prefix.toLowerCase()),
    first = (one) => (one.label.toLowerCase().startsWith(at.prefix.toLowerCase()) ? 0 : 1);
  let found = [];
  if (at.inValue) {
    const path = [at.table, at.key].filter(Boolean).join("."),
      parts = path.split("."),
      field = (words_.tables[parts.slice(0, -1).join(".")] || {})[parts[parts.length - 1]];
    const values = [...(words_.names[path] || []), ...(field ? field.values : [])];
    found = values.map((one) => ({
      label: String(one),
      insert: typeof one === "string" ? `"${one}"` : String(one),
      about: field ? field.about : "",
    }));
  } else if (at.table === null)
    found = Object.keys(words_.tables)
      .filter(Boolean)
      .sort()
      .map((one) => ({ label: one, insert: `${one}]`, about: "table" }));
  else
    found = Object.entries(words_.tables[at.table] || {})
      .filter(([, one]) => !one.table || one.values.length || at.table)
      .map(([key, one]) => ({ label: key, insert: `${key} = `, about: one.about }));
  return found
    .filter(fits)
    .sort((a, b) => first(a) - first(b))
    .slice(0, 12);
}

// The line, from 1, of the key that a fault's place names; of its table, or 0, where the key is not written.
function lineOf(text, place, problem) {
  const told = /line (\d+)/.exec(problem || "");
  if (told) return Number(told[1]);
  if (/end of document/.test(problem || "")) return text.split("\n").length;
  const parts = place.split(/[:. ]+/).filter(Boolean),
    key = parts[parts.length - 1];
  let table = "",
    fallback = 0;
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const header = lines[i].match(/^\s*\[([^\]]+)\]/);
    if (header) {
      table = header[1].trim();
      if (parts[0] && table === parts.slice(0, -1).join(".")) fallback = i + 1;
      else if (!fallback && parts[0] && table.split(".")[0] === parts[0]) fallback = i + 1;
      continue;
    }
    const here = lines[i].match(/^\s*([\w.-]+)\s*=/);
    if (
      here &&
      [table, here[1]].filter(Boolean).join(".").split(".").pop() === key &&
      (!parts[1] || table.split(".")[0] === parts[0] || here[1].startsWith(parts[0]))
    )
      return i + 1;
  }
  return fallback;
}

if (typeof module !== "undefined") module.exports = { placeAt, offersAt, lineOf };
