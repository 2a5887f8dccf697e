import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { brotliCompressSync, constants, gzipSync } from "node:zlib";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";
import type { Plugin } from "vite";

const COMPRESSED = /\.(css|html|js|json|svg)$/; // fonts and images are already

/** Each file's compressed forms beside it: the server sends them as they are, and compresses nothing itself. */
function compressed(): Plugin {
  let folder = "";
  return {
    name: "compressed",
    apply: "build",
    configResolved(config) {
      folder = config.build.outDir;
    },
    closeBundle() {
      for (const entry of readdirSync(folder, { recursive: true, withFileTypes: true })) {
        const path = join(entry.parentPath, entry.name);
        if (!entry.isFile() || !COMPRESSED.test(path) || path.includes(".vite")) continue;
        const data = readFileSync(path);
        const best = { [constants.BROTLI_PARAM_QUALITY]: 11, [constants.BROTLI_PARAM_SIZE_HINT]: data.length };
        writeFileSync(`${path}.br`, brotliCompressSync(data, { params: best }));
        writeFileSync(`${path}.gz`, gzipSync(data, { level: 9 }));
      }
    },
  };
}

/** KaTeX's fonts in the one form that every browser with modules takes: 0.3 MB of the 1.2 that it names. */
function oneFontFormat(): Plugin {
  return {
    name: "one-font-format",
    enforce: "pre",
    transform(code, id) {
      if (!/katex(\.min)?\.css/.test(id)) return null;
      return code.replace(/,\s*url\([^)]*\.(woff|ttf)\)\s*format\(["'](woff|truetype)["']\)/g, "");
    },
  };
}

/** Relative addresses, so that the page works below any `--root-path`; names that change with what they hold. */
export default defineConfig({
  base: "./",
  plugins: [oneFontFormat(), svelte(), compressed()],
  build: {
    outDir: "../server/page/built",
    emptyOutDir: true,
    manifest: true, // which script needs which: the test of the budget reads it
    target: "es2022",
    assetsInlineLimit: 0, // the policy of contents allows no data: scripts, and names are hashed anyway
    modulePreload: { polyfill: false },
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8000", "/readyz": "http://127.0.0.1:8000" } },
  // Tests are of what runs in a browser: there Svelte has another half than on a server.
  resolve: process.env.VITEST ? { conditions: ["browser"] } : {},
  test: { environment: "happy-dom", include: ["tests/**/*.test.ts"] },
});
