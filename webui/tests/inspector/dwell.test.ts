import { mount, unmount } from "svelte";
import { afterEach, expect, it } from "vitest";
import Dwell from "../../src/inspector/view/actors/Dwell.svelte";

let shown: Record<string, unknown> | undefined;

afterEach(() => shown && unmount(shown));

it.each([
  [1, 10, ""],
  [8, 10, "near"],
  [12, 10, "late"],
  [12, null, null],
])("after %s s of %s the bar is %j", (dwell_s, deadline_s, look) => {
  shown = mount(Dwell, { target: document.body, props: { dwell_s, deadline_s } });
  const bar = document.querySelector(".bar div");
  if (look === null) expect(bar).toBeNull();
  else expect(["near", "late"].filter((name) => bar!.classList.contains(name)).at(-1) ?? "").toBe(look);
});
