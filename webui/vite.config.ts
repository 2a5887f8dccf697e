import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";

/** Relative addresses, so that the page works below any `--root-path`; names that change with what they hold. */
export default defineConfig({
  base: "./",
  plugins: [svelte()],
  build: {
    outDir: "../server/page/built",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the policy of contents allows no data: scripts, and names are hashed anyway
    modulePreload: { polyfill: false },
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8000", "/readyz": "http://127.0.0.1:8000" } },
  test: { environment: "happy-dom", include: ["tests/**/*.test.ts"] },
});
