import { expect, test } from "vitest";
import { blocksOf } from "../../../src/chat/text/markdown";
import { mathOf } from "../../../src/chat/text/math";

const html = (text: string): string => blocksOf(text).join("");

test("each block is one, and what comes behind changes none before it", () => {
  const text = "# One\n\nTwo\nlines\n\n- a\n- b\n\n| x | y |\n| - | - |\n| 1 | 2 |\n\n";
  const blocks = blocksOf(text);
  expect(blocks.length).toBe(4);
  expect(blocks[1]).toContain("<br>");
  expect(blocksOf(`${text}The end`).slice(0, 4)).toEqual(blocks);
});

test("code stays text", () => {
  expect(html('```html\n<b onclick="x()">\n```')).toContain("&lt;b onclick=");
});

test("HTML, images and addresses that run something are none", () => {
  const evil = "<b>x</b> ![a](https://e.example/a.png) [b](javascript:alert(1)) [c](https://e.example)";
  expect(html(evil)).not.toMatch(/<b>|<img|href="javascript/);
  expect(html(evil)).toContain('href="https://e.example/a.png"');
});

test.each([
  ["$x^2$", 'data-formula="line">x^2<'],
  ["\\(x\\)", 'data-formula="line">x<'],
  ["$$a < b$$", 'data-formula="display">a &lt; b<'],
  ["\\[x\\]", 'data-formula="display">x<'],
])("%s is a formula", (text, wanted) => {
  expect(html(text)).toContain(wanted);
});

test.each(["$5 and $10", "costs $5", "`$x$`", "\\$x$", "$ x $"])("%s is none", (text) => {
  expect(html(text)).not.toContain("data-formula");
});

test("TeX becomes MathML without styles, addresses and its source, and what is no TeX nothing", () => {
  const math = mathOf("\\frac{x}{2} \\href{javascript:alert(1)}{y}", true);
  expect(math).toContain("<mfrac>");
  expect(math).not.toMatch(/style=|href=|frac\{/);
  expect(mathOf("\\frac{", false)).toBeNull();
});

test.each(["- ", "> ", "1. ", "> - "])("what is nested without end in %j is there to its last word", (mark) => {
  const deep = html(`${mark.repeat(200)}the *last* word\n\nThe end.`);
  expect(deep).toMatch(/the <em>last<\/em> word/);
  expect(deep).toMatch(/The end\.\s*(<\/p>)?\s*$/);
  expect(deep.match(/<(ul|ol|blockquote)>/g)!.length).toBeLessThanOrEqual(80);
});

test("each item of a list without end is a line", () => {
  const items = Array.from({ length: 200 }, (_, level) => `${"  ".repeat(level)}- item ${level}`);
  const deep = html([...items, "", "The end."].join("\n"));
  for (let level = 0; level < 200; level++) expect(deep).toMatch(new RegExp(`(>|- )item ${level}\\s*<`));
  expect(deep).toMatch(/The end\.\s*(<\/p>)?\s*$/);
});
