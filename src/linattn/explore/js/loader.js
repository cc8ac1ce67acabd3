// Starts the page from the modules that it carries. A page opened from a file cannot import modules in a worker, so each
// module becomes a function of a plain script: `import { a } from "./b.js"` reads what b.js returned.
(function start() {
  const sources = new Map();
  for (const script of document.querySelectorAll("script[data-module]")) {
    sources.set(script.dataset.module, script.textContent);
  }
  const IMPORT = /^import \{([^}]*)\} from "\.\/([\w.]+)";$/gm;
  const EXPORT = /^export (?=(?:async )?(?:function\*?|const|let|class) (\w+))/gm;
  const EXPORT_LIST = /^export \{ ([\w, ]+) \};$/gm;

  /** The module and what it imports, the imported ones first. */
  function needed(name, found = []) {
    if (found.includes(name)) return found;
    if (!sources.has(name)) throw new Error(`the page has no module ${name}`);
    for (const [, , other] of sources.get(name).matchAll(IMPORT)) needed(other, found);
    found.push(name);
    return found;
  }

  /** A script that runs a module with all that it needs. */
  function scriptOf(entry) {
    const parts = needed(entry).map((name) => {
      const text = sources.get(name);
      const names = [...text.matchAll(EXPORT)].map((match) => match[1]);
      for (const [, list] of text.matchAll(EXPORT_LIST)) names.push(...list.split(", "));
      const body = text
        .replace(IMPORT, (_, imported, other) => `const {${imported}} = modules["${other}"];`)
        .replace(EXPORT_LIST, "")
        .replace(EXPORT, "");
      return `modules["${name}"] = (() => {\n${body}\nreturn { ${names.join(", ")} };\n})();`;
    });
    return `"use strict";\nconst modules = {};\n${parts.join("\n")}\n`;
  }

  globalThis.linattnWorker = (name) => URL.createObjectURL(new Blob([scriptOf(name)], { type: "text/javascript" }));
  try {
    const run = new Function(`${scriptOf("main.js")}return modules;\n//# sourceURL=explorer.js`);
    globalThis.linattnModules = run();
  } catch (error) {
    document.getElementById("status").textContent = `The page could not start: ${error.message}`;
    throw error;
  }
})();
