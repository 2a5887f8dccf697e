/** Draws the flame: a row for each phase, under them the tokens of each step against the budget, and its sequences. */
import { colourOf } from "../../model/colours";
import { bars, gaps, PHASES, type Bar } from "../../model/steps";
import type { StepNow } from "../../wire";
import type { Palette } from "../colours.svelte";

export const ROW = 24; // px
export const FLAME_HEIGHT = PHASES.length * ROW;
const BATCH_HEIGHT = 72;
const BATCH_GAP = 14;
export const HEIGHT = FLAME_HEIGHT + BATCH_GAP + BATCH_HEIGHT;

export interface Scene {
  steps: StepNow[];
  until: number;
  window_s: number;
  width: number;
  labels: Record<(typeof PHASES)[number], string>;
}

export function drawFlame(context: CanvasRenderingContext2D, palette: Palette, scene: Scene): Bar[] {
  context.clearRect(0, 0, scene.width, HEIGHT);
  const seen = bars(scene.steps, scene.until, scene.window_s);
  const perSecond = scene.width / scene.window_s;
  rows(context, palette, scene);
  untold(context, palette, scene, perSecond);
  for (const { phase, row, left, took, step } of seen) {
    context.fillStyle = palette.of(step.is_failed ? "--i-failed" : colourOf(phase));
    context.fillRect(left * perSecond, row * ROW + 3, Math.max(1, took * perSecond - 0.5), ROW - 6);
  }
  batches(context, palette, scene, perSecond);
  names(context, palette, scene);
  return seen;
}

function rows(context: CanvasRenderingContext2D, palette: Palette, { width }: Scene): void {
  context.fillStyle = palette.of("--bg-sunk");
  for (let row = 0; row < PHASES.length; row++) context.fillRect(0, row * ROW + 1, width, ROW - 2);
}

/** Steps of which nothing was told leave a gap, which is no pause of the engine. */
function untold(context: CanvasRenderingContext2D, palette: Palette, scene: Scene, perSecond: number): void {
  const from = scene.until - scene.window_s;
  context.fillStyle = palette.of("--i-free");
  for (const { began, ended } of gaps(scene.steps, scene.until, scene.window_s)) {
    const [left, width] = [(began - from) * perSecond, (ended - began) * perSecond];
    for (let row = 0; row < PHASES.length; row++) context.fillRect(left, row * ROW + 1, width, ROW - 2);
  }
}

/** Under the flame, on its time: a bar of tokens for each step, and a line of sequences. */
function batches(context: CanvasRenderingContext2D, palette: Palette, scene: Scene, perSecond: number): void {
  const [from, bottom] = [scene.until - scene.window_s, HEIGHT - 1];
  const inSight = scene.steps.filter(({ began }) => began >= from - 0.5 && began <= scene.until);
  // Both on one scale, up to the fullest step in sight: against the budget, a step that only decodes would be a hair.
  const most = 1.1 * Math.max(8, ...inSight.map(({ num_tokens, num_seqs }) => Math.max(num_tokens, num_seqs)));
  context.fillStyle = palette.of("--bg-sunk");
  context.fillRect(0, FLAME_HEIGHT + BATCH_GAP, scene.width, BATCH_HEIGHT);
  context.fillStyle = palette.of("--i-prefill");
  for (const { began, phases, num_tokens } of inSight) {
    const took = phases.reduce((sum, { began_ms, took_ms }) => Math.max(sum, began_ms + took_ms), 1) / 1000;
    const height = Math.max(1, (num_tokens / most) * (BATCH_HEIGHT - 4));
    context.fillRect((began - from) * perSecond, bottom - height, Math.max(1, took * perSecond - 0.5), height);
  }
  context.strokeStyle = palette.of("--i-send");
  context.lineWidth = 1.5;
  context.beginPath();
  inSight.forEach(({ id, began, num_seqs }, at) => {
    const y = bottom - (num_seqs / most) * (BATCH_HEIGHT - 4);
    context[inSight[at - 1]?.id === id - 1 ? "lineTo" : "moveTo"]((began - from) * perSecond, y);
  });
  context.stroke();
}

function names(context: CanvasRenderingContext2D, palette: Palette, { labels }: Scene): void {
  context.font = `12px ${getComputedStyle(context.canvas).fontFamily}`;
  context.textBaseline = "middle";
  PHASES.forEach((phase, row) => {
    const said = labels[phase];
    context.fillStyle = palette.of("--bg-raised");
    context.fillRect(4, row * ROW + 4, context.measureText(said).width + 10, ROW - 8);
    context.fillStyle = palette.of("--text");
    context.fillText(said, 9, row * ROW + ROW / 2);
  });
}
