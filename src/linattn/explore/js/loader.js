// Starts the page from the modules that it carries: each becomes a blob, with the addresses of those that it imports.
(function start() {
  const sources = new Map();
  for (const script of document.querySelectorAll("script[data-module]")) {
    sources.set(script.dataset.module, script.textContent);
  }
  const addresses = new Map();
  const addressOf = (name) => {
    if (!addresses.has(name)) {
      if (!sources.has(name)) throw new Error(`the page has no module ${name}`);
      const text = sources.get(name).replace(/from "\.\/([\w.]+)"/g, (_, other) => `from "${addressOf(other)}"`);
      addresses.set(name, URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
    }
    return addresses.get(name);
  };
  globalThis.linattnModule = addressOf;
  import(addressOf("main.js")).catch((error) => {
    console.error(error);
    document.getElementById("status").textContent = `The page could not start: ${error.message}`;
  });
})();
