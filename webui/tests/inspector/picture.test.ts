import { expect, it } from "vitest";
import { KvPicture } from "../../src/inspector/view/kv/picture";
import type { Palette } from "../../src/inspector/view/colours.svelte";

it("outlines the cells that have several readers, and no others", () => {
  const outlined: number[] = [];
  const context = {
    clearRect: () => {},
    fillRect: () => {},
    strokeRect: (x: number) => outlined.push(Math.floor(x / 20)),
  } as unknown as CanvasRenderingContext2D;
  const palette = { of: (name: string) => name } as Palette;
  const picture = new KvPicture(context, palette, { columns: 4, rows: 1, cell: 20 }, true);
  const kv = {
    ...{ layout: "blocks" as const, blockSize: 16, states: ["FREE", "DECODE"], hostTotal: 0, hostUsed: 0 },
    owner: Uint8Array.of(0, 1, 1, 1),
    readers: Uint8Array.of(0, 1, 2, 3),
  };
  const dirt = { blocks: null as Set<number> | null, evicted: new Set<number>() };
  picture.draw(kv, dirt, 0);
  expect(outlined).toEqual([2, 3]);
  kv.readers[1] = 2;
  dirt.blocks!.add(1);
  picture.draw(kv, dirt, 1);
  expect(outlined).toEqual([2, 3, 1]);
});
