/** The drawing of a machine: where its boxes stand, how its arrows run, and where their counts fit. Pure and deterministic. */
import { place } from "./place";
import { rank, type Layers } from "./rank";
import type { Graph } from "./tables";

export interface Point {
  x: number;
  y: number;
}

export interface PlacedBox {
  x: number; // of its left upper corner
  y: number;
  width: number;
  height: number;
}

export interface PlacedArrow {
  path: string; // of an SVG
  head: string; // points of the triangle at its end
  label: Point; // the middle of its count
  isLoop: boolean;
}

export interface Drawing {
  width: number;
  height: number;
  boxes: PlacedBox[];
  arrows: PlacedArrow[]; // in the order of the graph's
}

export const LINE_HEIGHT = 17;
export const LABEL = { width: 40, height: 15 };
const CHARACTER = 7.3; // the width of one, at 12 px of a fixed-width font
const PAD = 14;
const GAP = 22; // between boxes of a layer
const LANE = 26; // of an arrow that passes a layer
const LAYER_GAP = 58;
const LOOP = 34;
const MARGIN = 12;
const HEAD = 7;

export function boxSize(graph: Graph, index: number): { width: number; height: number } {
  const { title, states } = graph.boxes[index]!;
  const lines = states.length > 1 ? [title, ...states.map((state) => state.slice(title.length))] : [title];
  const longest = Math.max(...lines.map((line) => line.length)) + 4; // and its count
  return { width: Math.max(76, longest * CHARACTER + 2 * PAD), height: 18 + lines.length * LINE_HEIGHT };
}

export function draw(graph: Graph): Drawing {
  const sizes = graph.boxes.map((_, index) => boxSize(graph, index));
  const loops = new Set(graph.arrows.filter(({ from, to }) => from === to).map(({ from }) => from));
  const plain = graph.arrows.map((arrow, index) => ({ arrow, index })).filter(({ arrow }) => arrow.from !== arrow.to);
  const layers = rank(
    graph.boxes.length,
    plain.map(({ arrow }): [number, number] => [arrow.from, arrow.to]),
  );
  const x = place(layers, (node) => {
    const { box } = layers.nodes[node]!;
    return box < 0 ? LANE : sizes[box]!.width + GAP + (loops.has(box) ? 2 * LOOP : 0);
  });
  const tops = layerTops(layers, sizes);
  const boxes = sizes.map(({ width, height }, box) => {
    const { layer } = layers.nodes[box]!;
    const room = tops.heights[layer]! - height;
    return { x: MARGIN + x[box]! - width / 2, y: tops.tops[layer]! + room / 2, width, height };
  });
  const arrows = new Array<PlacedArrow>(graph.arrows.length);
  const taken: PlacedBox[] = [...boxes];
  route(layers, x, tops, boxes).forEach((points, at) => {
    arrows[plain[at]!.index] = curve(points, taken);
  });
  graph.arrows.forEach((arrow, index) => {
    if (arrow.from === arrow.to) arrows[index] = loop(boxes[arrow.from]!);
  });
  const right = Math.max(...boxes.map((box, at) => box.x + box.width + (loops.has(at) ? LOOP + LABEL.width : 0)));
  const lanes = layers.nodes.map((_, node) => MARGIN + x[node]! + LANE / 2);
  return { width: Math.max(right, ...lanes) + MARGIN, height: tops.bottom + MARGIN, boxes, arrows };
}

interface Tops {
  tops: number[];
  heights: number[];
  bottom: number;
}

function layerTops(layers: Layers, sizes: { height: number }[]): Tops {
  const heights = layers.layers.map((nodes) =>
    Math.max(...nodes.map((node) => sizes[layers.nodes[node]!.box]?.height ?? 0)),
  );
  let y = MARGIN;
  const tops = heights.map((height) => {
    const top = y;
    y += height + LAYER_GAP;
    return top;
  });
  return { tops, heights, bottom: y - LAYER_GAP };
}

