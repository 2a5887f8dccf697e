/** Where the nodes of each layer stand: as near to their neighbours as the widths beside them allow. */
import type { Layers } from "./rank";

const ROUNDS = 10;

/** Middles of all nodes; `widthOf` includes the room around a node. */
export function place(layers: Layers, widthOf: (node: number) => number): number[] {
  const x = new Array<number>(layers.nodes.length).fill(0);
  for (const layer of layers.layers) settle(layer, x, widthOf, () => 0);
  for (let round = 0; round < ROUNDS; round++) {
    const isDown = round % 2 === 0;
    for (const layer of isDown ? layers.layers : [...layers.layers].reverse()) {
      settle(layer, x, widthOf, (node) => {
        const { up, down } = layers.nodes[node]!;
        const beside = isDown ? up : down;
        const among = beside.length ? beside : [...up, ...down];
        return among.length ? among.reduce((sum, other) => sum + x[other]!, 0) / among.length : x[node]!;
      });
    }
  }
  const left = Math.min(...layers.nodes.map((_, node) => x[node]! - widthOf(node) / 2));
  return x.map((middle) => middle - left);
}

/**
 * The order of `layer` stays, no two overlap, and the sum of squared distances from where they would like to be is as small as it
 * can be: isotonic regression by pooling adjacent violators, after the widths are taken out.
 */
function settle(layer: number[], x: number[], widthOf: (node: number) => number, wish: (node: number) => number): void {
  const offsets: number[] = [];
  layer.forEach((node, at) => {
    offsets.push(at ? offsets[at - 1]! + (widthOf(layer[at - 1]!) + widthOf(node)) / 2 : 0);
  });
  const pools: { mean: number; size: number }[] = [];
  layer.forEach((node, at) => {
    let pool = { mean: wish(node) - offsets[at]!, size: 1 };
    for (let last = pools.at(-1); last && last.mean > pool.mean; last = pools.at(-1)) {
      pools.pop();
      const size = last.size + pool.size;
      pool = { mean: (last.mean * last.size + pool.mean * pool.size) / size, size };
    }
    pools.push(pool);
  });
  let at = 0;
  for (const pool of pools) for (let i = 0; i < pool.size; i++, at++) x[layer[at]!] = pool.mean + offsets[at]!;
}
