/**
 * Layers of a diagram: which box is above which, and in what order a layer has them.
 *
 * A layered drawing in the manner of Sugiyama (1981): arrows that lead back are turned round, a box is below all that lead to it,
 * arrows over several layers get a place in each, and every layer is sorted by the mean place of its neighbours.
 */

export interface Node {
  box: number; // -1: a place through which an arrow runs
  layer: number;
  up: number[]; // nodes
  down: number[];
}

export interface Layers {
  nodes: Node[];
  layers: number[][]; // nodes from left to right
  chains: { edge: number; nodes: number[]; isTurned: boolean }[]; // from the upper box to the lower one
}

const SWEEPS = 24; // the order is stable after six or so for fifteen boxes

export function rank(numBoxes: number, edges: [number, number][]): Layers {
  const turned = edges.map(([from, to]) => to < from); // tables name their states in the order of their lives
  const layerOf = longestPaths(numBoxes, edges, turned);
  const nodes: Node[] = layerOf.map((layer, box) => ({ box, layer, up: [], down: [] }));
  const chains = edges.map(([from, to], edge) => {
    const [upper, lower] = turned[edge] ? [to, from] : [from, to];
    const chain = [upper];
    for (let layer = layerOf[upper]! + 1; layer < layerOf[lower]!; layer++) {
      chain.push(nodes.push({ box: -1, layer, up: [], down: [] }) - 1);
    }
    chain.push(lower);
    chain.slice(1).forEach((node, at) => {
      nodes[chain[at]!]!.down.push(node);
      nodes[node]!.up.push(chain[at]!);
    });
    return { edge, nodes: chain, isTurned: turned[edge]! };
  });
  const layers: number[][] = Array.from({ length: Math.max(...layerOf) + 1 }, () => []);
  nodes.forEach((node, index) => layers[node.layer]!.push(index));
  return { nodes, layers: sorted(nodes, layers), chains };
}

function longestPaths(numBoxes: number, edges: [number, number][], turned: boolean[]): number[] {
  const layerOf = new Array<number>(numBoxes).fill(0);
  for (let round = 0; round < numBoxes; round++) {
    edges.forEach(([from, to], edge) => {
      const [upper, lower] = turned[edge] ? [to, from] : [from, to];
      if (upper !== lower) layerOf[lower] = Math.max(layerOf[lower]!, layerOf[upper]! + 1);
    });
  }
  return layerOf;
}

function sorted(nodes: Node[], layers: number[][]): number[][] {
  let best = layers;
  let fewest = crossings(nodes, layers);
  let now = layers;
  for (let sweep = 0; sweep < SWEEPS && fewest > 0; sweep++) {
    const isDown = sweep % 2 === 0;
    now = swept(nodes, now, isDown);
    const found = crossings(nodes, now);
    if (found < fewest) [best, fewest] = [now, found];
  }
  return best;
}

function swept(nodes: Node[], layers: number[][], isDown: boolean): number[][] {
  const next = layers.map((layer) => [...layer]);
  const order = isDown ? next : [...next].reverse();
  order.slice(1).forEach((layer, at) => {
    const places = new Map(order[at]!.map((node, place) => [node, place]));
    const weight = new Map(
      layer.map((node, place) => {
        const beside = (isDown ? nodes[node]!.up : nodes[node]!.down).map((other) => places.get(other)!);
        return [node, beside.length ? beside.reduce((sum, one) => sum + one, 0) / beside.length : place];
      }),
    );
    layer.sort((a, b) => weight.get(a)! - weight.get(b)!);
  });
  return next;
}

export function crossings(nodes: Node[], layers: number[][]): number {
  let found = 0;
  layers.slice(0, -1).forEach((layer, at) => {
    const places = new Map(layers[at + 1]!.map((node, place) => [node, place]));
    const ends = layer.flatMap((node) => nodes[node]!.down.map((to) => places.get(to)!).sort((a, b) => a - b));
    for (let i = 0; i < ends.length; i++) for (let j = i + 1; j < ends.length; j++) if (ends[j]! < ends[i]!) found++;
  });
  return found;
}
