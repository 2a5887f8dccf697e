/** Colours of custom properties for a canvas, which knows no `var()`; they are read again when the page's colours change. */

export class Palette {
  /** Grows when the colours of the page have changed: all has to be drawn again. */
  version = $state(0);
  private known = new Map<string, string>();
  private probe: HTMLElement | null = null;

  /** Colours as they are below `element`; what it returns is to be called at the end. */
  attach(element: HTMLElement): () => void {
    const probe = (this.probe = document.createElement("i"));
    probe.hidden = true;
    element.append(probe);
    const again = () => {
      this.known.clear();
      this.version++;
    };
    const system = matchMedia("(prefers-color-scheme: dark)");
    const observer = new MutationObserver(again);
    system.addEventListener("change", again);
    observer.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => {
      system.removeEventListener("change", again);
      observer.disconnect();
      probe.remove();
    };
  }

  /** A computed colour, with `light-dark()` and `var()` resolved. */
  of(property: string): string {
    let colour = this.known.get(property);
    if (colour === undefined && this.probe) {
      this.probe.style.color = `var(${property})`;
      this.known.set(property, (colour = getComputedStyle(this.probe).color));
    }
    return colour ?? "gray";
  }
}
