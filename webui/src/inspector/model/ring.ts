/** The newest `limit` values, the oldest first: what a sparkline or a list of "the last hundred" keeps. */
export class Ring<T> {
  private readonly kept: T[] = [];
  private start = 0;

  constructor(readonly limit: number) {}

  get length(): number {
    return this.kept.length;
  }

  push(value: T): void {
    if (this.kept.length < this.limit) {
      this.kept.push(value);
    } else {
      this.kept[this.start] = value;
      this.start = (this.start + 1) % this.limit;
    }
  }

  /** The value at `index`, counted from the oldest; negative: from the newest. */
  at(index: number): T | undefined {
    const from = index < 0 ? this.kept.length + index : index;
    return from < 0 || from >= this.kept.length ? undefined : this.kept[(this.start + from) % this.kept.length];
  }

  toArray(): T[] {
    return [...this.kept.slice(this.start), ...this.kept.slice(0, this.start)];
  }
}
