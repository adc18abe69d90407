// Runs the calls of one client for Node, and the examples of its page, as calls.py does for Python:
// node calls.mjs client_openai_node PAGE
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { join } from "node:path";

const load = (name) => import(pathToFileURL(join(process.cwd(), name)));

async function page() {
  const text = readFileSync(process.argv[3], "utf8");
  const here = text.replaceAll("http://127.0.0.1:8000/v1", process.env.OPENAI_BASE_URL);
  let number = 0;
  for (const [, code] of here.matchAll(/^```js\n(.*?)^```/gms)) {
    const name = `page_${++number}.mjs`;
    writeFileSync(name, code);
    await load(name);
  }
}

const client = { ...(await load(`${process.argv[2]}.mjs`)), page };
const found = {};
for (const feature of ["chat", "stream", "tools", "structured", "responses", "batch", "page"]) {
  if (!(feature in client)) continue;
  try {
    await client[feature]();
    found[feature] = "ok";
  } catch (error) {
    found[feature] = `${error.name}: ${error.message}`.slice(0, 500);
  }
}
console.log(JSON.stringify(found));