/** The points of each chain, in the direction of its arrow. Ends on one side of a box stand apart, in the order of where they lead. */
function route(layers: Layers, x: number[], { tops, heights }: Tops, boxes: PlacedBox[]): Point[][] {
  const ports = new Map<string, { chain: number; toward: number }[]>();
  layers.chains.forEach(({ nodes }, chain) => {
    const add = (key: string, toward: number) => ports.set(key, [...(ports.get(key) ?? []), { chain, toward }]);
    add(`${nodes[0]} down`, x[nodes[1]!]!);
    add(`${nodes.at(-1)} up`, x[nodes.at(-2)!]!);
  });
  const portAt = (box: number, side: "up" | "down", chain: number): Point => {
    const all = [...ports.get(`${box} ${side}`)!].sort((a, b) => a.toward - b.toward || a.chain - b.chain);
    const { x: left, y: top, width, height } = boxes[box]!;
    const at = all.findIndex((port) => port.chain === chain);
    return { x: left + (width * (at + 1)) / (all.length + 1), y: side === "up" ? top : top + height };
  };
  return layers.chains.map(({ nodes, isTurned }, chain) => {
    const inner = nodes.slice(1, -1).flatMap((node) => {
      const { layer } = layers.nodes[node]!;
      const middle = MARGIN + x[node]!;
      return [
        { x: middle, y: tops[layer]! },
        { x: middle, y: tops[layer]! + heights[layer]! },
      ];
    });
    const points = [portAt(nodes[0]!, "down", chain), ...inner, portAt(nodes.at(-1)!, "up", chain)];
    return isTurned ? points.reverse() : points;
  });
}

function curve(points: Point[], taken: PlacedBox[]): PlacedArrow {
  const end = points.at(-1)!;
  const down = end.y > points.at(-2)!.y ? 1 : -1;
  const stops = [...points.slice(0, -1), { x: end.x, y: end.y - down * HEAD }];
  let path = `M${point(stops[0]!)}`;
  const along: Point[] = [];
  for (let at = 1; at < stops.length; at++) {
    const [a, b] = [stops[at - 1]!, stops[at]!];
    const middle = (a.y + b.y) / 2;
    path += `C${point({ x: a.x, y: middle })} ${point({ x: b.x, y: middle })} ${point(b)}`;
    for (const t of [0.5, 0.35, 0.65, 0.22, 0.78]) along.push(bezier(a, b, middle, t));
  }
  const base = end.y - down * HEAD;
  const head = `${point(end)} ${point({ x: end.x - 4, y: base })} ${point({ x: end.x + 4, y: base })}`;
  return { path, head, label: free(along, taken), isLoop: false };
}

function loop({ x, y, width, height }: PlacedBox): PlacedArrow {
  const [right, middle] = [x + width, y + height / 2];
  const out = right + LOOP;
  const path = `M${point({ x: right, y: middle - 9 })}C${point({ x: out, y: middle - 22 })} ${point({ x: out, y: middle + 22 })} ${point({ x: right + HEAD - 1, y: middle + 9 })}`;
  const tip = { x: right, y: middle + 9 };
  const head = `${point(tip)} ${point({ x: right + HEAD, y: tip.y - 5 })} ${point({ x: right + HEAD + 1, y: tip.y + 3 })}`;
  return { path, head, label: { x: right + LOOP - 6 + LABEL.width / 2, y: middle }, isLoop: true };
}

/** The first of `candidates` where a count covers no box and no other count; where there is none, the first. */
function free(candidates: Point[], taken: PlacedBox[]): Point {
  const covers = ({ x, y }: Point) =>
    taken.some(
      (other) =>
        x + LABEL.width / 2 > other.x &&
        x - LABEL.width / 2 < other.x + other.width &&
        y + LABEL.height / 2 > other.y &&
        y - LABEL.height / 2 < other.y + other.height,
    );
  const found = candidates.find((candidate) => !covers(candidate)) ?? candidates[0]!;
  taken.push({ x: found.x - LABEL.width / 2, y: found.y - LABEL.height / 2, ...LABEL });
  return found;
}

function bezier(a: Point, b: Point, middle: number, t: number): Point {
  const s = 1 - t;
  const [w0, w1, w2, w3] = [s * s * s, 3 * s * s * t, 3 * s * t * t, t * t * t];
  return { x: (w0 + w1) * a.x + (w2 + w3) * b.x, y: w0 * a.y + (w1 + w2) * middle + w3 * b.y };
}

const point = ({ x, y }: Point) => `${x.toFixed(1)},${y.toFixed(1)}`;
