// Runs the calls of one client for Node, as calls.py does for Python: node calls.mjs client_openai_node
import { pathToFileURL } from "node:url";
import { join } from "node:path";

const client = await import(pathToFileURL(join(process.cwd(), `${process.argv[2]}.mjs`)));
const found = {};
for (const feature of ["chat", "stream", "tools", "structured", "responses", "batch"]) {
  if (!(feature in client)) continue;
  try {
    await client[feature]();
    found[feature] = "ok";
  } catch (error) {
    found[feature] = `${error.name}: ${error.message}`.slice(0, 500);
  }
}
console.log(JSON.stringify(found));
