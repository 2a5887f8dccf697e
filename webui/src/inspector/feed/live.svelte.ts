/**
 * The inspector's state for its views. Frames wait for the next picture and are applied together; a slice's number grows with
 * each change of it, and a view that reads none of them does nothing.
 */
import type { Frame, Snapshot } from "../wire";
import { apply, begin, SLICES, type Slice, type State } from "../model/state";
import { Ring } from "../model/ring";
import { models } from "./models.svelte";
import { address, headers } from "./server.svelte";
import { FeedStream, type Link } from "./stream";

const HIDDEN_MS = 60_000; // a page that is not seen for longer lets go of the stream
const PENDING_MAX = 200; // frames: ten seconds without a picture

export class Live {
  link = $state<Link>("connecting");
  retryAt = $state<number | null>(null);
  /** Null until the first snapshot. It changes in place: read a number of `changes` beside it. */
  state = $state.raw<State | null>(null);
  /** Grows four times a second while the stream is live: for what is shown of times that pass. */
  beat = $state(0);
  changes = $state<Record<Slice, number>>({
    machines: 0,
    actors: 0,
    requests: 0,
    kv: 0,
    steps: 0,
    rates: 0,
    incidents: 0,
  });

  private readonly stream = new FeedStream(() => address(models.of("v1/inspector")), headers, {
    message: (data) => this.take(JSON.parse(data) as Snapshot | Frame),
    link: (now, retryAt) => ([this.link, this.retryAt] = [now, retryAt]),
  });
  private pending: (Snapshot | Frame)[] = [];
  private picture = 0;
  private isOver = false;
  private readonly spacings = new Ring<number>(8); // of the last frames, in seconds
  private told_ms = 0; // when the newest frame came, on the page's own clock

  /** The server's time now, as far as this page can tell. */
  now(): number {
    return this.state ? this.state.time + Math.min(1, (performance.now() - this.told_ms) / 1000) : Date.now() / 1000;
  }

  /** How far apart frames have come lately, in seconds: what is newer may not have been told yet. */
  spacing(): number {
    return Math.min(1, Math.max(0, ...this.spacings.toArray()));
  }

  /** Opens the stream; what it returns closes it. */
  start(): () => void {
    let hidden: ReturnType<typeof setTimeout> | undefined;
    const seen = () => {
      clearTimeout(hidden);
      if (document.hidden) hidden = setTimeout(() => this.stream.close(), HIDDEN_MS);
      else if (this.link === "closed") this.reopen();
    };
    const timer = setInterval(() => this.link === "live" && this.beat++, 250);
    document.addEventListener("visibilitychange", seen);
    this.reopen();
    return () => {
      this.isOver = true;
      clearTimeout(hidden);
      clearInterval(timer);
      document.removeEventListener("visibilitychange", seen);
      cancelAnimationFrame(this.picture);
      this.stream.close();
    };
  }

  /** Begin anew, as with another key. */
  reopen(): void {
    void models.look().then(() => this.isOver || this.stream.open());
  }

  /** Watch another model, of which nothing is known yet. */
  choose(model: string): void {
    models.choose(model);
    this.stream.close();
    this.pending = [];
    this.state = null;
    this.stream.open();
  }

  private take(message: Snapshot | Frame): void {
    this.pending.push(message);
    if (this.pending.length > PENDING_MAX) this.flush();
    else this.picture ||= requestAnimationFrame(() => this.flush());
  }

  private flush(): void {
    performance.mark("inspector-apply");
    cancelAnimationFrame(this.picture);
    this.picture = 0;
    const changed = new Set<Slice>();
    for (const message of this.pending) {
      if (message.type === "snapshot") {
        this.state = begin(message, this.state);
        SLICES.forEach((slice) => changed.add(slice));
      } else if (this.state) {
        this.spacings.push(message.time - this.state.time);
        apply(this.state, message).forEach((slice) => changed.add(slice));
      }
    }
    this.pending = [];
    this.told_ms = performance.now();
    for (const slice of changed) this.changes[slice]++;
    performance.measure("inspector-apply", "inspector-apply");
    performance.clearMarks("inspector-apply");
  }
}
