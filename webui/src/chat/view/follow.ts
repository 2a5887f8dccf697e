/**
 * Scrolling that stays at the end while the reader is there. Any move of the reader's upwards lets go; coming back to the end holds on
 * again. What grows is watched, so that text, formulas that load late and notices all count.
 */
const END_PX = 32; // nearer to the end than this is at the end: less than two lines

export class Follow {
  #isHeld = true;
  #lastTop = 0;
  #scroller: HTMLElement | null = null;

  constructor(private readonly onChange: (isAtEnd: boolean) => void) {}

  /** Svelte's attachment for what scrolls; its only child is what grows. */
  attach = (scroller: HTMLElement): (() => void) => {
    this.#scroller = scroller;
    const watcher = new ResizeObserver(() => this.#isHeld && this.#jump());
    watcher.observe(scroller);
    for (const child of scroller.children) watcher.observe(child);
    const onScroll = (): void => this.#scrolled();
    scroller.addEventListener("scroll", onScroll, { passive: true });
    this.#jump();
    return () => {
      watcher.disconnect();
      scroller.removeEventListener("scroll", onScroll);
      this.#scroller = null;
    };
  };

  /** Back to the end, and stay there. */
  toEnd(): void {
    this.#hold(true);
    this.#jump();
  }

  #jump(): void {
    if (this.#scroller === null) return;
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#lastTop = this.#scroller.scrollTop;
  }

  #scrolled(): void {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller!;
    const isAtEnd = scrollHeight - clientHeight - scrollTop <= END_PX;
    if (isAtEnd) this.#hold(true);
    else if (scrollTop < this.#lastTop) this.#hold(false);
    this.#lastTop = scrollTop;
  }

  #hold(isHeld: boolean): void {
    if (isHeld === this.#isHeld) return;
    this.#isHeld = isHeld;
    this.onChange(isHeld);
  }
}
