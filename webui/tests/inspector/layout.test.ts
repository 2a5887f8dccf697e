import { describe, expect, it } from "vitest";
import { draw, type PlacedBox } from "../../src/inspector/model/layout";
import { crossings, rank } from "../../src/inspector/model/rank";
import { graphOf } from "../../src/inspector/model/tables";
import { madeUp, REQUEST } from "./tables";

const overlap = (a: PlacedBox, b: PlacedBox) =>
  a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;

const numbers = (path: string) => [...path.matchAll(/-?\d+\.\d+/g)].map(([number]) => Number(number));

const SIZES = [4, 5, 7, 9, 12, 15].flatMap((size) => [1, 2, 3].map((seed) => ({ size, seed })));

describe("a diagram's graph", () => {
  const graph = graphOf(REQUEST);

  it("draws ends that the same states lead to as one box, named by what they share", () => {
    expect(graph.boxes.at(-1)).toEqual({
      title: "FINISHED",
      states: ["FINISHED_STOPPED", "FINISHED_LENGTH", "FINISHED_ABORTED"],
    });
    expect(graph.boxes).toHaveLength(5);
  });

  it("has one arrow for a pair of boxes, with all its events and rows", () => {
    const [decode, preempted] = [2, 3];
    const arrow = graph.arrows.find(({ from, to }) => from === decode && to === preempted)!;
    expect(arrow.events).toEqual(["Preempt", "Vacate"]);
    const ends = graph.arrows.find(({ from, to }) => from === decode && to === 4)!;
    expect(ends.rows.map(({ to }) => to)).toEqual(["FINISHED_STOPPED", "FINISHED_LENGTH", "FINISHED_ABORTED"]);
  });

  it("leaves out what is ignored or cannot come", () => {
    const ignored = { ...REQUEST, rows: REQUEST.rows.map((row) => ({ ...row, action: null })) };
    expect(graphOf(ignored).arrows).toEqual([]);
  });
});

describe("a drawing", () => {
  it.each(SIZES)(
    "of $size states (seed $seed) has no two boxes on one another, and all of it within its bounds",
    (made) => {
      const drawing = draw(graphOf(madeUp(made.size, made.seed)));
      drawing.boxes.forEach((box, at) => {
        for (const other of drawing.boxes.slice(at + 1)) expect(overlap(box, other)).toBe(false);
        expect(box.x).toBeGreaterThanOrEqual(0);
        expect(box.x + box.width).toBeLessThanOrEqual(drawing.width);
        expect(box.y + box.height).toBeLessThanOrEqual(drawing.height);
      });
      for (const { path } of drawing.arrows) {
        numbers(path).forEach((number, at) => {
          expect(number).toBeGreaterThanOrEqual(0);
          expect(number).toBeLessThanOrEqual(at % 2 ? drawing.height : drawing.width);
        });
      }
    },
  );

  it.each(SIZES)("of $size states (seed $seed) is the same each time", (made) => {
    expect(draw(graphOf(madeUp(made.size, made.seed)))).toEqual(draw(graphOf(madeUp(made.size, made.seed))));
  });

  it("begins and ends each arrow at the edges of its boxes, also where it leads back", () => {
    const graph = graphOf(REQUEST);
    const drawing = draw(graph);
    graph.arrows.forEach(({ from, to }, at) => {
      const { path, head, isLoop } = drawing.arrows[at]!;
      const [startX, startY] = numbers(path);
      const [endX, endY] = numbers(head);
      const [source, target] = [drawing.boxes[from]!, drawing.boxes[to]!];
      if (isLoop) return;
      const near = (y: number, box: PlacedBox) => Math.min(Math.abs(y - box.y), Math.abs(y - box.y - box.height));
      expect(near(startY!, source)).toBeLessThan(0.1);
      expect(near(endY!, target)).toBeLessThan(0.1);
      expect(startX).toBeGreaterThan(source.x);
      expect(startX).toBeLessThan(source.x + source.width);
      expect(endX).toBeGreaterThan(target.x);
      expect(endX).toBeLessThan(target.x + target.width);
    });
  });

  it("draws an event that leaves a state as it is as a loop beside its box", () => {
    const graph = graphOf(REQUEST);
    const at = graph.arrows.findIndex(({ from, to }) => from === to);
    const drawing = draw(graph);
    const box = drawing.boxes[graph.arrows[at]!.from]!;
    expect(drawing.arrows[at]!.isLoop).toBe(true);
    expect(drawing.arrows[at]!.label.x).toBeGreaterThan(box.x + box.width);
  });
});

describe("layers", () => {
  it("have every box below all that lead to it from earlier states", () => {
    const { nodes } = rank(4, [
      [0, 1],
      [1, 2],
      [0, 2],
      [2, 3],
      [3, 0],
    ]);
    expect(nodes.slice(0, 4).map(({ layer }) => layer)).toEqual([0, 1, 2, 3]);
  });

  it("are ordered so that arrows which need not cross do not", () => {
    const { nodes, layers } = rank(4, [
      [0, 3],
      [1, 2],
    ]);
    expect(crossings(nodes, layers)).toBe(0);
  });
});
