/**
 * The inspector on a feed that is made up, to look at it without a server that is busy: `npx vite --config tests/inspector/vite.config.ts`,
 * then /inspector. `RUNNING` says how many requests run (32; 0: the server's own feed), `SERVER` where the endpoints come from that are not made up.
 */
import { svelte } from "@sveltejs/vite-plugin-svelte";
import type { ServerResponse } from "node:http";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";
import type * as Feed from "./generated";

const FRAME_MS = 50;
const root = fileURLToPath(new URL("../..", import.meta.url));

function madeUp(): Plugin {
  return {
    name: "made-up-feed",
    configureServer(server) {
      server.middlewares.use("/v1/inspector", (_request, reply: ServerResponse) => {
        void server.ssrLoadModule("/tests/inspector/generated.ts").then((module) => {
          const { Generated } = module as typeof Feed;
          const feed = new Generated(Number(process.env.RUNNING ?? 32), Date.now() / 1000);
          const send = (event: object) => reply.write(`data: ${JSON.stringify(event)}\n\n`);
          reply.writeHead(200, { "content-type": "text/event-stream" });
          for (let frame = 200; frame > 0; frame--) feed.frame(Date.now() / 1000 - frame * 0.05);
          send(feed.snapshot(Date.now() / 1000));
          const timer = setInterval(() => send(feed.frame(Date.now() / 1000)), FRAME_MS);
          reply.on("close", () => clearInterval(timer));
        });
      });
    },
  };
}

export default defineConfig({
  root,
  plugins: [svelte(), ...(process.env.RUNNING === "0" ? [] : [madeUp()])],
  server: { proxy: { "/v1/": process.env.SERVER ?? "http://127.0.0.1:8000" } },
});
