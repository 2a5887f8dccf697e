/** Draws the cells of the map: all of them once, then only those that have changed, and those that flash. */
import { colourOf } from "../../model/colours";
import type { Grid, Kv, KvDirt } from "../../model/kv";
import type { Palette } from "../colours.svelte";

const FLASH_MS = 700;

export class KvPicture {
  private readonly flashes = new Map<number, number>(); // block: when it began
  private colours: string[] = [];

  constructor(
    private readonly context: CanvasRenderingContext2D,
    private readonly palette: Palette,
    readonly grid: Grid,
    private readonly isStill: boolean,
  ) {}

  /** Draws what is stale. True while something goes on flashing. */
  draw(kv: Kv, dirt: KvDirt, now_ms: number): boolean {
    for (const block of dirt.evicted) this.flashes.set(block, now_ms);
    dirt.evicted.clear();
    if (dirt.blocks === null) this.drawAll(kv);
    else for (const block of dirt.blocks) if (!this.flashes.has(block)) this.cell(kv, block);
    dirt.blocks = new Set();
    for (const [block, began_ms] of this.flashes) {
      const left = 1 - (now_ms - began_ms) / FLASH_MS;
      this.cell(kv, block);
      if (left <= 0) this.flashes.delete(block);
      else this.flash(block, this.isStill ? 1 : left);
    }
    return this.flashes.size > 0;
  }

  /** A frame round the cell that is looked at. */
  mark(block: number): void {
    const { x, y, size } = this.box(block);
    this.context.strokeStyle = this.palette.of("--accent");
    this.context.lineWidth = 2;
    this.context.strokeRect(x - 1, y - 1, size + 2, size + 2);
  }

  private drawAll(kv: Kv): void {
    this.colours = kv.states.map((state) => this.palette.of(colourOf(state)));
    const { columns, rows, cell } = this.grid;
    this.context.clearRect(-2, -2, columns * cell + 4, rows * cell + 4);
    for (let block = 0; block < kv.owner.length; block++) this.cell(kv, block);
  }

  private cell(kv: Kv, block: number): void {
    const { x, y, size } = this.box(block);
    this.context.clearRect(x - 1, y - 1, size + 2, size + 2);
    this.context.fillStyle = this.colours[kv.owner[block]!] ?? "gray";
    this.context.fillRect(x, y, size, size);
    if (kv.readers[block]! < 2) return;
    const line = size > 6 ? 1.5 : 1;
    this.context.strokeStyle = this.palette.of("--i-shared");
    this.context.lineWidth = line;
    this.context.strokeRect(x + line / 2, y + line / 2, size - line, size - line);
  }

  /** It shrinks, for a colour that fades over another is a third one, which means nothing. */
  private flash(block: number, strength: number): void {
    const { x, y, size } = this.box(block);
    const gone = (size * (1 - strength)) / 2;
    this.context.fillStyle = this.palette.of("--i-flash");
    this.context.fillRect(x + gone, y + gone, size - 2 * gone, size - 2 * gone);
  }

  private box(block: number): { x: number; y: number; size: number } {
    const { columns, cell } = this.grid;
    const gap = cell > 8 ? 2 : 1;
    return { x: (block % columns) * cell + 1, y: Math.floor(block / columns) * cell + 1, size: cell - gap };
  }
}
