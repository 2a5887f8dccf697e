import { describe, expect, it } from "vitest";
import { duration } from "../../src/inspector/text/text.svelte";

describe("a duration", () => {
  it("is as short as it stays exact to a few parts in a hundred", () => {
    const said = [0, 0.00004, 0.0004, 0.012, 0.35, 1.2, 48, 185, 7260].map(duration);
    expect(said).toEqual(["0 ms", "40 µs", "0.4 ms", "12 ms", "0.35 s", "1.2 s", "48 s", "3 min 5 s", "2 h 1 min"]);
  });
});
